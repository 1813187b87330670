# SPDX-License-Identifier: Apache-2.0
"""A checkpoint read slice by slice into partitions, experts and slices is what from_pretrained reads whole."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.config import SetupError
from lightning_zero3.moe import verify
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.moe.load import LoadReport, load_pretrained
from lightning_zero3.moe.safetensors_files import SINGLE
from lightning_zero3.topology import Topology
from tests.engines import PRECISIONS
from tests.engines import build as build_engine
from tests.fits import Language, Sentences, fit, optimizer_of
from tests.models import FAMILIES, build, tiny

# How the tensors lie in files.
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "shards": {"max_shard_size": "60KB"},
    # Experts as one tensor, as Transformers holds them.
    "fused": {"save_original_format": False},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[tuple[str, str, bool], str] = {}

    def get(family: str, layout: str = "single", *, tied: bool = False) -> str:
        """A folder of weights that are neither rounded to bf16 nor at the value of an initialisation."""
        key = family, layout, tied
        if key not in folders:
            folder = tmp_path_factory.mktemp("weights") / family
            build(tiny(family, tie_word_embeddings=tied), seed=3).save_pretrained(folder, **LAYOUTS[layout])
            folders[key] = str(folder)
        return folders[key]

    return get


class Loads(Language):
    """Has other weights at first; what it has loaded, it keeps a copy of.

    Args:
        family: Of the model.
        folder: The checkpoint.
        where: ``configure_model``, ``instead`` of drawing there, or into an ``engine`` around a model that was built
            ``whole`` or in partitions.
    """

    def __init__(self, family: str, folder: str, where: str, **overrides: Any) -> None:
        config = tiny(family, **overrides)
        super().__init__(build(config, seed=8) if where == "engine, whole" else None)
        self.family, self.config, self.folder, self.where = family, config, folder, where
        self.report: LoadReport | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.masters: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        if self.some_odd_name is not None:
            return
        weights = self.folder if self.where == "instead" else None
        self.some_odd_name = build_from_config(FAMILIES[self.family][1], self.config, weights)
        if self.where == "configure_model":
            self.report = load_pretrained(self, self.folder)

    def on_fit_start(self) -> None:
        if self.where.startswith("engine"):
            self.report = load_pretrained(self, self.folder)

    def on_train_start(self) -> None:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        model = self.some_odd_name
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            seen = {
                n: v for n, v in [*model.named_parameters(), *model.named_buffers()] if "tokens_per_expert" not in n
            }
            self.weights = {name: value.detach().clone() for name, value in seen.items()}
        masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: value.clone() for name, value in masters.items()}


def differences(module: Loads, layout: Topology, rank: int, masters_digits: torch.dtype) -> list[str]:
    """What differs from this rank's part of what from_pretrained gives in one process."""
    with torch.random.fork_rng(devices=[]):
        reference = FAMILIES[module.family][1].from_pretrained(module.folder, dtype=torch.float32)
    theirs = dict([*reference.named_parameters(), *reference.named_buffers()])
    different = []
    for kind, seen, digits in (("weight", module.weights, None), ("master", module.masters, masters_digits)):
        ours = verify.as_transformers_names(seen, theirs)
        for name, whole in theirs.items():
            if name not in ours and (kind == "weight" or name in dict(reference.named_parameters())):
                different.append(f"{kind} {name} isn't there")
            elif name in ours:
                mine = ours[name]
                part = verify.part_of(name, whole, mine.shape, layout, rank)
                rounded = None if part is None else part.to(digits or mine.dtype).to(mine.dtype)
                if rounded is None or not torch.equal(mine, rounded):
                    different.append(f"{kind} {name} {tuple(mine.shape)}")
    return different


def loads(
    family: str, folder: str, where: str, sizes: tuple[int | None, int | None], precision: str, tied: bool = False
) -> dict[str, Any]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    experts, slices = sizes
    module = Loads(family, folder, where, tie_word_embeddings=tied)
    strategy = Zero3FastStrategy(expert_parallel_size=experts, tensor_parallel_size=slices)
    trainer = fit(module, Sentences(64), strategy, steps=2, precision=precision)
    layout = Topology(world, experts or 1, slices or 1)
    # Loaded by an engine, masters have the file's digits; else the weights' own.
    exact = where.startswith("engine") or precision == "32-true"
    different = differences(module, layout, rank, torch.float32 if exact else torch.bfloat16)
    report = module.report
    return {
        "different": different,
        "report": report and (len(report.loaded), report.skipped, report.bytes_read, report.bytes_stored),
        "own": own_bytes(optimizer_of(trainer)),
        "losses": module.losses,
    }


def own_bytes(optimizer: Any) -> int:
    """Bytes that this rank's partitions have in a file of fp32, without padding."""
    sizes = 0
    for group, paddings in zip(optimizer.fp16_groups, optimizer.groups_padding, strict=True):
        sizes += sum(
            p.partition_numel() - min(pad, p.partition_numel()) for p, pad in zip(group, paddings, strict=True)
        )
    return 4 * sizes


def check(seen: list[dict[str, Any]], buffers: int = 0) -> None:
    for each in seen:
        assert each["different"] == []
        assert all(0 < loss < 20 for loss in each["losses"])
        if each["report"] is not None:
            _, skipped, read, stored = each["report"]
            assert skipped == {}
            # Partitions once, and what isn't partitioned (correction biases) on every rank; nothing else.
            assert read == each["own"] + buffers
            assert read < stored or len(seen) == 1


# Bytes of correction biases in two MoE layers: fp32, 8 experts each.
BUFFERS = {"glm": 2 * 8 * 4, "minimax": 2 * 8 * 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_into_a_live_engine_whose_experts_are_shared_out(ranks, checkpoint, family):
    layout = "fused" if family == "mixtral" else "shards"
    seen = ranks(2).run(loads, family, checkpoint(family, layout), "engine, partitioned", (2, None), "bf16-mixed")
    check(seen, BUFFERS.get(family, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_into_a_live_engine_whose_layers_are_split(ranks, checkpoint, family):
    seen = ranks(2).run(loads, family, checkpoint(family), "engine, whole", (None, 2), "32-true")
    check(seen, BUFFERS.get(family, 0))


@pytest.mark.parametrize("where", ["configure_model", "instead"])
def test_while_the_model_is_built(ranks, checkpoint, where):
    check(ranks(2).run(loads, "glm", checkpoint("glm", "shards"), where, (2, None), "bf16-mixed"), BUFFERS["glm"])


def test_tied_embeddings_are_loaded_once(ranks, checkpoint):
    folder = checkpoint("glm", tied=True)
    check(ranks(2).run(loads, "glm", folder, "engine, partitioned", (2, None), "bf16-mixed", True), BUFFERS["glm"])


WHERE = ("configure_model", "instead", "engine, whole", "engine, partitioned")


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [(1, (None, None)), (1, (1, None)), (2, (None, None)), (2, (1, None)), (2, (2, None)), (2, (None, 2))],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_ranks(ranks, checkpoint, family, world, sizes, where):
    check(ranks(world).run(loads, family, checkpoint(family), where, sizes, "bf16-mixed"), BUFFERS.get(family, 0))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_files(ranks, checkpoint, family, layout, precision):
    seen = ranks(2).run(loads, family, checkpoint(family, layout), "engine, partitioned", (2, None), precision)
    check(seen, BUFFERS.get(family, 0))


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_slices_on_four_ranks(ranks, checkpoint, family, where):
    for each in ranks(4).run(loads, family, checkpoint(family), where, (2, 2), "bf16-mixed"):
        assert each["different"] == []


def refused_on_all(folder: str, broken: str) -> tuple[str, bool]:
    """One rank sees a broken folder."""
    model = build(tiny("mixtral"), seed=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SetupError) as refusal:
        load_pretrained(model, broken if torch.distributed.get_rank() == 1 else folder)
    return str(refusal.value), all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_one_rank_cannot_read_no_rank_loads(ranks, checkpoint, tmp_path):
    shutil.copytree(checkpoint("mixtral"), tmp_path / "cut")
    os.truncate(tmp_path / "cut" / SINGLE, 1000)
    seen = ranks(2).run(refused_on_all, checkpoint("mixtral"), str(tmp_path / "cut"))
    assert [unchanged for _, unchanged in seen] == [True, True]
    assert seen[0][0].startswith("Rank 1 can't load, so no rank does.")
    assert all(str(tmp_path / "cut" / SINGLE) in message for message, _ in seen)


def test_ranks_must_see_the_same_files(ranks, checkpoint):
    seen = ranks(2).run(refused_on_all, checkpoint("mixtral"), checkpoint("mixtral", "shards"))
    assert all("sees other files" in message and unchanged for message, unchanged in seen)


ENGINES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "masters of 32 bits on the host": {"bf16": {"enabled": True}, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "weights on the host": {"zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
    "bf16 masters": PRECISIONS["bf16 masters"],
    "a second partition": {"zero": {"zero_hpz_partition_size": 2}},
}


def into_engine(folder: str, options: dict[str, Any]) -> list[str]:
    """Load after a forward, which has left gathered weights and copies of partitions behind."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = build(tiny("mixtral"), seed=8)
    model.model.norm.weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = build_engine(model, optimizer=torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0), **options)
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        engine(input_ids=ids)
        load_pretrained(engine.module, folder)
        logits = engine(input_ids=ids).logits.float()
    dtype = next(model.parameters()).dtype
    reference = FAMILIES["mixtral"][1].from_pretrained(folder)
    different = []
    for name, whole in reference.named_parameters():
        # A frozen weight has no master.
        master = safe_get_full_fp32_param(model.get_parameter(name)) if "model.norm." not in name else None
        digits = torch.bfloat16 if options == PRECISIONS["bf16 masters"] else torch.float32
        if master is not None and not torch.equal(master.float(), whole.to(digits).float()):
            different.append(f"master {name}")
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    with torch.no_grad():
        after = engine(input_ids=ids).logits.float()
        theirs = reference.to(dtype)(input_ids=ids).logits.float()
    engine.destroy()
    # A step at a rate of zero changes nothing where masters have been loaded too.
    for what, seen in (("logits", logits), ("logits after a step", after)):
        if not torch.allclose(seen, theirs, atol=1e-5 if dtype == torch.float32 else 0.1):
            different.append(f"{what}: {(seen - theirs).abs().max()}")
    return different


@pytest.mark.parametrize("engine", ENGINES)
def test_masters_and_copies_follow(ranks, checkpoint, engine):
    for different in ranks(2).run(into_engine, checkpoint("mixtral"), ENGINES[engine]):
        assert different == []


def into_stock(folder: str) -> str:
    model = build(tiny("mixtral"), seed=8)
    engine = build_engine(model, stock=True)
    with pytest.raises(SetupError, match="not zero3_fast's") as refusal:
        load_pretrained(model, folder)
    engine.destroy()
    return str(refusal.value)


def test_masters_of_another_optimizer_are_out_of_reach(ranks, checkpoint):
    for message in ranks(2).run(into_stock, checkpoint("mixtral")):
        assert "configure_model" in message
