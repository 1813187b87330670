# SPDX-License-Identifier: Apache-2.0
"""What step_cost.py and micro_step_cost.py step: engines with stock's optimizer or ours, models, counts and memory."""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

SWITCHES = ("coalesce_grad_norms", "batch_optimizer_step", "coalesce_persistent_gather", "skip_redundant_release")
OPTIMIZERS = {
    "torch AdamW": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "FusedAdam": {"type": "AdamW", "params": {"lr": 1e-3}},
}
PRECISIONS: dict[str, dict[str, Any]] = {"bf16": {"bf16": {"enabled": True}}, "fp32": {}}
# GLM-4.5-Air: the layers that its sub-groups come from, at its true number of layers.
LAYERS = 46
BATCH = 1
TOKENS = 8
VOCABULARY = 128


def tiny_glm() -> nn.Module:
    """GLM-4.5-Air's structure, 46 layers and 735 parameters, at tiny widths."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(1)
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        attention_bias=True,
    )
    model: nn.Module = Glm4MoeForCausalLM(config)
    return model


class ManyParameters(nn.Module):
    """Parameters of the given sizes and nothing else.

    Args:
        sizes: Elements of each.
        device: Where they are made.
        dtype: Their dtype.
    """

    def __init__(self, sizes: list[int], device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.all = nn.ParameterList(
            nn.Parameter(torch.full((size,), 0.01, device=device, dtype=dtype)) for size in sizes
        )

    def forward(self, scale: float) -> torch.Tensor:
        """A loss in which every parameter has a gradient."""
        return torch.stack([parameter.square().sum() for parameter in self.all]).sum() * scale


def calls_in(function: Callable[[], Any]) -> int:
    """How many functions of Python's and C's are called while another one runs, in this thread.

    Args:
        function: The one that runs.
    """
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def switches(**on: bool) -> Any:
    """Our optimizer with the given parts of the step on, the others off.

    Args:
        **on: Parts to switch on; none of them means all.
    """
    from lightning_zero3.optimizer.switches import Switches

    chosen = {name: on.get(name, not on) for name in SWITCHES}
    # The alias gives memory, not time; the comparison is of steps over the same tensors.
    return Switches(alias_master_weights=False, **chosen)


def build(
    model: nn.Module, chosen: Any, *, optimizer: str, precision: str, zero: dict[str, Any], device: str = "cpu"
) -> Any:
    """An engine around a model.

    Args:
        model: GLM, or any other.
        chosen: Switches, or None for upstream's own optimizer.
        optimizer: A key of ``OPTIMIZERS``.
        precision: A key of ``PRECISIONS``.
        zero: Entries of ``zero_optimization``.
        device: cpu or cuda.
    """
    from deepspeed.runtime.zero import stage3

    from lightning_zero3.engine import build_training_engine
    from lightning_zero3.moe.expert_parallel import find_target
    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer
    from lightning_zero3.optimizer.switches import Switches
    from lightning_zero3.substitution import substituted

    experts = hasattr(getattr(model, "config", None), "n_routed_experts")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 500_000, **zero},
        **PRECISIONS[precision],
    }
    if experts:
        ranks = torch.distributed.get_world_size()
        config["expert_parallel"] = {"enabled": True, "autoep_size": ranks, "preset_model": "deepseek_v3"}
    stock_class = stage3.DeepSpeedZeroOptimizer_Stage3
    bind = FastStage3Optimizer.with_switches if chosen is not None else lambda _: stock_class
    with substituted(FastStage3Optimizer, "with_switches", bind), one_group_per_expert_tensor():
        engine, _ = build_training_engine(
            model,
            config=config,
            optimizer=None,
            lr_scheduler=None,
            local_rank=torch.cuda.current_device() if device == "cuda" else torch.distributed.get_rank(),
            switches=chosen or Switches(),
            target=find_target(model) if experts else None,
        )
    return engine


@contextlib.contextmanager
def one_group_per_expert_tensor() -> Iterator[None]:
    """At full width an expert tensor fills a parameter group; at tiny widths the limit has to be tiny too."""
    from deepspeed.moe import utils

    split = utils.split_params_into_different_moe_groups_for_optimizer
    before = split.__defaults__
    split.__defaults__ = (1,)
    try:
        yield
    finally:
        split.__defaults__ = before


def backward(engine: Any, step: int) -> None:
    """A real forward and backward pass, other data on every rank and step."""
    if isinstance(engine.module, ManyParameters):
        engine.backward(engine(1.0 + 0.1 * step))
        return
    generator = torch.Generator().manual_seed(97 * step + torch.distributed.get_rank())
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)


class CountCollectives:
    """Counts calls to the collectives of ``deepspeed.comm`` while it is entered."""

    NAMES = ("all_reduce", "all_gather_into_tensor", "all_gather", "broadcast", "reduce_scatter_tensor", "barrier")

    def __init__(self) -> None:
        self.count = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CountCollectives:
        from deepspeed import comm

        from lightning_zero3.substitution import substituted

        for name in self.NAMES:
            self._stack.enter_context(substituted(comm, name, self._counted(getattr(comm, name))))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _counted(self, function: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return function(*arguments, **named)

        return counted


def _alive(reference: Any) -> bool:
    return not reference.expired()


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensor storage that were live after any operation, beyond those at the start.

    Storages are counted once, however many tensors view them. Works on any device, and so on a CPU, which has no
    allocator statistics; what an operator allocates and frees within itself isn't seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._old: dict[int, tuple[StorageWeakRef, int]] = {}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        # What was live at the start is looked through now and then, what is new after every operation.
        self._old_bytes, self._operations = 0, 0
        gc.collect()
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor):
                self._add(thing)
        self._old, self._live = self._live, {}
        self._start = self._count_old()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what lives after it."""
        result = function(*args, **(kwargs or {}))
        for thing in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(thing, torch.Tensor):
                self._add(thing)
        self.peak = max(self.peak, self._total() - self._start)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return
        reference = StorageWeakRef(storage)
        known = self._live.get(reference.cdata) or self._old.get(reference.cdata)
        if known is None or not _alive(known[0]):
            self._live[reference.cdata] = (reference, storage.nbytes())

    def _count_old(self) -> int:
        self._old = {key: value for key, value in self._old.items() if _alive(value[0])}
        self._old_bytes = sum(size for _, size in self._old.values())
        return self._old_bytes

    def _total(self) -> int:
        self._operations += 1
        if self._operations % 500 == 0:
            self._count_old()
        self._live = {key: value for key, value in self._live.items() if _alive(value[0])}
        return self._old_bytes + sum(size for _, size in self._live.values())


class Floor:
    """One update of the same flat tensors by the same optimizer, and one all-reduce.

    Args:
        engine: Whose masters' sizes and optimizer are taken.
    """

    def __init__(self, engine: Any) -> None:
        stage3 = engine.optimizer
        tensors = [nn.Parameter(torch.randn_like(master)) for master in stage3.fp32_partitioned_groups_flat]
        inner = stage3.optimizer
        accepted = inspect.signature(type(inner)).parameters
        self._optimizer = type(inner)(tensors, **{k: v for k, v in inner.defaults.items() if k in accepted})
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        self._norms = torch.zeros(len(tensors), dtype=torch.float64, device=tensors[0].device)

    def step(self) -> None:
        """Do it."""
        self._optimizer.step()
        torch.distributed.all_reduce(self._norms)


def inner_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Weights, masters and moments, padding included."""
    stage3 = engine.optimizer
    for master in stage3.fp32_partitioned_groups_flat:
        yield master
        for _, value in sorted(stage3.optimizer.state[master].items()):
            if torch.is_tensor(value):
                yield value
    yield stage3.lp_param_buffer


def same_bits(left: Any, right: Any) -> bool:
    """Whether two engines hold the same bits; NaNs of uninitialised padding count as equal."""
    pairs = itertools.zip_longest(inner_tensors(left), inner_tensors(right))
    return all(bool(torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in pairs)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that all benchmarks here take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", help="write the result here")
    made.add_argument("--chart", help="draw a PNG here")
    made.add_argument("--also", nargs="*", default=[], help="interpreters of other environments")
    return made
