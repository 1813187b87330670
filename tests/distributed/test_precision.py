# SPDX-License-Identifier: Apache-2.0
"""Each cell of docs/precision.md, measured on a fit; what is kept in fp32, and what a warning names."""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.precision import PRECISIONS
from lightning_zero3.substitution import substituted
from tests.fits import Language, Pairs, Regression, Sentences, fit, optimizer_of
from tests.models import build_glm, tiny_glm

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Watched(Regression):
    """A norm beside the linear layers, a buffer that 16 bits can't hold, and a look at what is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(13)
        self.register_buffer("fraction", torch.tensor([1 / 3, 2 / 3]))
        self.computes: set[torch.dtype] = set()
        self.net[0].register_forward_hook(lambda _, __, out: self.computes.add(out.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return super().training_step((self.norm(x), y), batch_idx)


def strategy_for(config: dict[str, Any], **options: Any) -> Zero3FastStrategy:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return Zero3FastStrategy(
        config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2, **config}, **options
    )


def measured(index: int) -> dict[str, str]:
    row = PRECISIONS[index]
    backend = deepspeed.comm.comm.cdb
    sent: set[torch.dtype] = set()

    def spy(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.add(given.dtype)
        return upstream(output, given, *args, **kwargs)

    upstream = backend.reduce_scatter_function
    module = Watched()
    with substituted(backend, "reduce_scatter_function", spy):
        trainer = fit(module, Pairs(), strategy_for(dict(row.config)), steps=2, precision=row.precision)
    language = Language(build_glm(tiny_glm()))
    fit(language, Sentences(64), strategy_for(dict(row.config)), steps=1, precision=row.precision)
    optimizer = optimizer_of(trainer)
    master = optimizer.fp32_partitioned_groups_flat[0]
    return {
        "weights": shorts(p.ds_tensor.dtype for p in module.parameters()),
        "computes": shorts(module.computes),
        "masters": shorts(m.dtype for m in optimizer.fp32_partitioned_groups_flat),
        "states": shorts(v.dtype for k, v in optimizer.optimizer.state[master].items() if k != "step"),
        "gradients": shorts({optimizer.grad_partitions_flat_buffer.dtype}),
        "reductions": shorts(sent),
        "buffers": shorts({module.fraction.dtype}),
        "buffers_of_transformers": shorts(b.dtype for b in language.buffers() if b.is_floating_point()),
    }


def shorts(dtypes: Any) -> str:
    return ", ".join(sorted({SHORT[dtype] for dtype in dtypes}))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("index", [i for i, row in enumerate(PRECISIONS) if row.measured])
def test_each_cell_of_the_table(ranks, world_size, index):
    for found in ranks(world_size).run(measured, index):
        expected = {column: getattr(PRECISIONS[index], column) for column in found}
        assert found == expected


def warned(module: Any, data: Any, config: dict[str, Any], precision: str, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, data, strategy_for(config, **options), steps=1, precision=precision)
    said = [str(w.message) for w in caught]
    return "\n".join(
        text for text in said if "rounds buffers" in text or "stay in fp32" in text or "in 16 bits in" in text
    )


class Unbuilt(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            built = Watched()
            self.net = built.net
            self.inner = torch.nn.Module()
            self.inner.register_buffer("made_there", torch.arange(3.0) / 3)


class Adapted(Language):
    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        model = build_glm(tiny_glm()).to(torch.bfloat16)
        super().__init__(get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)))


def what_is_said() -> dict[str, Any]:
    glm = Language(build_glm(tiny_glm()))
    before = {name: b.clone() for name, b in glm.named_buffers()}
    kept = Watched()
    third = kept.fraction.clone()
    unbuilt = Unbuilt()
    said = {
        "own buffer": warned(Watched(), Pairs(), {}, "bf16-true"),
        "own buffer, mixed": warned(Watched(), Pairs(), {}, "bf16-mixed"),
        "own buffer, stock": warned(Watched(), Pairs(), {}, "bf16-true", stock_semantics=True),
        "own buffer, kept": warned(kept, Pairs(), {"data_types": {"buffer_dtype": "fp32"}}, "bf16-true"),
        "router": warned(glm, Sentences(64), {}, "bf16-true"),
        "router, mixed": warned(Language(build_glm(tiny_glm())), Sentences(64), {}, "bf16-mixed"),
        "router, fp32": warned(Language(build_glm(tiny_glm())), Sentences(64), {}, "32-true"),
        "adapters": warned(Adapted(), Sentences(64), {}, "bf16-true"),
        "partitioned": warned(unbuilt, Pairs(), {}, "bf16-mixed"),
        "buffers have their bits": all(torch.equal(before[name], b) for name, b in glm.named_buffers()),
        "partitioned has its bits": torch.equal(unbuilt.inner.made_there, torch.arange(3.0) / 3),
        "kept has its bits": torch.equal(kept.fraction, third),
    }
    assert before
    return said


def test_what_is_rounded_is_named_and_what_can_be_kept_keeps_its_bits(ranks):
    (said,) = ranks(1).run(what_is_said)
    assert "rounds buffers to bf16" in said["own buffer"]
    assert "fraction" in said["own buffer"]
    assert (
        said["own buffer, mixed"] == said["own buffer, stock"] == said["own buffer, kept"] == said["router, fp32"] == ""
    )
    assert said["kept has its bits"]
    for case in ("router", "router, mixed"):
        assert "some_odd_name.model.layers.1.mlp.gate.weight" in said[case]
        assert "rounds buffers" not in said[case]
    assert said["buffers have their bits"]
    assert "lora_A" in said["adapters"]
    assert said["partitioned"] == ""
    assert said["partitioned has its bits"]
