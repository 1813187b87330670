# SPDX-License-Identifier: Apache-2.0
"""A second fit, a second model, a second Trainer in one process: each its own, and the first gives its memory back."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero3 import STOCK, Zero3FastStrategy
from lightning_zero3.config import SetupError
from lightning_zero3.substitution import substituted
from tests.engines import PRECISIONS
from tests.fits import Language, Pairs, Regression, Sentences, assert_equal_bits, fit, optimizer_of, tensors_of
from tests.models import build, tiny

BF16_MASTERS, AUTOCAST = PRECISIONS["bf16 masters"], PRECISIONS["autocast"]


class Scheduled(Regression):
    """Its scheduler, which the Trainer keeps, keeps the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Storages:
    """Watches the memory of an optimizer's tensors without keeping it."""

    def __init__(self, optimizer: Any) -> None:
        moments = [v for state in optimizer.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        buckets = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
        of_gradients = [*buckets, optimizer.grad_partitions_flat_buffer]
        tensors = {
            "weights": [p.ds_tensor for group in optimizer.fp16_groups for p in group],
            "masters": list(optimizer.fp32_partitioned_groups_flat),
            "moments": moments,
            "gradients": [tensor for tensor in of_gradients if tensor is not None],
        }
        assert all(tensors.values()), {kind: len(each) for kind, each in tensors.items()}
        self._references = {
            kind: [tensor.untyped_storage()._weak_ref() for tensor in each] for kind, each in tensors.items()
        }

    def alive(self, seconds: float = 0.0) -> list[str]:
        """Kinds of tensors whose memory isn't free, and isn't soon: gloo's threads let go of theirs when they run."""
        until = time.monotonic() + seconds
        while (alive := self._alive()) and time.monotonic() < until:
            time.sleep(0.05)
        return alive

    def _alive(self) -> list[str]:
        return [
            kind
            for kind, references in self._references.items()
            if not all(torch.UntypedStorage._expired(reference) for reference in references)
        ]


def strategy(config: dict[str, Any] | None = None, **options: Any) -> Any:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 2000}
    config = dict(config or {})
    return Zero3FastStrategy(
        {**config, "zero_optimization": {**zero, **config.get("zero_optimization", {})}}, **options
    )


def whole_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def fit_twice(precision: str, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    module = Scheduled()
    first = fit(module, Pairs(), strategy(config, **options), precision=precision)
    storages, old = Storages(optimizer_of(first)), optimizer_of(first)
    shared = bool(old.aliased_sub_groups())
    reference = Scheduled()
    reference.load_state_dict(whole_weights(module))
    second = fit(module, Pairs(), strategy(config, **options), precision=precision)
    gc.collect()
    alive = storages.alive()
    try:
        first.save_checkpoint("nowhere")
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    by_itself = fit(reference, Pairs(), strategy(config, **options), precision=precision)
    assert_equal_bits(tensors_of(optimizer_of(second)), tensors_of(optimizer_of(by_itself)))
    assert module.losses[-5:] == reference.losses
    return {"alive": alive, "shared": shared, "refused": refused, "shell": vars(old)}


CASES = [("bf16-mixed", {}, {}), ("32-true", {}, {"alias_master_weights": True})]
MORE = [
    ("32-true", {}, {"alias_master_weights": False}),
    ("32-true", AUTOCAST, {}),
    ("bf16-mixed", BF16_MASTERS, {}),
    ("32-true", {}, {"offload_optimizer": True}),
]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("precision", "config", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_second_fit_goes_on_from_the_weights_and_the_first_gives_its_memory_back(
    ranks, count, precision, config, options
):
    for seen in ranks(count).run(fit_twice, precision, config, options):
        # The first Trainer, its scheduler and its optimizer's shell are still there. Weights are copied into the second
        # engine's buffer, so even theirs is free.
        assert seen["alive"] == []
        assert "a later run has taken over its module" in seen["refused"]
        assert not seen["shell"]


def another_model_in_the_same_trainer() -> dict[str, Any]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from tests.fits import QUIET

    world = torch.distributed.get_world_size()
    trainer = pl.Trainer(**{**QUIET, "strategy": strategy(), "devices": world, "max_epochs": 1, "max_steps": 3})
    one, other = Regression(), Regression(dims=(13, 9, 7))
    trainer.fit(one, DataLoader(Pairs(), batch_size=2))
    storages, before = Storages(optimizer_of(trainer)), whole_weights(one)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit_loop.max_epochs = 2
    trainer.fit(other, DataLoader(Pairs(), batch_size=2))
    gc.collect()
    alive, after = storages.alive(), whole_weights(one)
    return {
        "alive": alive,
        "kept": all(torch.equal(before[name], after[name]) for name in before),
        "trained": len(other.losses),
    }


def test_another_model_in_the_same_trainer(ranks):
    for seen in ranks(2).run(another_model_in_the_same_trainer):
        # In fp32 weights are their masters.
        assert set(seen["alive"]) <= {"weights", "masters"}
        assert seen["kept"]
        assert seen["trained"] == 3


class Momentless(Language):
    """A second fit has all that the first one had."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two_fits_and_one(options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of two epochs, in two fits and in one."""
    parted, whole = (Momentless(build(tiny("mixtral"))) for _ in range(2))
    as_it_is = {"steps": -1, "limit_train_batches": 2, "use_distributed_sampler": False}
    for _ in range(2):
        fit(parted, Sentences(64), strategy(**options), max_epochs=1, **as_it_is)
    fit(whole, Sentences(64), strategy(**options), max_epochs=2, **as_it_is)
    return parted.losses, whole.losses


@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel_size": 2, "tensor_parallel_size": 2},
        pytest.param({"expert_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_fits_with_parallel_layers_are_one(ranks, options):
    for parted, whole in ranks(2).run(two_fits_and_one, options):
        assert parted == whole
        assert len(set(parted)) == 4


def dropped(kind: str) -> list[str]:
    if kind == "numbers":
        module, data, options = Scheduled(), Pairs(), {}
    else:
        module, data = Language(build(tiny("mixtral"))), Sentences(64)
        options = {"expert_parallel_size": 2, "tensor_parallel_size": 2} if kind == "parallel" else {}
    trainer = fit(module, data, strategy(**options), precision="bf16-mixed")
    storages, engine = Storages(optimizer_of(trainer)), weakref.ref(trainer.strategy.model)
    del trainer, module
    gc.collect()
    return [*storages.alive(seconds=10), *(["engine"] if engine() is not None else [])]


@pytest.mark.parametrize("kind", ["numbers", "parallel", pytest.param("words", marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_run_that_nobody_holds(ranks, kind):
    assert ranks(2).run(dropped, kind) == [[], []]


def each_with_its_own_config() -> dict[str, Any]:
    hpz = {"zero_optimization": {"zero_hpz_partition_size": 1}}
    plain = optimizer_of(fit(Regression(), Pairs(), strategy()))
    dtype = {"plain": str(plain.communication_data_type), "alias": plain.switches.alias_master_weights}
    fit(Regression(), Pairs(), strategy(AUTOCAST, alias_master_weights=False))
    module = Regression()
    after = optimizer_of(fit(module, Pairs(), strategy(hpz)))
    assert_equal_bits(tensors_of(plain), tensors_of(after))
    # The same module, in other precisions one after another.
    seen = []
    for precision, config in (("32-true", AUTOCAST), ("bf16-mixed", {}), ("32-true", {})):
        optimizer = optimizer_of(fit(module, Pairs(), strategy(config), precision=precision))
        parameter = next(module.parameters())
        seen.append((str(parameter.ds_tensor.dtype), hasattr(parameter, "comm_dtype"), len(optimizer.ipg_buckets)))
    return {**dtype, "seen": seen}


def test_each_run_has_its_own_config_and_switches(ranks):
    for seen in ranks(2).run(each_with_its_own_config):
        assert seen["alias"]
        assert [each[:2] for each in seen["seen"]] == [
            ("torch.float32", True),
            ("torch.bfloat16", False),
            ("torch.float32", False),
        ]


class Attention(Regression):
    """Tuples come out of its modules, and plain tensors go in."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.read = torch.nn.MultiheadAttention(13, 1), torch.nn.LSTM(13, 13)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        x = self.read(x[None])[0]
        return super().training_step([self.attend(x, x, x)[0][0], y], batch_idx)


def two_fits_of_tuples() -> list[list[float]]:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    upstream, asked, losses = DeepSpeedZeRoOffload.pre_sub_module_backward_function, [], []

    def before_backward(offload: Any, sub_module: nn.Module) -> Any:
        asked.append(offload)
        return upstream(offload, sub_module)

    for options in ({}, STOCK):
        module = Attention()
        for _ in range(2):
            asked.clear()
            with substituted(DeepSpeedZeRoOffload, "pre_sub_module_backward_function", before_backward):
                trainer = fit(module, Pairs(), strategy(**options))
            assert all(each is optimizer_of(trainer).parameter_offload for each in asked)
            assert asked or options is not STOCK
        losses.append(module.losses)
    return losses


def test_a_second_engine_has_its_own_hooks_on_modules_that_return_tuples(ranks):
    for ours, stock in ranks(1).run(two_fits_of_tuples):
        assert ours == stock
        assert len(set(ours)) == len(ours)


def hpz_and_back() -> list[bool]:
    seen = []
    for size in (1, 2, 1):
        module = Regression()
        fit(module, Pairs(), strategy({"zero_optimization": {"zero_hpz_partition_size": size}}), steps=1)
        seen.append(next(module.parameters()).ds_zero_param_process_group is not None)
    return seen


def test_hpzeros_group_ends_with_its_run(ranks):
    assert ranks(2).run(hpz_and_back) == [[False, True, False]] * 2


def other_sizes() -> str:
    module = Language(build(tiny("mixtral")))
    fit(module, Sentences(64), strategy(expert_parallel_size=2), steps=1)
    with pytest.raises(SetupError) as refused:
        fit(module, Sentences(64), strategy(), steps=1)
    return str(refused.value)


def test_layers_that_are_shared_out_otherwise_are_refused(ranks):
    for message in ranks(2).run(other_sizes):
        assert "an earlier run with expert_parallel_size=2" in message
        assert "this Trainer has expert_parallel_size=None" in message


def hooks_after_evaluation() -> dict[str, int]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from tests.fits import QUIET

    class Counting(Regression):
        calls = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    module = Counting()

    def count(*_: Any) -> None:
        module.calls += 1

    module.net[0].register_forward_hook(count)
    trainer = pl.Trainer(
        **{**QUIET, "strategy": strategy(), "devices": torch.distributed.get_world_size(), "limit_val_batches": 2}
    )
    trainer.validate(module, DataLoader(Pairs(), batch_size=2), verbose=False)
    return {"calls": module.calls}


def test_a_users_own_hooks_survive_an_evaluation(ranks):
    assert ranks(1).run(hooks_after_evaluation) == [{"calls": 2}]
