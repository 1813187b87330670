# SPDX-License-Identifier: Apache-2.0
"""What will be read where, before anything is: each tensor of a model, the files' tensors that it is made of, the rest.

Nothing here reads a weight or writes one. Whatever doesn't fit is found here, all of it, and listed by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.moe.adapters import adapters_of, copied_from, is_added, refuse_loading_under
from lightning_zero3.moe.boxes import Block, Ints, boxes_of_range
from lightning_zero3.moe.file_names import LANGUAGE_MODEL, FileNames, FilePart
from lightning_zero3.moe.own_part import OwnPart, range_of, require_masters_in_reach
from lightning_zero3.moe.safetensors_files import DTYPES, WeightFiles
from lightning_zero3.moe.weight_names import Held, held_tensors

# Why tensors of a file are left alone.
PREDICTION = "layers that predict further tokens"
OTHER_MODALITIES = "parts outside the language model"
IGNORED = "names that the model's class ignores"
COMPUTED = "buffers that are computed"
TIED = "tied to a tensor that is loaded"
ASKED = "allow_unexpected"
# Names in one line of a message, beyond which only their number is given.
_LISTED = 20


class UnfitWeightsError(SetupError):
    """A checkpoint's tensors aren't those of the model; the message lists them by name."""


@dataclass(frozen=True)
class Target:
    """A tensor of the model, and what it is made of.

    Args:
        names: Its names in the model; several if it is tied.
        tensor: The parameter or buffer.
        held: What it is of Transformers' model.
        parts: The files' tensors that make up Transformers' tensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    held: Held
    parts: tuple[FilePart, ...]

    def reads(self, part: OwnPart) -> Iterator[tuple[FilePart, Block]]:
        """Which boxes of which files' tensors fill this rank's part, and where they go.

        Args:
            part: The rank's part of the tensor.

        Yields:
            A file's tensor, and a block from the model's tensor to it.
        """
        for start, size in boxes_of_range(part.shape, part.start, part.stop):
            for block in self.held.blocks:
                wanted = block.within(start, size)
                if wanted is None:
                    continue
                for file_part in self.parts:
                    if (read := wanted.then(file_part.block)) is not None:
                        yield file_part, read


@dataclass
class Plan:
    """What a load will do.

    Args:
        targets: Tensors to fill.
        skipped: Why → names in the files.
        twice: Tied tensors that the files hold under two names: the target, and the same target made of the other.
        kept: The model's names of what stays as it is: by ``allow_missing``, and PEFT's adapters.
    """

    targets: list[Target] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    twice: list[tuple[Target, Target]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def plan_of(
    model: nn.Module, files: WeightFiles, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
) -> Plan:
    """Fit a folder's tensors to a model's.

    Args:
        model: A Hugging Face model, with or without an engine's layers.
        files: The folder.
        allow_missing: Patterns (``re.search``) of Transformers' names that the files may lack.
        allow_unexpected: Patterns of files' names that the model may lack.

    Raises:
        UnfitWeightsError: Tensors are missing, unexpected, or have another shape or dtype; all are listed.
        UnknownLayoutError: It isn't known what a layer holds.
        NotWritableError: A weight can't be written to.
        AdapterError: PEFT has computed an adapter's first values from other weights.
    """
    if files.config.get("quantization_config"):
        raise UnfitWeightsError(
            f"{files.folder} holds quantized weights (quantization_config in config.json), which would have to be "
            "dequantized. Load them with from_pretrained and save them in 16 bits first."
        )
    everything = held_tensors(model)
    if (adapters := adapters_of(model)) is not None:
        refuse_loading_under(adapters)
    tensors, added = {}, []
    for name, (tensor, each) in everything.items():
        # What PEFT trains a copy of is loaded into the copy too.
        copied = copied_from(each.name)
        if copied is not None:
            tensors[name] = tensor, replace(each, name=copied)
        elif is_added(each.name):
            added.append(name)
        else:
            tensors[name] = tensor, each
    whole = {held.name: held.whole for _, held in tensors.values()}
    parts, others = FileNames(model, whole).sort(list(files.tensors))
    plan = Plan(kept=added)
    problems: dict[str, list[str]] = defaultdict(list)
    for names, tensor, held in _once(tensors):
        range_of(tensor)
        require_masters_in_reach(tensor)
        sources = [each for each in held if each.name in parts]
        if sources:
            all_made = [Target(names, tensor, each, tuple(parts[each.name])) for each in sources]
            plan.targets.append(all_made[0])
            for made in all_made:
                _check(made, files, problems)
            plan.twice += [(all_made[0], other) for other in all_made[1:]]
            plan.skipped[TIED] += [part.name for other in all_made[1:] for part in other.parts]
        elif any(re.search(pattern, each.name) for pattern in _may_lack(model, allow_missing) for each in held):
            plan.kept += names
        else:
            problems["missing"].append(held[0].name)
    _sort_out(others, whole, model, files, allow_unexpected, plan, problems)
    _raise(problems, model, files)
    plan.skipped = {why: names for why, names in plan.skipped.items() if names}
    return plan


def _once(
    tensors: Mapping[str, tuple[torch.Tensor, Held]],
) -> Iterator[tuple[tuple[str, ...], torch.Tensor, list[Held]]]:
    """Each tensor, with all names that it has."""
    tied: dict[int, list[str]] = defaultdict(list)
    for name, (tensor, _) in tensors.items():
        tied[id(tensor)].append(name)
    for names in tied.values():
        yield tuple(names), tensors[names[0]][0], [tensors[name][1] for name in names]


def _check(target: Target, files: WeightFiles, problems: dict[str, list[str]]) -> None:
    held, floating = target.held, target.tensor.is_floating_point()
    for part in target.parts:
        stored = files.tensors.get(part.name)
        if stored is None:
            problems["missing"].append(part.name)
        elif stored.shape != part.shape:
            problems["of another shape"].append(f"{part.name} {_said(stored.shape)}, {_said(part.shape)} in the model")
        elif stored.dtype not in DTYPES or DTYPES[stored.dtype].is_floating_point != floating:
            problems["of another kind"].append(f"{part.name} {stored.dtype}, {target.tensor.dtype} in the model")
    if sum(part.block.numel for part in target.parts) != Block.of_all(held.whole).numel:
        names = [part.name for part in target.parts]
        problems["there more than once"].append(f"{held.name} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})")


def _said(shape: Ints) -> str:
    return "x".join(map(str, shape)) or "a single number"


def _may_lack(model: Any, allow_missing: Sequence[str]) -> list[str]:
    return [*allow_missing, *(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]


def _sort_out(
    others: Mapping[str, str],
    names: Iterable[str],
    model: Any,
    files: WeightFiles,
    allow_unexpected: Sequence[str],
    plan: Plan,
    problems: dict[str, list[str]],
) -> None:
    """Sort what no tensor of the model is made of: what may be left alone, with the reason, and what may not."""
    computed = {name for name, _ in model.named_buffers()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    further = _prediction_layers(files.config)
    inside = re.compile(rf"(model\.)?{LANGUAGE_MODEL}\.")
    composite = any(map(inside.match, files.tensors)) and not any(map(inside.match, names))
    for name, renamed in others.items():
        ignores = any(re.search(pattern, each) for pattern in ignored for each in (name, renamed))
        if ignores and re.search(r"(^|\.)mtp\.", name):
            why = PREDICTION
        elif composite and not inside.match(name) and not name.startswith("lm_head."):
            why = OTHER_MODALITIES
        elif further is not None and further.search(renamed):
            why = PREDICTION
        elif ignores:
            why = PREDICTION if ".layers." in name else IGNORED
        elif renamed in computed or name.endswith("rotary_emb.inv_freq"):
            why = COMPUTED
        elif any(re.search(pattern, name) for pattern in allow_unexpected):
            why = ASKED
        else:
            problems["unexpected"].append(name)
            continue
        plan.skipped[why].append(name)


def _prediction_layers(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Layers behind the last one, of which the checkpoint's own config says that they predict further tokens."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, Mapping)
    first, number = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if type(first) is not int or type(number) is not int or not 0 < number < 100:
        return None
    return re.compile(rf"(^|\.)layers\.({'|'.join(str(first + each) for each in range(number))})\.")


def _raise(problems: Mapping[str, list[str]], model: nn.Module, files: WeightFiles) -> None:
    lines = [
        f"  {what}: {'; '.join(names[:_LISTED])}{f'; and {len(names) - _LISTED} more' if len(names) > _LISTED else ''}"
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise UnfitWeightsError(
            f"{files.folder} doesn't fit {type(model).__name__}; nothing was loaded. Tensors\n"
            + "\n".join(lines)
            + "\n"
            "Is the model built from this folder's config? What may be left out can be said by allow_missing and "
            "allow_unexpected."
        )
