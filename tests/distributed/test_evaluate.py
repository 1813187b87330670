# SPDX-License-Identifier: Apache-2.0
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
    path = f"{folder[0]}/sharded"
    fresh, saved_later = make(5), make(5)
    found["sharded, validate"] = same(
        after(fresh, lambda: trainer().validate(fresh, loader, ckpt_path=path, verbose=False)), inside
    )
    found["saved after test"] = same(
        after(
            saved_later,
            lambda: trainer().validate(saved_later, loader, ckpt_path=f"{folder[0]}/after_test", verbose=False),
        ),
        inside,
    )
    another = trainer()
    found["sharded, test"] = same(
        after(fresh, lambda: another.test(fresh, loader, ckpt_path=path, verbose=False)), inside
    )
    found["sharded, predict"] = same(after(fresh, lambda: another.predict(fresh, loader, ckpt_path=path)), inside)
    alone = make()
    found["standalone"] = same(after(alone, lambda: trainer().validate(alone, loader, verbose=False)), before_training)
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


def trainer_of(strategy: Any = None, **options: Any) -> pl.Trainer:
    world = torch.distributed.get_world_size()
    return pl.Trainer(
        **{**QUIET, "strategy": strategy or Zero3FastStrategy(), "devices": world, "limit_val_batches": 2, **options}
    )


# A loader's batches are every rank's: results don't depend on how many ranks there are.
ALL_SEE_THE_SAME = {"use_distributed_sampler": False}


class PartlyFrozen(Numbers):
    def __init__(self, seed: int = 11) -> None:
        super().__init__(seed)
        self.net[2].weight.requires_grad_(False)
        self.tied = self.net[0].weight

    def get_extra_state(self) -> Any:
        return {"calls": len(self.losses)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def save(folder: str, stock: bool = False, **options: Any) -> list[Any]:
    from tests.distributed.stock import StockOnCPU

    strategy = StockOnCPU(stage=3) if stock else Zero3FastStrategy(**options)
    module, trainer = PartlyFrozen(), trainer_of(strategy, max_steps=3, **ALL_SEE_THE_SAME)
    trainer.fit(module, DataLoader(Pairs(), batch_size=2))
    trainer.save_checkpoint(folder)
    loader = DataLoader(Pairs(), batch_size=2)
    return after(module, lambda: trainer.validate(module, loader, verbose=False))


def load(folder: str, change: Any = None, **options: Any) -> Any:
    module = PartlyFrozen(5)
    if change is not None:
        name, value = change
        setattr(module, name, value if value is not None else torch.nn.Linear(3, 3))
    trainer = trainer_of(**options, **ALL_SEE_THE_SAME)
    loader = DataLoader(Pairs(), batch_size=2)
    seen = after(module, lambda: trainer.validate(module, loader, ckpt_path=folder, verbose=False))
    assert module.extra == {"calls": 3}
    return seen


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_reads_the_same_weights(ranks, tmp_path, saved_on, loaded_on):
    saved = ranks(saved_on).run(save, str(tmp_path))
    for seen in ranks(loaded_on).run(load, str(tmp_path)):
        assert same(seen, saved[0])


def test_a_checkpoint_of_stock_deepspeed(ranks, tmp_path):
    saved = ranks(2).run(save, str(tmp_path), True)
    assert same(ranks(2).run(load, str(tmp_path))[1], saved[1])


def load_wrong(folder: str, change: Any) -> str:
    with pytest.raises(RuntimeError) as refused:
        load(folder, change)
    return str(refused.value)


def test_weights_that_are_not_the_modules_are_refused_by_name(ranks, tmp_path):
    ranks(1).run(save, str(tmp_path))
    (message,) = ranks(1).run(load_wrong, str(tmp_path), ("another", None))
    assert "missing in the checkpoint: another.weight, another.bias" in message
    for path in tmp_path.rglob("*optim_states.pt"):
        path.unlink()
    (message,) = ranks(1).run(load_wrong, str(tmp_path), ("unused", 1))
    assert "optim_states.pt is missing" in message


def without_frozen(folder: str) -> tuple[bool, list[str]]:
    import warnings

    save(folder, exclude_frozen_parameters=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder)
    return True, [str(each.message) for each in caught if "frozen parameters" in str(each.message)]


def test_frozen_parameters_that_were_left_out_are_named(ranks, tmp_path):
    ((_, (message,)),) = ranks(1).run(without_frozen, str(tmp_path))
    assert "saved without frozen parameters; 1 stay as they are: net.2.weight." in message


def single_file(folder: str, options: dict[str, Any]) -> bool:
    module = Words()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    loader = DataLoader(Sentences(64), batch_size=2)
    plain = after(
        module,
        lambda: trainer_of(Zero3FastStrategy(load_full_weights=True, **options)).validate(
            module, loader, verbose=False
        ),
    )
    path = f"{folder}/whole.ckpt"
    if torch.distributed.get_rank() == 0:
        torch.save({"state_dict": weights, "pytorch-lightning_version": pl.__version__}, path)
    torch.distributed.barrier()
    fresh = Words(5)
    trainer = trainer_of(Zero3FastStrategy(load_full_weights=True, **options))
    return same(after(fresh, lambda: trainer.validate(fresh, loader, ckpt_path=path, verbose=False)), plain)


def test_a_single_file(ranks, tmp_path):
    assert ranks(2).run(single_file, str(tmp_path), {}) == [True, True]


class Speaking(Words):
    def __init__(self) -> None:
        Language.__init__(self, build(tiny("mixtral"), 11))
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Each rank's sentences have another length, and need another number of forwards.
        rank = torch.distributed.get_rank()
        spoken = self.some_odd_name.generate(
            batch["input_ids"], max_new_tokens=3 + 4 * rank, do_sample=False, use_cache=True
        )
        self.seen.append([spoken])


def generated(options: dict[str, Any]) -> tuple[bool, list[int]]:
    loader = DataLoader(Sentences(64), batch_size=2)
    module, trainer = Speaking(), trainer_of(Zero3FastStrategy(**options), max_steps=2, **ALL_SEE_THE_SAME)
    plain = build(tiny("mixtral"), 11)
    ids, rank = next(iter(loader))["input_ids"], torch.distributed.get_rank()
    expected = plain.generate(ids, max_new_tokens=3 + 4 * rank, do_sample=False)
    seen = after(module, lambda: trainer.validate(module, loader, verbose=False))
    untouched = "generate" not in vars(module.some_odd_name)
    return torch.equal(seen[0][0], expected) and untouched, list(expected.shape)


@pytest.mark.parametrize("options", [{}, EP2])
def test_ranks_generate_sentences_of_unequal_lengths(ranks, options):
    assert ranks(2).run(generated, options) == [(True, [2, 19]), (True, [2, 23])]


def into_the_training_engine(folder: str) -> None:
    import deepspeed

    from tests.fits import assert_equal_bits, optimizer_of, tensors_of

    module, trainer = Numbers(), trainer_of(max_steps=3, precision="bf16-mixed")
    loader = DataLoader(Pairs(), batch_size=2)
    trainer.fit(module, loader)
    trainer.save_checkpoint(folder)
    before = tensors_of(optimizer_of(trainer))
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        for parameter in module.parameters():
            parameter.data.zero_()
    assert not any(master.any() for master in tensors_of(optimizer_of(trainer))["masters"])
    trainer.validate(module, loader, ckpt_path=folder, verbose=False)
    assert_equal_bits(tensors_of(optimizer_of(trainer)), before)


def test_a_checkpoint_that_is_evaluated_after_fit_reaches_masters_too(ranks, tmp_path):
    ranks(2).run(into_the_training_engine, str(tmp_path))


class Wide(Evaluated, Regression):
    """With a weight that is worth DeepSpeed's while to swap to a file."""

    def __init__(self) -> None:
        super().__init__(dims=(13, 900, 900, 7))
        self.seen: list[Any] = []

    def computed(self, batch: Any) -> list[torch.Tensor]:
        return [self.net(batch[0])]


def from_files(folder: str) -> tuple[bool, bool]:
    nvme = {
        "remote_device": "nvme",
        "offload_optimizer": True,
        "offload_optimizer_device": "nvme",
        "offload_parameters": True,
        "offload_params_device": "nvme",
        "nvme_path": folder,
        "params_buffer_size": 2**21,
        "params_buffer_count": 6,
        "pin_memory": False,
    }
    seen = []
    for options in (nvme, {}):
        module, trainer = Wide(), trainer_of(Zero3FastStrategy(**options))
        loader = DataLoader(Pairs(), batch_size=2)
        seen.append(after(module, lambda: trainer.validate(module, loader, verbose=False)))  # noqa: B023
    return same(*seen), any(path.stat().st_size for path in Path(folder).rglob("*.swp"))


@pytest.mark.usefixtures("async_io")
def test_weights_on_nvme_keep_their_digits(ranks, tmp_path):
    assert ranks(1).run(from_files, str(tmp_path)) == [(True, True)]


def nothing_to_save() -> str:
    module, trainer = Numbers(), trainer_of()
    trainer.validate(module, DataLoader(Pairs(), batch_size=2), verbose=False)
    with pytest.raises(RuntimeError) as refused:
        trainer.save_checkpoint("nowhere")
    return str(refused.value)


def test_an_evaluation_alone_has_nothing_to_save(ranks):
    assert "this Trainer has only evaluated" in ranks(1).run(nothing_to_save)[0]
