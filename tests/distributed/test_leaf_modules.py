# SPDX-License-Identifier: Apache-2.0
"""Experts in lists: ranks that use different ones train, and compute what one process computes."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy, Zero3Options
from lightning_zero3.moe.leaf_modules import LeafModuleError
from tests.engines import build
from tests.fits import Language, Sentences, fit
from tests.models import build_glm, tiny_glm
from tests.ranks import RankPool

WIDTH = 8


class Top1(nn.Module):
    """Sends a batch to one expert, by the sign of its first number, as a router that has learnt to would."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, len(experts), bias=False)
        self.experts = experts

    def choose(self, hidden: torch.Tensor) -> list[int]:
        return [0 if row[0] > 0 else 1 for row in hidden]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.gate(hidden).softmax(-1)
        out = torch.zeros_like(hidden)
        chosen = self.choose(hidden.detach())
        items = list(self.experts.values()) if isinstance(self.experts, nn.ModuleDict) else list(self.experts)
        for index, expert in enumerate(items):
            rows = [row for row, choice in enumerate(chosen) if choice == index]
            if rows:
                out = out.index_add(0, torch.tensor(rows), expert(hidden[rows]) * weights[rows, index : index + 1])
        return out


class Tuple(Top1):
    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden), self.gate(hidden)


class Packed(Top1):
    def forward(self, packed: Any) -> Any:
        return super().forward(packed["hidden"])


class Dict(Top1):
    def forward(self, hidden: torch.Tensor) -> Any:
        return {"out": super().forward(hidden)}


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Model(nn.Module):
    """Two dense layers around a mixture; how it is called is the test's matter."""

    def __init__(self, block: str = "list", call: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(4)
        items = [expert() for _ in range(3)]
        experts = nn.ModuleDict({f"e{i}": e for i, e in enumerate(items)}) if block == "dict" else nn.ModuleList(items)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = {"tuple": Tuple, "dict output": Dict, "packed": Packed}.get(block, Top1)(experts)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The first number decides, so it must survive the first layer.
        hidden = x + 0 * self.first(x) if self.call == "no input gradient" else x + 0.1 * self.first(x).tanh()
        if self.call == "keyword":
            out = self.mixture(hidden=hidden)
        elif self.call == "no input gradient":
            out = self.mixture(x)
        elif self.call == "twice":
            out = self.mixture(hidden) + self.mixture(-hidden)
        elif self.call == "checkpointed":
            out = torch.utils.checkpoint.checkpoint(self.mixture, hidden, use_reentrant=False)
        elif self.call == "packed":
            out = self.mixture({"hidden": hidden})
        else:
            out = self.mixture(hidden)
        if isinstance(out, tuple):
            out = out[0] + out[1].mean()
        if isinstance(out, dict):
            out = out["out"]
        return (self.last(hidden + out) ** 2).mean()


def batch(rank: int, step: int) -> torch.Tensor:
    """Of rank 0 every row goes to expert 0, of rank 1 to expert 1; now and then the other way round."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).abs() + 1
    return x if (rank + step // 3) % 2 == 0 else -x


def plain(model: nn.Module, accumulate: int, optimizer: str) -> dict[str, torch.Tensor]:
    world = torch.distributed.get_world_size()
    built = made(optimizer, model)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for micro in range(accumulate):
            for rank in range(world):
                (model(batch(rank, step * accumulate + micro)) / world / accumulate).backward()
        built.step()
    return {name: p.detach() for name, p in model.named_parameters()}


STEPS = 6


def made(optimizer: str, model: nn.Module) -> torch.optim.Optimizer:
    if optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def against_plain(block: str, call: str, accumulate: int = 1, optimizer: str = "SGD", **zero: Any) -> float:
    rank = torch.distributed.get_rank()
    model = Model(block, call)
    engine = build(
        model,
        optimizer=made(optimizer, model),
        zero={"stage3_param_persistence_threshold": 0, **zero},
        gradient_accumulation_steps=accumulate,
        gradient_clipping=0.0,
    )
    for step in range(STEPS * accumulate):
        engine.backward(engine(batch(rank, step)))
        engine.step()
    worst = 0.0
    reference = plain(Model(block, call), accumulate, optimizer)
    for name, parameter in engine.module.named_parameters():
        ours = deepspeed.utils.safe_get_full_fp32_param(parameter)
        worst = max(worst, float((ours - reference[name]).norm() / reference[name].norm()))
    return worst


CALLS = [
    ("list", "plain"),
    ("dict", "plain"),
    ("tuple", "plain"),
    ("list", "keyword"),
    ("list", "no input gradient"),
    ("list", "checkpointed"),
]


@pytest.mark.parametrize(("block", "call"), CALLS)
def test_ranks_that_use_different_experts_compute_what_one_process_does(ranks, block, call):
    for worst in ranks(2).run(against_plain, block, call):
        assert worst < 1e-6


@pytest.mark.parametrize(("accumulate", "optimizer"), [(1, "AdamW"), (3, "SGD")])
def test_accumulated_and_with_moments(ranks, accumulate, optimizer):
    for worst in ranks(2).run(against_plain, "list", "plain", accumulate, optimizer):
        assert worst < 1e-5


def test_with_the_optimizer_on_the_cpu(ranks):
    for worst in ranks(2).run(offloaded):
        assert worst < 1e-6


def offloaded() -> float:
    return against_plain("list", "plain", 2, offload_optimizer={"device": "cpu"})


def refused(block: str, call: str) -> str:
    model = Model(block, call)
    engine = build(model, optimizer=made("SGD", model))
    with pytest.raises(LeafModuleError) as caught:
        engine.backward(engine(batch(torch.distributed.get_rank(), 0)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("block", "call", "says"),
    [
        ("list", "twice", "called more than once"),
        ("dict output", "plain", "returns dict"),
        ("packed", "packed", "no floating-point tensor"),
    ],
)
def test_a_call_whose_gradients_cannot_be_waited_for_is_refused_on_all_ranks(ranks, block, call, says):
    for message in ranks(2).run(refused, block, call):
        assert says in message


def without_marks() -> str:
    """What becomes of the same training under stock semantics, within a few seconds."""
    outcome = ["hangs"]

    def train() -> None:
        model = Model()
        engine = build(
            model,
            optimizer=made("SGD", model),
            zero={"stage3_param_persistence_threshold": 0},
            options=Zero3Options(stock_semantics=True),
        )
        try:
            for step in range(STEPS):
                engine.backward(engine(batch(torch.distributed.get_rank(), step)))
                engine.step()
        except BaseException as error:
            outcome[0] = f"fails: {type(error).__name__}"
        else:
            outcome[0] = "trains"

    thread = threading.Thread(target=train, daemon=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        thread.join(timeout=8)
    return "; ".join([outcome[0], *(str(w.message) for w in caught if "stock_semantics" in str(w.message))])


@pytest.mark.slow
def test_without_marks_it_hangs_or_fails_after_a_warning_that_names_the_module():
    pool = RankPool(2)
    try:
        first, second = pool.run(without_marks)
    finally:
        pool.close()
    assert any(outcome.startswith(("hangs", "fails")) for outcome in (first, second)), (first, second)
    assert "mixture: a list of experts" in first


class Trained(Language):
    """Plain gradient descent, so that small differences stay small, and a record of which experts were used."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        super().__init__(HF_MODELS[kind](), lr=0.05)
        self.used: list[set[int]] = []
        self.batches: list[Any] = []
        for module in self.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_hook(self._record)

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        self.used.append(set(args[1].detach().flatten().nonzero().flatten().tolist()) if args[1].dim() > 2 else
                         set(args[1].detach().flatten().tolist()))  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        extra = {"decoder_input_ids": batch["input_ids"]} if "Switch" in type(self.some_odd_name).__name__ else {}
        loss = self.some_odd_name(**batch, **extra, use_cache=False).loss
        self.batches.append(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def switch() -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=2, num_decoder_layers=2, num_experts=8, vocab_size=64,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, dropout_rate=0.0, router_jitter_noise=0.0,
        expert_capacity=64, decoder_start_token_id=0,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config)


def qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=1, vocab_size=64,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


HF_MODELS = {
    "experts in a ModuleDict (Switch)": switch,
    "fused experts (Qwen3-MoE)": qwen,
    "fused experts (GLM-4.5)": lambda: build_glm(tiny_glm(n_routed_experts=8, num_experts_per_tok=1)),
}


def nothing_persists() -> Zero3FastStrategy:
    """Small weights stay gathered by default, and then nothing can hang."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return Zero3FastStrategy(config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2})


def fit_against_plain(kind: str) -> tuple[float, list[set[int]]]:
    world = torch.distributed.get_world_size()
    ours = Trained(kind)
    fit(ours, Sentences(64, sequence_length=3), nothing_persists(), steps=3)
    plain = Trained(kind)
    optimizer = plain.configure_optimizers()
    seen: list[Any] = [None] * world
    torch.distributed.all_gather_object(seen, ours.batches)
    for batches in zip(*seen, strict=True):
        optimizer.zero_grad()
        for batch in batches:
            (plain.training_step(batch, 0) / world).backward()
        optimizer.step()
    worst = 0.0
    for parameter, reference in zip(ours.parameters(), plain.parameters(), strict=True):
        trained = deepspeed.utils.safe_get_full_fp32_param(parameter)
        worst = max(worst, float((trained - reference).norm() / (reference.norm() + 1e-6)))
    return worst, ours.used


@pytest.mark.parametrize("kind", HF_MODELS)
def test_transformers_models_whose_ranks_use_different_experts(ranks, kind):
    (first, used_by_first), (second, used_by_second) = ranks(2).run(fit_against_plain, kind)
    assert used_by_first != used_by_second
    assert max(first, second) < 1e-5


class Evaluated(Language):
    """Validated and not trained: gathering alone is enough to hang."""

    def __init__(self) -> None:
        super().__init__(Model())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.losses.append(float(self.some_odd_name(batch)))


def validated() -> list[list[float]]:
    rank = torch.distributed.get_rank()
    module = Evaluated()
    trainer = pl.Trainer(
        strategy=nothing_persists(), accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.validate(module, DataLoader([batch(rank, step) for step in range(4)], batch_size=None), verbose=False)
    return [module.losses, [float(Model()(batch(rank, step))) for step in range(4)]]


def test_an_evaluation_outside_of_fit(ranks):
    for ours, plain in ranks(2).run(validated):
        assert ours == pytest.approx(plain)
