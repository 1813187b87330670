# SPDX-License-Identifier: Apache-2.0
"""fabric.save and fabric.load: exact, in the middle of a step too; a Trainer's checkpoints here and Fabric's there."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader

from lightning_zero3 import CheckpointNotSavedError, DamagedCheckpointError, Zero3FastFabricStrategy, Zero3FastStrategy
from lightning_zero3.checkpoints import manifest
from lightning_zero3.config import SetupError
from tests.fabric_loops import fabric_of, train
from tests.fits import QUIET, Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build, tiny

CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 3, "sub_group_size": 100}}
BIASES: dict[str, Any] = {"expert_parallel_size": 1, "router_bias_update_speed": 0.01}


class Validated(Regression):
    """Its loss is computed in validation too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", ((self.net(batch[0]).float() - batch[1]) ** 2).mean(), sync_dist=True)


def folder() -> Path:
    paths = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(paths)
    return Path(paths[0])


def weights_and_masters(optimizer: Any) -> dict[str, list[torch.Tensor]]:
    return {kind: tensors for kind, tensors in tensors_of(optimizer).items() if kind != "moments"}


class Counted:
    """Something of the user's with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def micro_step(fabric: Any, model: Any, index: int) -> None:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(index + 10 * fabric.global_rank))
    fabric.backward(model(input_ids=ids, labels=ids).loss / 2)


def with_a_router() -> tuple[Any, Any, Any]:
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG, **BIASES))
    hf = build(tiny("glm"), seed=1)
    model, optimizer = fabric.setup(hf, torch.optim.AdamW(hf.parameters(), lr=1e-3))
    return fabric, model, optimizer


def resumed_in_the_middle_of_a_step() -> None:
    path = folder() / "saved"
    fabric, model, optimizer = with_a_router()
    counted = Counted()
    for index in range(5):
        micro_step(fabric, model, index)
        counted.seen += 1
        if index == 2:
            fabric.save(path, {"model": model, "optimizer": optimizer, "mine": counted, "at": 3, "t": torch.ones(2)})
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = tensors_of(optimizer.optimizer), {n: b.clone() for n, b in model.named_buffers() if "bias" in n}

    fabric, model, optimizer = with_a_router()
    state = {"model": model, "optimizer": optimizer, "mine": Counted(), "at": 0}
    rest = fabric.load(path, state)
    assert (state["at"], state["mine"].seen, rest["t"].tolist()) == (3, 3, [1, 1])
    assert not [name for name in rest if name.startswith("lightning_zero3")]
    for index in (3, 4):
        micro_step(fabric, model, index)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_bits(tensors_of(optimizer.optimizer), expected[0])
    assert expected[1]
    for name, buffer in expected[1].items():
        assert torch.equal(model.get_buffer(name), buffer)
    assert any(buffer.abs().max() > 0 for buffer in expected[1].values())


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_between_two_micro_batches_of_a_step_is_exact(ranks, world_size):
    ranks(world_size).run(resumed_in_the_middle_of_a_step)


def from_fabric_to_a_trainer() -> None:
    path = folder()
    _, model, optimizer = fabric_model = train(Validated(), Pairs(), Zero3FastFabricStrategy(CONFIG), steps=2)
    fabric_model[0].save(path / "fabric", {"model": model, "optimizer": optimizer})
    expected = tensors_of(optimizer.optimizer)
    # The engine's own method, in a fit.
    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(CONFIG), steps=1)
    trainer.strategy.model.load_checkpoint(path / "fabric", tag="checkpoint")
    assert_equal_bits(tensors_of(optimizer_of(trainer)), expected)
    # And by ckpt_path: without a Trainer's entries.
    module = Validated()
    trainer = pl.Trainer(**QUIET, strategy=Zero3FastStrategy(CONFIG), devices=distributed.get_world_size(), max_steps=0)
    with pytest.warns(UserWarning, match="saved by Fabric") if distributed.get_rank() == 0 else nullcontext():
        trainer.fit(module, DataLoader(Pairs(), batch_size=2), ckpt_path=path / "fabric")
    assert_equal_bits(tensors_of(optimizer_of(trainer)), expected)
    (in_fit,) = trainer.validate(module, DataLoader(Pairs(), batch_size=2), verbose=False)
    evaluator = pl.Trainer(**QUIET, strategy=Zero3FastStrategy(CONFIG), devices=distributed.get_world_size())
    loader = DataLoader(Pairs(), batch_size=2)
    (alone,) = evaluator.validate(Validated(), loader, ckpt_path=path / "fabric", verbose=False)
    assert alone == in_fit


def from_a_trainer_to_fabric() -> None:
    path = folder()
    trainer = fit(Regression(), Pairs(), Zero3FastStrategy(CONFIG), steps=2)
    trainer.save_checkpoint(path / "trainer")
    fabric, model, optimizer = train(Regression(), Pairs(), Zero3FastFabricStrategy(CONFIG), steps=1)
    rest = fabric.load(path / "trainer", {"model": model, "optimizer": optimizer})
    assert rest["global_step"] == 2
    assert_equal_bits(tensors_of(optimizer.optimizer), tensors_of(optimizer_of(trainer)))
    # Weights alone: masters too, moments and counts stay.
    fabric, model, optimizer = train(Regression(), Pairs(), Zero3FastFabricStrategy(CONFIG), steps=1)
    before = tensors_of(optimizer.optimizer)["moments"]
    fabric.load(path / "trainer", {"model": model})
    assert_equal_bits(weights_and_masters(optimizer.optimizer), weights_and_masters(optimizer_of(trainer)))
    assert_equal_bits({"moments": tensors_of(optimizer.optimizer)["moments"]}, {"moments": before})
    assert fabric.strategy.model.global_steps == 1
    # An engine without an optimizer, and a whole file.
    evaluated = fabric_of(Zero3FastFabricStrategy(CONFIG))
    alone = evaluated.setup(Regression())
    evaluated.load(path / "trainer", {"model": alone})
    batch = Pairs()[:4]
    assert torch.equal(alone.training_step(batch, 0), model.training_step(batch, 0))
    whole = Regression((13, 31, 17, 7))
    with torch.no_grad():
        whole.net[0].weight.fill_(0.25)
    if distributed.get_rank() == 0:
        torch.save(whole.state_dict(), path / "whole.pt")
    distributed.barrier()
    fabric.load_raw(path / "whole.pt", model)
    assert model.training_step(batch, 0).item() == pytest.approx(whole.training_step(batch, 0).item(), rel=1e-6)


def there_and_back() -> None:
    from_fabric_to_a_trainer()
    from_a_trainer_to_fabric()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_checkpoints_of_fabric_and_of_a_trainer_are_each_others(ranks, world_size):
    ranks(world_size).run(there_and_back)


def what_cannot_be_saved() -> list[str]:
    messages = []
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
    module = Regression()
    model = fabric.setup(module)
    with pytest.raises(RuntimeError) as caught:
        fabric.save(folder(), {"model": model})
    messages.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught:
        fabric.backward(model.training_step(Pairs()[:2], 0))
    messages.append(str(caught.value))
    first, _ = fabric.setup(module, module.configure_optimizers())
    fabric.setup(module, module.configure_optimizers())
    with pytest.raises(RuntimeError) as caught:
        fabric.save(folder(), {"model": first})
    messages.append(str(caught.value))
    return messages


def test_a_model_without_an_optimizer_is_neither_saved_nor_trained(ranks):
    evaluated, backward, taken_over = ranks(1).run(what_cannot_be_saved)[0]
    assert "Save what fabric.setup(model, optimizer) returned" in evaluated
    assert taken_over == evaluated
    assert "model, optimizer = fabric.setup(model, optimizer)" in backward


def as_a_whole() -> dict[str, Any]:
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
    module = Regression()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    path = folder() / "saved"
    state = {"model": model, "optimizer": optimizer}
    fabric.save(path, state)
    verified = manifest.verify(path)
    distributed.barrier()
    shard = next(path.rglob("*optim_states.pt"))
    if fabric.global_rank == 0:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(bytes(data))
    distributed.barrier()
    before = weights_and_masters(model._forward_module.optimizer)
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        fabric.load(path, state)
    assert_equal_bits(weights_and_masters(model._forward_module.optimizer), before)
    fabric.save(path, state)  # over the damaged one
    blocked = path.parent / "file"
    blocked.touch()
    with pytest.raises(CheckpointNotSavedError, match="file"):
        fabric.save(blocked / "below", state)
    return {"verified": (verified, manifest.verify(path)), "left": sorted(p.name for p in path.iterdir())}


@pytest.mark.parametrize("ranks_", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_save_is_whole_or_not_there_and_a_damaged_one_is_refused(ranks, ranks_):
    for seen in ranks(ranks_).run(as_a_whole):
        assert seen["verified"] == (True, True)
        assert {"checkpoint", "latest", "manifest.json"} <= set(seen["left"])


def test_saving_in_the_background_is_refused():
    with pytest.raises(SetupError, match="async_save"):
        Zero3FastFabricStrategy(async_save=True).setup_environment()
