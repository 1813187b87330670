"""validate, test and predict, wherever they stand, give the bits of a validation inside fit."""

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero3 import Zero3FastStrategy
from tests.fits import QUIET, Language, Pairs, Regression, Sentences
from tests.models import build, tiny

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 40, "sub_group_size": 500}
EP2, TP2 = {"expert_parallel_size": 2}, {"tensor_parallel_size": 2}


class Evaluated:
    """Keeps the bits of everything that a step computes."""

    def computed(self, batch: Any) -> list[torch.Tensor]:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([value.detach().clone() for value in self.computed(batch)])

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> list[torch.Tensor]:
        self.validation_step(batch, batch_idx)
        return self.seen[-1]


class Numbers(Evaluated, Regression):
    def __init__(self, seed: int = 11) -> None:
        super().__init__()
        if seed != 11:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(1.0)
        self.register_buffer("steps_seen", torch.zeros(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps_seen += 1
        return super().training_step(batch, batch_idx)

    def computed(self, batch: Any) -> list[torch.Tensor]:
        return [self.net(batch[0]), self.steps_seen]


class Words(Evaluated, Language):
    def __init__(self, seed: int = 11, family: str = "mixtral") -> None:
        super().__init__(build(tiny(family, output_router_logits=True), seed))
        self.seen: list[Any] = []

    def computed(self, batch: Any) -> list[torch.Tensor]:
        output = self.some_odd_name(**batch, use_cache=False)
        return [output.logits, output.loss, output.aux_loss]


class WordsFromConfig(Words):
    """Built in partitions, by a seed of its own."""

    def __init__(self, seed: int = 11) -> None:
        Language.__init__(self, None)
        self.seed, self.seen = seed, []

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self.some_odd_name is None:
            torch.manual_seed(self.seed)
            self.some_odd_name = AutoModelForCausalLM.from_config(tiny("mixtral", output_router_logits=True))


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) > 0 and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def after(module: Any, call: Any) -> list[Any]:
    module.seen.clear()
    call()
    return list(module.seen)


def a_life(kind: str, precision: str, options: dict[str, Any], autocast: bool) -> dict[str, bool]:
    make: Any = {"numbers": Numbers, "words": Words, "from config": WordsFromConfig}[kind]
    data = Pairs() if kind == "numbers" else Sentences(64)

    def trainer(**more: Any) -> pl.Trainer:
        strategy = Zero3FastStrategy({"zero_optimization": dict(ZERO), **(AUTOCAST if autocast else {})}, **options)
        world = torch.distributed.get_world_size()
        return pl.Trainer(
            **{**QUIET, "strategy": strategy, "precision": precision, "devices": world, "max_epochs": 1, **more},
            limit_train_batches=3,
            limit_val_batches=2,
            limit_test_batches=2,
            limit_predict_batches=2,
        )

    loader, folder = DataLoader(data, batch_size=2), [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    module, first = make(), trainer(num_sanity_val_steps=2)
    during = after(module, lambda: first.fit(module, loader, loader))
    before_training, inside = during[:2], during[2:]
    first.save_checkpoint(f"{folder[0]}/sharded")
    engine = first.strategy.model
    found = {
        "training moved something": not same(before_training, inside),
        "validate after fit": same(after(module, lambda: first.validate(module, loader, verbose=False)), inside),
        "in the training engine": first.strategy.model is engine,
        "another Trainer, test": same(after(module, lambda: trainer().test(module, loader, verbose=False)), inside),
        "another Trainer, predict": same(after(module, lambda: trainer().predict(module, loader)), inside),
    }
    first.save_checkpoint(f"{folder[0]}/after_test")
    for name, path in (("sharded", "sharded"), ("saved after test", "after_test")):
        fresh, path = make(5), f"{folder[0]}/{path}"
        found[f"{name}, validate"] = same(
            after(fresh, lambda: trainer().validate(fresh, loader, ckpt_path=path, verbose=False)), inside
        )
    another = trainer()
    found["sharded, test"] = same(
        after(fresh, lambda: another.test(fresh, loader, ckpt_path=path, verbose=False)), inside
    )
    found["sharded, predict"] = same(after(fresh, lambda: another.predict(fresh, loader, ckpt_path=path)), inside)
    alone = make()
    found["standalone"] = same(
        after(alone, lambda: trainer().validate(alone, loader, verbose=False)), before_training
    )
    # Weights that are loaded into a training engine reach masters too: the next step starts from them.
    first.validate(module, loader, ckpt_path=f"{folder[0]}/after_test", verbose=False)
    again = trainer()
    found["fit again"] = not same(after(module, lambda: again.fit(module, loader, loader))[2:], inside)
    again.save_checkpoint(f"{folder[0]}/again")
    found["fit again, saved"] = Path(f"{folder[0]}/again").is_dir()
    return found


DEFAULT = [
    (2, "numbers", "bf16-mixed", {}, False),
    (2, "words", "32-true", {**EP2, **TP2}, False),
    (2, "words", "bf16-true", EP2, False),
    (1, "words", "32-true", {"expert_parallel_size": 1}, True),
]
PRECISIONS = [("32-true", False), ("bf16-mixed", False), ("bf16-true", False), ("32-true", True)]
MATRIX = [
    (ranks, kind, precision, options, autocast)
    for ranks, kind, options in [
        *[(ranks, "numbers", {}) for ranks in (1, 2)],
        *[(1, kind, {"expert_parallel_size": 1}) for kind in ("words", "from config")],
        *[(2, kind, options) for kind in ("words", "from config") for options in ({}, EP2, TP2, {**EP2, **TP2})],
    ]
    for precision, autocast in PRECISIONS
]


@pytest.mark.parametrize(
    ("count", "kind", "precision", "options", "autocast"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in MATRIX if case not in DEFAULT)],
)
def test_an_evaluation_gives_the_bits_of_the_one_inside_fit(ranks, count, kind, precision, options, autocast):
    for found in ranks(count).run(a_life, kind, precision, options, autocast):
        assert all(found.values()), [name for name, is_so in found.items() if not is_so]
