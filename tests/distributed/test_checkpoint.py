# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go both ways between ours and stock, and a single file gives back masters, buffers and strictness."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from tests.distributed.stock import StockOnCPU
from tests.engines import PRECISIONS, build, micro_step
from tests.fits import Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of

MODES: dict[str, dict[str, bool]] = {
    "full": {},
    "without optimizer states": {"load_optimizer_states": False},
    "module only": {"load_module_only": True},
    "module only, without optimizer states": {"load_module_only": True, "load_optimizer_states": False},
}


def both_ways(folder: str, precision: str, from_fp32: bool) -> None:
    """Saved by either, loaded by either in every way, trained on: all four have the same bits."""
    config = {**PRECISIONS[precision], "zero": {"load_from_fp32_weights": from_fp32}}
    for saver in ("ours", "stock"):
        whole = build(stock=saver == "stock", **copy.deepcopy(config))
        for step in range(2):
            micro_step(whole, step)
        whole.save_checkpoint(f"{folder}/{saver}", tag="two")
        for step in range(2, 4):
            micro_step(whole, step)
        for mode, arguments in MODES.items():
            resumed = [build(stock=stock, **copy.deepcopy(config)) for stock in (False, True)]
            for engine in resumed:
                engine.load_checkpoint(f"{folder}/{saver}", tag="two", **arguments)
                for step in range(2, 4):
                    micro_step(engine, step)
            ours, stock = (tensors_of(engine.optimizer) for engine in resumed)
            assert_equal_bits(ours, stock)
            assert resumed[0].module.losses == resumed[1].module.losses
            if mode == "full":
                assert_equal_bits(ours, tensors_of(whole.optimizer))
            aliased = resumed[0].optimizer.aliased_sub_groups()
            assert len(aliased) == (
                0 if precision == "bf16 with fp32 masters" else len(resumed[0].optimizer.fp16_groups)
            )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("precision", "from_fp32"), [*((name, True) for name in PRECISIONS), ("bf16 with fp32 masters", False)]
)
def test_checkpoints_load_both_ways_between_ours_and_stock(ranks, world_size, precision, from_fp32, tmp_path):
    ranks(world_size).run(both_ways, str(tmp_path), precision, from_fp32)


def universal(folder: str, precision: str) -> None:
    """Through DeepSpeed's universal format: ours and stock read the same, from what either has saved."""
    from deepspeed.checkpoint import ds_to_universal

    for saver in ("ours", "stock"):
        whole = build(stock=saver == "stock", **PRECISIONS[precision])
        for step in range(2):
            micro_step(whole, step)
        whole.save_checkpoint(f"{folder}/{saver}", tag="two")
        if torch.distributed.get_rank() == 0:
            arguments = ["--input_folder", f"{folder}/{saver}/two", "--output_folder", f"{folder}/{saver}/universal"]
            ds_to_universal.main(_parsed(ds_to_universal, arguments))
            Path(f"{folder}/{saver}/latest_universal").write_text("universal")
        torch.distributed.barrier()
        resumed = [
            build(stock=stock, checkpoint={"load_universal": True}, **PRECISIONS[precision]) for stock in (False, True)
        ]
        for engine in resumed:
            engine.load_checkpoint(f"{folder}/{saver}")
            micro_step(engine, 2)
        assert_equal_bits(tensors_of(resumed[0].optimizer), tensors_of(resumed[1].optimizer))


def _parsed(script: Any, arguments: list[str]) -> Any:
    import sys

    before, sys.argv = (
        sys.argv,
        ["ds_to_universal", *arguments, "--num_extract_workers", "1", "--num_merge_workers", "1"],
    )
    try:
        return script.parse_arguments()
    finally:
        sys.argv = before


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16 with fp32 masters"])
def test_universal_checkpoints(ranks, world_size, precision, tmp_path):
    ranks(world_size).run(universal, str(tmp_path), precision)


class Normalised(Regression):
    """With buffers that training changes, one that isn't saved, a tied weight and a frozen one."""

    def __init__(self) -> None:
        super().__init__((13, 8, 7))
        self.register_buffer("mean", torch.zeros(13))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.tied = torch.nn.Linear(13, 8)
        self.tied.weight = self.net[0].weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("not_saved", torch.zeros(2), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        # The same on every rank: a checkpoint holds rank 0's.
        self.mean.mul_(0.9).add_(0.1)
        self.inner.count += 1
        x = x - self.mean.to(x.dtype)
        loss = ((self.net(x).float() - y.float()) ** 2).mean() + self.tied(x).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("32-true", {}),
    "bf16 with fp32 masters": ("bf16-mixed", {}),
    "bf16 masters": ("bf16-mixed", PRECISIONS["bf16 masters"]),
    "autocast": ("32-true", PRECISIONS["autocast"]),
}


def one_batch() -> Pairs:
    # The same batch in each epoch, so that a run may be interrupted anywhere.
    return Pairs(length=2 * torch.distributed.get_world_size())


def strategy_of(name: str, **arguments: Any) -> Any:
    zero = {"stage": 3, "sub_group_size": 100, "stage3_param_persistence_threshold": 20}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **PLUGINS[name][1]}
    return Zero3FastStrategy(copy.deepcopy(config), **arguments)


def resumed_from(name: str, path: str, module: Any, steps: int) -> Any:
    strategy = strategy_of(name, load_full_weights=True)
    return fit(module, one_batch(), strategy, steps=steps, precision=PLUGINS[name][0], ckpt_path=path)


def consolidated(folder: str, name: str) -> str:
    """A directory saved after three steps, and a single file made of it."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    trainer = fit(Normalised(), one_batch(), strategy_of(name), steps=3, precision=PLUGINS[name][0])
    trainer.save_checkpoint(f"{folder}/sharded")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(f"{folder}/sharded", f"{folder}/whole.ckpt")
    torch.distributed.barrier()
    return f"{folder}/whole.ckpt"


def masters_of(trainer: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = trainer.lightning_module.named_parameters()
    return {n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in named if p.requires_grad}


class Watched(Normalised):
    """Keeps masters and buffers as they are when training starts."""

    def on_train_start(self) -> None:
        self.at_start = masters_of(self.trainer), {name: b.clone() for name, b in self.named_buffers()}


def restored(folder: str, name: str) -> dict[str, Any]:
    path = consolidated(folder, name)
    file = torch.load(path, weights_only=False)["state_dict"]
    whole = fit(Normalised(), one_batch(), strategy_of(name), steps=5, precision=PLUGINS[name][0])
    trainer = resumed_from(name, path, Watched(), steps=5)
    masters, buffers = trainer.lightning_module.at_start
    assert len(masters) == 5
    for key, master in masters.items():
        assert torch.equal(master, file[key].to(master.dtype)), key
    for key, buffer in buffers.items():
        assert key == "not_saved" or torch.equal(buffer, file[key].to(buffer.dtype)), key
    # Plain SGD has no states to lose: the run goes on as if it had never stopped.
    for left, right in zip(
        tensors_of(optimizer_of(trainer))["weights"], tensors_of(optimizer_of(whole))["weights"], strict=True
    ):
        assert torch.equal(left, right)
    return {"losses": trainer.lightning_module.losses, "whole": whole.lightning_module.losses[3:]}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PLUGINS)
def test_a_single_file_restores_masters_and_buffers_on_every_rank(ranks, world_size, name, tmp_path):
    for seen in ranks(world_size).run(restored, str(tmp_path), name):
        assert seen["losses"] == seen["whole"]


def strictness(folder: str) -> list[str]:
    path = consolidated(folder, "fp32")
    checkpoint = torch.load(path, weights_only=False)
    errors = []
    for change in ("missing", "unexpected", "shape"):
        states = dict(checkpoint["state_dict"])
        if change == "missing":
            del states["mean"]
        elif change == "unexpected":
            states["net.0.scale"] = torch.ones(1)
        else:
            states["net.0.bias"] = torch.ones(9)
        changed = f"{folder}/{change}.ckpt"
        if torch.distributed.get_rank() == 0:
            torch.save({**checkpoint, "state_dict": states}, changed)
        torch.distributed.barrier()
        with pytest.raises(RuntimeError) as caught:
            resumed_from("fp32", changed, Normalised(), steps=4)
        errors.append(str(caught.value))
    lax = Normalised()
    lax.strict_loading = False
    resumed_from("fp32", f"{folder}/missing.ckpt", lax, steps=4)
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_strict_is_strict_and_lax_is_lax(ranks, world_size, tmp_path):
    for missing, unexpected, shape in ranks(world_size).run(strictness, str(tmp_path)):
        assert 'Missing key(s) in state_dict: "mean"' in missing
        assert 'Unexpected key(s) in state_dict: "net.0.scale"' in unexpected
        assert "size mismatch for net.0.bias" in shape


class WithoutSuper(torch.nn.Linear):
    """Reads its own values, as quantised layers do."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        assert state_dict[prefix + "weight"].shape == self.weight.shape
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(self, name).copy_(state_dict[prefix + name])


class Failing(torch.nn.Linear):
    fails = True

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.fails:
            raise ValueError("own check failed")


def modules_of_their_own(folder: str) -> None:
    path = consolidated(folder, "fp32")
    file = torch.load(path, weights_only=False)["state_dict"]
    module = Watched()
    module.net[2] = WithoutSuper(8, 7)
    resumed_from("fp32", path, module, steps=4)
    assert torch.equal(module.at_start[0]["net.2.weight"], file["net.2.weight"])
    module = Watched()
    module.net[2] = Failing(8, 7)
    with pytest.raises(ValueError, match="own check failed"):
        resumed_from("fp32", path, module, steps=4)
    # Nothing of the failed load is left, and the same module loads well then.
    assert not any("_load_from_state_dict" in vars(m) for m in module.modules())
    module.net[2].fails = False
    resumed_from("fp32", path, module, steps=4)
    assert torch.equal(module.at_start[0]["net.2.weight"], file["net.2.weight"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_that_load_in_a_way_of_their_own(ranks, world_size, tmp_path):
    ranks(world_size).run(modules_of_their_own, str(tmp_path))


def stock_goes_back(folder: str) -> tuple[bool, bool]:
    """What the correction is for: stock's masters, and so its weights after a step, are the initial ones."""
    path = consolidated(folder, "bf16 with fp32 masters")
    file = torch.load(path, weights_only=False)["state_dict"]
    wrong = []
    for strategy in (
        strategy_of("bf16 with fp32 masters", load_full_weights=True, stock_semantics=True),
        StockOnCPU(config=copy.deepcopy(strategy_of("bf16 with fp32 masters").config), load_full_weights=True),
    ):
        module = Watched()
        fit(module, one_batch(), strategy, steps=4, precision="bf16-mixed", ckpt_path=path)
        wrong.append(not torch.equal(module.at_start[0]["net.0.weight"], file["net.0.weight"]))
    return wrong[0], wrong[1]


def test_with_stock_semantics_masters_are_left_as_stock_leaves_them(ranks, tmp_path):
    ours, stock = ranks(1).run(stock_goes_back, str(tmp_path))[0]
    assert ours == stock
    if not stock:
        pytest.skip("Lightning restores masters by itself")
