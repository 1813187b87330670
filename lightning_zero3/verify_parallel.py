# SPDX-License-Identifier: Apache-2.0
"""``verify_parallel=True``: before training, a small copy of the user's model is compared with plain Transformers.

The copy (:mod:`lightning_zero3.moe.scaled_down`) is of the model's own classes and config. It goes the way that the
model itself goes next: the same path in a module, AutoEP and AutoTP by the same targets, a DeepSpeed engine by the
run's config, on all ranks; partitioned while it is built where the model is. Plain Transformers computes the same,
whole, on each rank for itself.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import distributed, nn

from lightning_zero3 import engine_end, group_timeouts
from lightning_zero3.config import SetupError
from lightning_zero3.engine import build_training_engine
from lightning_zero3.moe import parallel_layers, verify
from lightning_zero3.moe.scaled_down import build_random, scaled_down
from lightning_zero3.moe.sharded_build import sharded_build
from lightning_zero3.optimizer.switches import Switches
from lightning_zero3.topology import Topology

# Sections of the DeepSpeed config that the comparison does without.
_PRECISION = ("fp16", "bf16", "torch_autocast", "amp", "data_types", "communication_data_type")
_BATCHES = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "scheduler")
_LOGS = (
    "comet",
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
)
# Options of ZeRO that round what is sent, on purpose.
_ROUNDING = ("zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights")
# More data-parallel ranks than this share batches, so that one process can compute them all.
_DIFFERENT_BATCHES = 8
_SEQUENCES, _LENGTH = 2, 16
_NAMED = 5


class DifferentMathematicsError(SetupError):
    """AutoEP's or AutoTP's layers don't compute what Transformers' own layers compute."""


def verify_parallel(
    target: Any, split: Any, config: Mapping[str, Any], layout: Topology, *, local_rank: int, switches: Switches
) -> None:
    """Compare a small copy of a model with plain Transformers, and leave everything as it was; a collective.

    Logits, loss, auxiliary loss and every gradient in fp32; where the run is in bf16, what routers choose in bf16.

    Args:
        target: The model for AutoEP, or None.
        split: The model for AutoTP, or None.
        config: The run's completed DeepSpeed config.
        layout: The run's layout.
        local_rank: This process's device index.
        switches: The optimizer's switches.

    Raises:
        UnscalableModelError: No small copy of the model can be made.
        DifferentMathematicsError: They differ, on any rank; the message names the worst tensors and what to do.
    """
    found = target or split
    with _as_it_was(), isolate_rng():
        copy_of = _Copy(found.module, found.path, layout, local_rank, switches)
        errors = copy_of.errors(_small_config(config, _PRECISION))
        if target is not None and config.get("bf16", {}).get("enabled"):
            errors.update(copy_of.routing_errors(_small_config(config, ())))
        errors = verify.worst_over_ranks(errors, copy_of.device)
    sizes = f"expert parallel size {layout.expert_parallel_size}, tensor parallel size {layout.tensor_parallel_size}"
    wrong = {name: error for name, error in errors.items() if not error <= verify.EXACT}
    if wrong:
        raise DifferentMathematicsError(_message(wrong, len(errors), type(found.module).__name__, sizes, config))
    rank_zero_info(
        f"verify_parallel: a small copy of {type(found.module).__name__} computes what plain Transformers computes "
        f"({sizes}; {len(errors)} tensors, largest relative error {max(errors.values()):.1e})."
    )


class _Copy:
    """A small copy of a model, built anew for each engine."""

    def __init__(self, model: nn.Module, path: str, layout: Topology, local_rank: int, switches: Switches) -> None:
        from deepspeed.accelerator import get_accelerator

        self.device = torch.device(get_accelerator().current_device_name())
        self._class, self._path, self._layout = type(model), path, layout
        self._local_rank, self._switches = local_rank, switches
        self._config = scaled_down(model, layout)
        self._is_partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self._arguments = {"output_router_logits": True} if hasattr(self._config, "router_aux_loss_coef") else {}
        self._batches = [
            torch.randint(
                self._config.vocab_size, (_SEQUENCES, _LENGTH), generator=torch.Generator().manual_seed(seed)
            ).to(self.device)
            for seed in range(_DIFFERENT_BATCHES)
        ]

    def errors(self, config: dict[str, Any]) -> dict[str, float]:
        """Relative errors of outputs and gradients in fp32, of this rank."""
        rank = distributed.get_rank()
        lane, lanes = self._layout.data_parallel_rank(rank), self._layout.data_parallel_size
        plain = self._whole(0).to(self.device)
        theirs = verify.plain(plain, self._batches, lanes, lane, **self._arguments)
        allowed = verify.allowances(
            plain, theirs, lambda: verify.plain(plain, self._batches, lanes, lane, **self._arguments)
        )
        with self._engine(config) as (engine, model, settings):
            batch = self._batches[lane % len(self._batches)]
            loss, ours = verify.loss_and_outputs(model, batch, engine, **self._arguments)
            engine.backward(loss)
            ours |= verify.gradients_of(model)
            specs = (settings.get("tensor_parallel", {}).get("partition_config") or {}).get("layer_specs", ())
            errors = verify.relative_errors(ours, theirs, self._layout, rank, verify.fused_by_specs(specs, self._path))
            return {name: error / allowed.get(name, 1.0) for name, error in errors.items()}

    def routing_errors(self, config: dict[str, Any]) -> dict[str, float]:
        """Relative errors of what routers choose in the run's precision, of this rank."""
        from deepspeed.module_inject.auto_ep_presets.registry import get_preset

        theirs = self._whole(0)
        seen: dict[str, Any] = {}
        with self._engine(config) as (engine, model, settings):
            for name, layer in model.named_modules():
                if getattr(layer, "_is_autoep_layer", False):
                    layer.router.register_forward_hook(
                        lambda _, tokens, chosen, name=name: seen.update({name: (tokens[0], chosen)})
                    )
            with torch.no_grad():
                verify.loss_and_outputs(model, self._batches[0], engine, **self._arguments)
            own = get_preset(settings["expert_parallel"]["preset_model"]).router_pattern
            own = settings["expert_parallel"].get("router_pattern") or own
            errors = {}
            for name, (tokens, chosen) in seen.items():
                router = theirs.get_submodule(f"{name}.{own}").to(self.device)
                for parameter in router.parameters():  # as an engine casts them; buffers keep their digits
                    parameter.data = parameter.data.to(tokens.dtype)
                errors[f"routing of {name} in {tokens.dtype}"] = verify.routing_error(router, tokens, chosen)
            return errors

    @contextmanager
    def _engine(self, config: dict[str, Any]) -> Iterator[tuple[Any, nn.Module, dict[str, Any]]]:
        """An engine around a copy at the model's own path, the copy, and the config with what was found out."""
        model = self._partitioned(config) if self._is_partitioned else self._whole(self._seed())
        root = _Holder(model, self._path) if self._path else model
        target, split, settings = parallel_layers.targets(root, config, self._layout.world_size)
        from_config = "optimizer" in settings
        engine, _ = build_training_engine(
            root,
            config=settings,
            optimizer=None if from_config else torch.optim.SGD(root.parameters(), lr=0.0),
            lr_scheduler=None,
            local_rank=self._local_rank,
            switches=self._switches,
            target=target,
            split=split,
        )
        try:
            yield engine, model, settings
        finally:
            engine_end.end(engine)

    def _seed(self) -> int:
        """Where ranks that begin with different values must end with rank 0's, they begin with different ones."""
        return distributed.get_rank() if self._layout.tensor_parallel_size > 1 else 0

    def _whole(self, seed: int) -> Any:
        return build_random(self._class, self._config, seed)

    def _partitioned(self, config: dict[str, Any]) -> Any:
        """A copy that is partitioned while it is built, as the model was, with a whole copy's values."""
        from deepspeed import zero

        whole = self._whole(0)
        with sharded_build(config):
            model = self._class(copy.deepcopy(self._config))
        values = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                with zero.GatheredParameters([parameter], modifier_rank=0):
                    if distributed.get_rank() == 0:
                        parameter.copy_(values[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(whole.get_buffer(name))
        return model


class _Holder(nn.Module):
    """Holds a model at a dotted path, and is called as the model is."""

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        self._name, _, rest = path.partition(".")
        self.add_module(self._name, _Holder(model, rest) if rest else model)

    def forward(self, **inputs: Any) -> Any:
        """The model's."""
        return getattr(self, self._name)(**inputs)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Give back memory, process groups, the default dtype and the precision of products."""
    dtype, products = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float32)
    # TF32 has the digits of bf16.
    torch.set_float32_matmul_precision("highest")
    with ExitStack() as scope:
        scope.callback(torch.set_float32_matmul_precision, products)
        scope.callback(torch.set_default_dtype, dtype)
        scope.callback(_give_back_memory)
        scope.enter_context(_groups_of_their_own())
        yield


@contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Let engines inside make process groups, and destroy these afterwards.

    Upstream symbol: the state of ``deepspeed.utils.groups`` (0.19.7, 0.19.8). Reason: groups outlive their engine, and
    the next one takes them for its own. Detected by tests of what is left. Expires when ``destroy`` drops them.
    """
    from deepspeed.utils import groups

    def state() -> dict[str, Any]:
        mutable = {name: value for name, value in vars(groups).items() if name.isupper() or name in _GROUPS}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in mutable.items()}

    before, there = state(), group_timeouts.groups()
    yield
    # All ranks have come here by the same collectives; one that failed alone must not wait for others.
    for group in [group for group in group_timeouts.groups() if group not in there]:
        distributed.destroy_process_group(group)
    for name, value in before.items():
        if isinstance(value, dict):
            getattr(groups, name).clear()
            getattr(groups, name).update(value)
        else:
            setattr(groups, name, value)


_GROUPS = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")


def _give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _small_config(config: Mapping[str, Any], without: tuple[str, ...]) -> dict[str, Any]:
    """The run's config for a small copy: no logs, one batch, buckets no larger than needed, nothing on disk."""
    small = copy.deepcopy({name: value for name, value in config.items() if name not in (*without, *_BATCHES, *_LOGS)})
    small |= {"train_micro_batch_size_per_gpu": _SEQUENCES, "gradient_accumulation_steps": 1}
    small["steps_per_print"] = 10**9
    small["zero_force_ds_cpu_optimizer"] = False
    zero = {name: value for name, value in small["zero_optimization"].items() if name not in _ROUNDING}
    # DeepSpeed's own default is as large; at its full size every weight of the copy would stay gathered.
    for name, most in (("stage3_param_persistence_threshold", 100), ("reduce_bucket_size", 1_000_000)):
        given = zero.get(name)
        zero[name] = min(given, most) if isinstance(given, int) else most
    for section in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(section), dict) and zero[section].get("device") == "nvme":
            zero[section] = {**zero[section], "device": "cpu", "nvme_path": None}
    return {**small, "zero_optimization": zero}


def _message(wrong: Mapping[str, float], of: int, model: str, sizes: str, config: Mapping[str, Any]) -> str:
    worst = sorted(wrong, key=lambda name: wrong[name], reverse=True)[:_NAMED]
    entries = [
        f"{section}.{name}={value!r}"
        for section in ("expert_parallel", "tensor_parallel")
        for name, value in config.get(section, {}).items()
        if name not in ("enabled", "autoep_size", "autotp_size")
    ]
    return (
        f"verify_parallel: a small copy of {model} ({sizes}) doesn't compute what plain Transformers computes; this "
        f"run would train another function. {len(wrong)} of {of} tensors differ by more than {verify.EXACT:.0e}, "
        f"relatively (a gradient's name begins with 'd '): {', '.join(f'{name} {wrong[name]:.1e}' for name in worst)}. "
        "Look first at what overrides the model's own config"
        + (
            f" ({', '.join(entries)})"
            if entries
            else " in the DeepSpeed config's sections expert_parallel and tensor_parallel"
        )
        + ", at presets and layers that you registered yourself, and at whether these releases of DeepSpeed and "
        "Transformers are ones that this package is tested with (constraints/). Without expert_parallel_size and "
        "tensor_parallel_size, Transformers' own layers are trained; verify_parallel=False trains in spite of it."
    )
