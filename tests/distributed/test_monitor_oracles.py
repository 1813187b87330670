# SPDX-License-Identifier: Apache-2.0
"""What ``Zero3Monitor`` logs, where the right answer is known: sleeps, routers, losses, norms, learning rates."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_zero3 import Zero3FastStrategy, Zero3Monitor
from lightning_zero3.metrics import names
from lightning_zero3.metrics.summary import read_metrics
from lightning_zero3.moe.router import BIAS
from tests.fits import Language, Pairs, Regression, Sentences, fit
from tests.models import build_glm, tiny_glm

SLEEP = 0.2
PLACES = ("nowhere", "forward", "backward", "step")
TURNS = 4
MOVED = {
    "forward": {names.FWD_MICROSTEP, names.FWD},
    "backward": {names.BWD_MICROSTEP, names.BWD, names.BWD_INNER},
    "step": {names.STEP_MICROSTEP, names.OPTIMIZER_STEP},
}


class SleepyAdamW(torch.optim.AdamW):
    asleep = False

    def step(self, closure: Any = None) -> Any:
        time.sleep(SLEEP if self.asleep else 0)
        return super().step(closure)


class Sleepy(Regression):
    """Sleeps in one place after the other."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        place = PLACES[batch_idx % len(PLACES)]
        loss = super().training_step(batch, batch_idx)
        time.sleep(SLEEP if place == "forward" else 0)
        if place == "backward":
            loss.register_hook(lambda _: time.sleep(SLEEP))
        self.optimizer.asleep = place == "step"
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = SleepyAdamW(self.parameters(), lr=self.lr)
        return self.optimizer


def in_csv(folder: str, module: Any, data: Any, strategy: Any, *, monitor: Zero3Monitor, **options: Any) -> Any:
    logger = CSVLogger(folder, name="", version="run")
    trainer = fit(module, data, strategy, logger=logger, callbacks=[monitor], **options)
    torch.distributed.barrier()
    return read_metrics(f"{folder}/run/metrics.csv") if trainer.is_global_zero else {}


def sleeping(folder: str) -> Any:
    steps = len(PLACES) * TURNS
    return in_csv(folder, Sleepy(), Pairs(), "zero3_fast", monitor=Zero3Monitor(), steps=steps)


def test_a_sleep_moves_the_metric_of_its_place(ranks, tmp_path):
    metrics = ranks(1).run(sleeping, str(tmp_path))[0]
    times = set().union(*MOVED.values())

    def quickest(name: str, place: str) -> float:
        # The first turn allocates; the quickest of the others has the least of what else the machine does.
        return min(metrics[name][PLACES.index(place) + len(PLACES) * turn] for turn in range(1, TURNS))

    for place, moved in MOVED.items():
        by = {name: quickest(name, place) - quickest(name, "nowhere") for name in times}
        # The whole step's time has all of them.
        total = quickest(names.STEP_TOTAL, place) - quickest(names.STEP_TOTAL, "nowhere")
        assert total >= SLEEP * 1e3 / 2, (place, total)
        for name in moved:
            assert by[name] >= SLEEP * 1e3 / 2, (place, name, by)
        for name in times - moved:
            assert by[name] < min(by[each] for each in moved), (place, name, by)


# --- routers ---

# On the two ranks, in each micro-step of a step: the two experts of four that every token goes to.
STEPS = {
    "two experts": [((0, 1), (0, 1)), ((0, 1), (0, 1))],
    "not logged": [((3, 2), (3, 2)), ((3, 1), (3, 0))],
    "other ones on each rank": [((0, 1), (2, 3)), ((0, 1), (2, 3))],
    "not logged either": [((0, 3), (0, 3)), ((0, 3), (0, 3))],
    "one in all of them": [((0, 1), (0, 2)), ((0, 2), (0, 1))],
}
# Load of the fullest over the mean, entropy of 1, dead experts.
KNOWN = {"two experts": (2, 0.5, 2), "other ones on each rank": (1, 1, 0), "one in all of them": (2, 0.75, 1)}


LOAD = (names.EXPERT_LOAD, names.EXPERT_ENTROPY, names.DEAD_EXPERTS)


class Skewed(Language):
    """Sends every token where it is told to; in validation to the two last experts, several times."""

    def choose(self, experts: tuple[int, int]) -> None:
        for buffer in (buffer for name, buffer in self.named_buffers() if name.endswith(BIAS)):
            buffer.zero_()
            buffer[list(experts)] = 1000.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        step = list(STEPS.values())[batch_idx // 2]
        self.choose((2, 3))
        with torch.no_grad():  # a teacher's
            self.some_odd_name(**batch)
        self.choose(step[batch_idx % 2][torch.distributed.get_rank()])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.choose((2, 3))
        self.some_odd_name(**batch)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Sentences(64, length=4), batch_size=2)


def skewed(folder: str, experts: int | None, checkpointing: bool) -> Any:
    module = Skewed(build_glm(tiny_glm(num_hidden_layers=3)))
    if checkpointing:
        module.some_odd_name.gradient_checkpointing_enable({"use_reentrant": False})
    return in_csv(
        folder,
        module,
        Sentences(64),
        Zero3FastStrategy(expert_parallel_size=experts),
        monitor=Zero3Monitor(peak_flops=1e12, grad_clear_census=True, collective_census=True),
        steps=len(STEPS),
        accumulate_grad_batches=2,
        log_every_n_steps=1 if checkpointing else 2,
        val_check_interval=1,
        limit_val_batches=2,
    )


@pytest.mark.parametrize(
    ("experts", "checkpointing"),
    [(2, False), pytest.param(None, True, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_a_skewed_router_gives_the_known_load(ranks, tmp_path, experts, checkpointing):
    metrics = ranks(2).run(skewed, str(tmp_path), experts, checkpointing)[0]
    for step, label in enumerate(STEPS):
        for layer in ("", "/layer_1", "/layer_2"):
            seen = tuple(metrics[name + layer].get(step) for name in LOAD)
            if label in KNOWN and (checkpointing or step % 2 == 1):
                load, entropy, dead = KNOWN[label]
                expected = (load, entropy, 2 * dead if layer == "" else dead)
                assert seen == pytest.approx(expected), (label, layer)
    # Everything that can be logged on a CPU was, and is documented.
    for name in metrics:
        whole, of_a_layer = names.BY_NAME.get(name), names.BY_NAME.get(name.rpartition("/")[0])
        assert whole or (of_a_layer and of_a_layer.per_layer), name
    absent = {names.PEAK_ALLOCATED, names.PEAK_RESERVED, names.ALLOCATED_BETWEEN_STEPS, names.ALLOCATOR_RETRIES}
    absent |= {each.name for name in absent for each in names.spread_of(names.BY_NAME[name])}
    assert names.BY_NAME.keys() - absent <= metrics.keys()


# --- loss, norm, learning rate ---


class Scheduled(Regression):
    """Its rate is halved after each step; one step's loss is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx in (6, 7) else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_hand(batches: list[Any]) -> dict[str, float]:
    """The first step of all ranks in one process: two micro-batches each."""
    everybodys: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybodys, batches[:2])
    module = Regression()
    loss = torch.stack([((module.net(x) - y) ** 2).mean() for mine in everybodys for x, y in mine]).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in module.parameters()]).norm()
    return {"loss": loss.item(), "norm": norm.item()}


def values(folder: str) -> Any:
    module = Scheduled()
    metrics = in_csv(
        folder,
        module,
        Pairs(),
        Zero3FastStrategy({"zero_optimization": {"stage": 3, "sub_group_size": 100}}),
        monitor=Zero3Monitor(),
        steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1e-3,
    )
    return metrics, by_hand(module.batches)


def test_loss_norm_and_learning_rate_are_those_that_the_step_used(ranks, tmp_path):
    metrics, expected = ranks(2).run(values, str(tmp_path))[0]
    assert metrics[names.LOSS_OF_STEP][0] == pytest.approx(expected["loss"], rel=1e-5)
    # Before clipping.
    assert metrics[names.GRAD_NORM][0] == pytest.approx(expected["norm"], rel=1e-4)
    # The fourth step is skipped: its rate is used again.
    rates = [metrics[names.LEARNING_RATE][step] for step in range(5)]
    assert rates == pytest.approx([0.5, 0.25, 0.125, 0.0625, 0.0625])
    assert sorted(metrics[names.GRAD_NORM]) == [0, 1, 2, 4]
    assert [metrics[names.SKIPPED_STEPS][step] for step in range(5)] == [0, 0, 0, 1, 1]
    assert metrics[names.SUB_GROUPS][0] > 1
