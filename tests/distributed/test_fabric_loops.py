# SPDX-License-Identifier: Apache-2.0
"""What users write in a loop of their own: several models, closures, schedulers, clipping, loaders; what is refused."""

from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_zero3 import ConfigConflictError, UnequalBatchesError, UnsupportedFeatureError, Zero3FastFabricStrategy
from lightning_zero3.config import SetupError
from lightning_zero3.moe.peer_batches import PeerBatchesError
from tests.fabric_loops import fabric_of, train
from tests.fits import Pairs, Regression, assert_equal_bits, tensors_of
from tests.models import build, tiny

CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 3, "sub_group_size": 100}}


def loss_of(model: Any, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, y = Pairs()[2 * index : 2 * index + 2]
    return model.training_step((x.to(dtype), y), index)


def set_up(fabric: Any, dims: tuple[int, ...] = (13, 31, 17, 7)) -> tuple[Any, Any]:
    module = Regression(dims)
    return fabric.setup(module, module.configure_optimizers())


# ---------------------------------------------------------------- models and optimizers


def models_in_turn() -> None:
    """Two models and a teacher: both backwards before both steps, as in a GAN; each as if it were trained alone."""
    shapes = ((13, 31, 17, 7), (13, 9, 7))
    alone = []
    for dims in shapes:
        fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
        model, optimizer = set_up(fabric, dims)
        for index in range(3):
            fabric.backward(loss_of(model, index))
            optimizer.step()
            optimizer.zero_grad()
        alone.append(tensors_of(optimizer.optimizer))
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
    teacher = fabric.setup(Regression())
    (first, first_optimizer), (second, second_optimizer) = (set_up(fabric, dims) for dims in shapes)
    with torch.no_grad():
        taught = loss_of(teacher, 0)
    for index in range(3):
        losses = loss_of(first, index), loss_of(second, index)
        fabric.backward(losses[0], model=first)
        fabric.backward(losses[1], model=second)
        first_optimizer.step()
        second_optimizer.step()
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
    assert_equal_bits(tensors_of(first_optimizer.optimizer), alone[0])
    assert_equal_bits(tensors_of(second_optimizer.optimizer), alone[1])
    assert loss_of(teacher, 0) == taught


def zero_grad_clears_and_closures_run() -> None:
    """A cleared backward leaves nothing, and ``step(closure)`` runs forward and backward once."""
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
    model, optimizer = set_up(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # made after setup
    fabric.backward(loss_of(model, 5))
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        loss = loss_of(model, 0)
        fabric.backward(loss)
        return loss

    loss = optimizer.step(closure)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5e-2
    plain = Regression()
    expected = loss_of(plain, 0)
    expected.backward()
    plain.configure_optimizers().step()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss_of(model, 1).item() == pytest.approx(loss_of(plain, 1).item(), rel=1e-5)
    assert "SteppedOptimizer" in repr(optimizer.optimizer)
    optimizer.load_state_dict([optimizer.state_dict()] * fabric.world_size)


def skipped_steps_are_told() -> None:
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
    model, optimizer = set_up(fabric)
    before = tensors_of(optimizer.optimizer)["masters"]
    fabric.backward(loss_of(model, 0) * float("nan"))
    with pytest.raises(RuntimeError, match="norm of all gradients is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    assert fabric.strategy.last_step_was_skipped
    assert_equal_bits({"masters": tensors_of(optimizer.optimizer)["masters"]}, {"masters": before})
    fabric.backward(loss_of(model, 0))
    norm = fabric.clip_gradients(model, optimizer, max_norm=float("inf"))
    optimizer.step()
    assert not fabric.strategy.last_step_was_skipped
    assert norm.item() == pytest.approx(float(fabric.strategy.model.get_global_grad_norm()), rel=1e-6)


def the_users_own_loop() -> None:
    models_in_turn()
    zero_grad_clears_and_closures_run()
    skipped_steps_are_told()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_a_loop_of_the_users_own_does(ranks, world_size):
    ranks(world_size).run(the_users_own_loop)


def stock_semantics() -> tuple[list[str], float]:
    """Lightning's own way: the optimizer is stepped past the engine, and DeepSpeed clips to 1.0 by itself."""
    fabric, _, optimizer = train(Regression(), Pairs(), Zero3FastFabricStrategy(CONFIG, stock_semantics=True))
    engine = fabric.strategy.model
    return [type(optimizer.optimizer).__name__, str(engine.global_steps)], engine.gradient_clipping()


def test_stock_semantics_leave_lightnings_own_way(ranks):
    (name, steps), clipping = ranks(1).run(stock_semantics)[0]
    assert name == "FastStage3Optimizer"
    if steps != "0" or clipping != 1.0:
        pytest.skip("Lightning steps the engine, or DeepSpeed doesn't clip unasked, by themselves")


# ---------------------------------------------------------------- building


def built_in_init_module() -> None:
    """Partitioned while built, with a whole model's values; evaluated, generated from, and trained on."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(5))
    config = tiny("mixtral")
    torch.manual_seed(3)
    whole = type(build(config))(config)
    fabric = fabric_of(Zero3FastFabricStrategy(expert_parallel_size=2, verify_parallel=True))
    torch.manual_seed(3)
    with fabric.init_module():
        hf = type(build(config))(config)
    assert all(hasattr(parameter, "ds_id") for parameter in hf.parameters())
    with torch.no_grad():
        expected = whole(input_ids=ids, labels=ids).loss.item()
    model, optimizer = fabric.setup(hf, torch.optim.AdamW(hf.parameters(), lr=1e-2))
    model.mark_forward_method("generate")
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        # Ranks end at different lengths.
        tokens = model.generate(input_ids=ids[:, :4], max_new_tokens=2 + fabric.global_rank, do_sample=False)
        assert tokens.shape == (2, 6 + fabric.global_rank)
        model.train()
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert losses[1] < losses[0]


# ---------------------------------------------------------------- data


class Some(IterableDataset):
    """As many pairs as it is told."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return (Pairs()[index] for index in range(self.length))


class Ids(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index)


def loaders() -> None:
    fabric = fabric_of(Zero3FastFabricStrategy(CONFIG))
    rank = fabric.global_rank
    loader = fabric.setup_dataloaders(DataLoader(Some(4 + 2 * rank), batch_size=2))
    batches = iter(loader)
    assert len(next(batches)) == len(next(batches)) == 2  # whoever stops here sees nothing
    with pytest.raises(UnequalBatchesError, match=r"given 2 batches and ended on rank 0; 1 of 2 ranks have more\. .*"):
        next(batches)
    # Peers read the same shard, and are told where they don't.
    fabric = fabric_of(Zero3FastFabricStrategy(tensor_parallel_size=2))
    hf = build(tiny("qwen3"))
    model, _ = fabric.setup(hf, torch.optim.AdamW(hf.parameters()))
    (mine, *_) = fabric.setup_dataloaders(DataLoader(Ids(), batch_size=1, shuffle=True))
    seen = [None, None]
    distributed.all_gather_object(seen, mine.tolist())
    assert seen[0] == seen[1]
    with pytest.raises(PeerBatchesError, match="The first inputs of the model isn't the same on tensor-parallel peers"):
        model(input_ids=torch.full((1, 16), rank))


def building_and_data() -> None:
    built_in_init_module()
    loaders()


def test_building_and_data(ranks):
    ranks(2).run(building_and_data)


# ---------------------------------------------------------------- refused


def said(kind: type[Exception], function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    return str(caught.value)


def refused() -> list[str]:
    fabric = fabric_of(Zero3FastFabricStrategy({**CONFIG, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2}))
    model, optimizer = set_up(fabric)
    fabric.backward(loss_of(model, 0))
    messages = [
        said(RuntimeError, lambda: fabric.backward(loss_of(model, 1))),
        said(SetupError, lambda: fabric.no_backward_sync(model).__enter__()),
        said(ConfigConflictError, fabric.clip_gradients, model, optimizer, max_norm=0.1),
        said(UnsupportedFeatureError, fabric.clip_gradients, model, optimizer, max_norm=0.5, norm_type=1),
        said(UnsupportedFeatureError, fabric.clip_gradients, model, optimizer, clip_val=0.5),
        said(UnsupportedFeatureError, optimizer.optimizer.add_param_group, {}),
    ]
    module = Regression()
    lbfgs = torch.optim.LBFGS(module.parameters())
    two = [torch.optim.SGD(module.net[k].parameters()) for k in (0, 2)]
    messages += [
        said(UnsupportedFeatureError, fabric.setup, module, *two),
        said(UnsupportedFeatureError, fabric.setup, module, lbfgs),
        said(SetupError, fabric.setup, Regression().to("meta")),
    ]
    with_optimizer = fabric_of(Zero3FastFabricStrategy({**CONFIG, "optimizer": {"type": "AdamW"}}))
    messages.append(said(ConfigConflictError, set_up, with_optimizer))
    compiled = Regression()
    compiled.net = torch.compile(compiled.net)
    messages.append(said(UnsupportedFeatureError, fabric.setup, compiled))
    return messages


def test_what_is_refused_names_the_remedy(ranks):
    remedies = [
        "call optimizer.step() after every fabric.backward()",
        "gradient_accumulation_steps to 2",
        "gradient_clipping to 0.5",
        "leave norm_type out",
        "Pass max_norm",
        "with lr=0",
        "several parameter groups",
        "Take AdamW",
        "init_module",
        "leave the section 'optimizer' out",
        "self.net.compile()",
    ]
    for remedy, message in zip(remedies, ranks(1).run(refused)[0], strict=True):
        assert remedy in message
        assert "Trainer" not in message


@pytest.mark.parametrize(
    ("config", "options", "precision", "message"),
    [
        (
            {**CONFIG, "bf16": {"enabled": True}},
            {},
            "32-true",
            'Fabric has precision="32-true". Pass Fabric(precision=',
        ),
        ({**CONFIG, "train_batch_size": 8}, {}, None, "gradient_accumulation_steps 1 × 1 ranks is 1"),
        ({**CONFIG, "gradient_accumulation_steps": 0}, {}, None, "a whole number, 1 or more"),
        (CONFIG, {"tensor_parallel_size": 2}, None, "tensor_parallel_size=2 doesn't divide the 1 ranks"),
        (CONFIG, {"verify_parallel": True}, None, "leave verify_parallel out"),
    ],
)
def test_what_is_refused_before_any_process_group(config, options, precision, message):
    strategy = Zero3FastFabricStrategy(config, **options)
    assert message in said(SetupError, fabric_of, strategy, precision=precision)
    assert not distributed.is_initialized()
