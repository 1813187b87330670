# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint into a model that is partitioned: by ZeRO, over experts, over slices of layers.

Each rank reads what it keeps and nothing else, and writes it into its partitions and their masters. Transformers' own
path reads every tensor whole on rank 0 and sends it to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import distributed, nn

from lightning_zero3.agreement import exchanged
from lightning_zero3.config import SetupError
from lightning_zero3.moe.hugging_face import find_models
from lightning_zero3.moe.own_part import OwnPart, own_part, range_of
from lightning_zero3.moe.safetensors_files import BrokenWeightsError, WeightFiles
from lightning_zero3.moe.sharded_build import INITIALIZED, outside_zero_init
from lightning_zero3.moe.weight_names import UnknownLayoutError
from lightning_zero3.moe.weight_plan import Plan, Target, UnfitWeightsError, plan_of

__all__ = ["BrokenWeightsError", "LoadReport", "UnfitWeightsError", "UnknownLayoutError", "load_pretrained"]


@dataclass(frozen=True)
class LoadReport:
    """What a load has done, on this rank.

    Args:
        loaded: The model's names of the tensors that were filled.
        kept: Names of those that the files lack and ``allow_missing`` names, and of PEFT's adapters; they are as they
            were.
        skipped: Why → names of tensors in the files that were left alone.
        bytes_read: Bytes of weights that this rank has read. Headers aren't counted; the system reads whole pages.
        bytes_stored: Bytes of the files' tensors that the model is made of.
        seconds: From the first look at the files to the last write.
    """

    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    skipped: Mapping[str, tuple[str, ...]]
    bytes_read: int
    bytes_stored: int
    seconds: float

    def __str__(self) -> str:
        """One line."""
        rest = [f"{len(names)} skipped ({why})" for why, names in self.skipped.items()]
        if self.kept:
            rest.append(f"{len(self.kept)} kept as they were")
        done = (
            f"{len(self.loaded)} tensors loaded, {self.bytes_read / 2**20:,.1f} of {self.bytes_stored / 2**20:,.1f} MiB"
        )
        return "; ".join([f"{done} read by this rank in {self.seconds:.1f} s", *rest])


def load_pretrained(
    module: nn.Module,
    path: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> LoadReport:
    """Fill a model from a folder of safetensors, each rank its own part; call it on all ranks.

    The model may be whole, partitioned by ``zero.Init`` (call it in ``configure_model``, after the model is built), or
    an engine's, with its experts and layers shared out (call it in ``on_fit_start``). With an engine, masters take the
    files' values in their own precision: fp32 files fill fp32 masters with all their digits, also under bf16 weights.
    No rank holds more than its share and one tensor of a file.

    Text models are loaded from checkpoints of composite ones. What of the files is left alone is in the report. Before
    anything is written all ranks have agreed that everything fits.

    Args:
        module: A Hugging Face model, or a module that holds one.
        path: A folder with ``model.safetensors``, or with an index and the files that it names. All ranks must see it.
        allow_missing: Patterns (``re.search``) of Transformers' names that may be missing: they stay as they are.
        allow_unexpected: Patterns of names in the files that the model may lack.

    Returns:
        What was loaded and what wasn't.

    Raises:
        BrokenWeightsError: A file contradicts itself or the others.
        UnfitWeightsError: Tensors are missing, unexpected, or have another shape or dtype.
        UnknownLayoutError: It isn't known which part of a tensor a layer holds.
        NotWritableError: Weights live on NVMe or on the meta device, or masters are out of reach.
        SetupError: There is no Hugging Face model, or there are several; or another rank has found one of these.
    """
    began = time.perf_counter()
    with outside_zero_init():
        files, plan = _agreed(lambda: _look(module, Path(path), allow_missing, allow_unexpected))
        try:
            with _progress(_bytes_to_read(plan, files)) as advance:
                for target in plan.targets:
                    _fill(target, files, advance)
        finally:
            files.close()
    report = LoadReport(
        loaded=tuple(name for target in plan.targets for name in target.names),
        kept=tuple(plan.kept),
        skipped={why: tuple(names) for why, names in plan.skipped.items()},
        bytes_read=files.bytes_read,
        bytes_stored=sum(files.tensors[name].nbytes for name in {p.name for t in plan.targets for p in t.parts}),
        seconds=time.perf_counter() - began,
    )
    rank_zero_info(f"{path}: {report}")
    return report


def _look(
    module: nn.Module, path: Path, allow_missing: Sequence[str], allow_unexpected: Sequence[str]
) -> tuple[WeightFiles, Plan]:
    found, _ = find_models(module, lambda _: True)
    if len(found) != 1:
        held = ", ".join(f"{name} ({type(model).__name__})" for name, model in found) or "none"
        raise SetupError(
            f"{type(module).__name__} holds not one Hugging Face model but {held}. Pass the model that is to be loaded."
        )
    files = WeightFiles(path)
    plan = plan_of(found[0][1], files, allow_missing, allow_unexpected)
    for target, other in plan.twice:
        _require_equal(target, other, files)
    return files, plan


def _require_equal(target: Target, other: Target, files: WeightFiles) -> None:
    """A tied tensor that the files hold twice must be one: this rank looks at its own part."""
    part = range_of(target.tensor)
    for (left, here), (right, there) in zip(target.reads(part), other.reads(part), strict=True):
        if not torch.equal(
            files.read(left.name, here.there, here.size), files.read(right.name, there.there, there.size)
        ):
            raise UnfitWeightsError(
                f"{target.held.name} and {other.held.name} are one tensor in the model (tie_word_embeddings), and "
                f"{files.folder} holds two that differ. Build the model with tie_word_embeddings=False."
            )


def _agreed(look: Callable[[], tuple[WeightFiles, Plan]]) -> tuple[WeightFiles, Plan]:
    """The result, if all ranks have one and see the same files; an error on all, if one rank has an error."""
    seen: list[tuple[WeightFiles, Plan]] = []

    def fingerprint() -> Any:
        seen.append(look())
        return seen[0][0].fingerprint()

    answers = exchanged(fingerprint)
    mine = answers[distributed.get_rank() if len(answers) > 1 else 0][0]
    for rank, (theirs, told) in enumerate(answers):
        if told is not None:
            raise SetupError(f"Rank {rank} can't load, so no rank does. It says: {told[1]}")
        if theirs != mine:
            raise BrokenWeightsError(f"Rank {rank} sees other files than rank {distributed.get_rank()}.")
    return seen[0]


def _bytes_to_read(plan: Plan, files: WeightFiles) -> int:
    total = 0
    for target in plan.targets:
        part = range_of(target.tensor)
        total += (part.stop - part.start) * max(files.tensors[each.name].itemsize for each in target.parts)
    return total


def _fill(target: Target, files: WeightFiles, advance: Callable[[int], None]) -> None:
    with own_part(target.tensor) as part:
        for file_part, block in target.reads(part):
            _move(files, file_part.name, block, part, advance, apart=file_part.apart)
    setattr(target.tensor, INITIALIZED, True)


def _move(
    files: WeightFiles, name: str, block: Any, part: OwnPart, advance: Callable[[int], None], *, apart: bool
) -> None:
    before = files.bytes_read
    # One of a list has no dimension for its place in it.
    values = files.read(name, block.there[apart:], block.size[apart:])
    part.write(values.unsqueeze(0) if apart else values, block.here)
    advance(files.bytes_read - before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on rank 0's terminal, if it has one."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    first = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
    columns = TextColumn("Loading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not (first and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)
        yield lambda read: progress.update(task, advance=read)
