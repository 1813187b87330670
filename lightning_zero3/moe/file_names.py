# SPDX-License-Identifier: Apache-2.0
"""What files call the tensors of Transformers' models, each way.

Whether each expert is a tensor of its own there, and every other name, is asked of Transformers (:class:`FileNames`),
whose rules ``from_pretrained`` and ``save_pretrained`` go by.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_zero3.moe.boxes import Block, Ints
from lightning_zero3.moe.weight_names import UnknownLayoutError

# Text models for which Transformers has no rules of their own, with the composite model whose checkpoints hold them.
_INSIDE = {"minimax_m3_vl_text": "minimax_m3_vl"}
# What composite models call the text model in them.
LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True)
class FilePart:
    """A tensor of a file, as the part of Transformers' tensor that it is.

    Args:
        name: Its name in the files.
        block: From Transformers' tensor to the file's.
        shape: The shape that it must have there.
        apart: It is one of a list that Transformers stacks: the block has a dimension more in front, of size 1.
    """

    name: str
    block: Block
    shape: Ints
    apart: bool = False


class FileNames:
    """Transformers' own rules about what files call a model's tensors.

    Upstream symbols: ``conversion_mapping.get_model_conversion_mapping`` and ``get_checkpoint_conversion_mapping``;
    ``core_model_loading``'s ``rename_source_key``, ``apply_renamings``, ``apply_converters``, ``WeightConverter``,
    ``PrefixChange``, ``MergeModulelist`` and ``Concatenate`` (Transformers 5.24). Reason: they work on whole tensors;
    here a rank takes the slices that it holds. A missing name raises, and a rule of another kind is refused by name.

    Args:
        model: A Hugging Face model, with or without an engine's layers.
        whole: Shapes of its tensors by Transformers' names.
    """

    def __init__(self, model: Any, whole: Mapping[str, Ints]) -> None:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        if (outer := _INSIDE.get(model.config.model_type)) is not None:
            rules = [
                *get_checkpoint_conversion_mapping(outer),
                PrefixChange(prefix_to_remove=LANGUAGE_MODEL, model_prefix=model.base_model_prefix),
                *rules,
            ]
        self._model, self._whole = model, dict(whole)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converter_of = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def to_transformers(self, name: str) -> tuple[str, str | None]:
        """What a file's tensor is in Transformers' model.

        Args:
            name: The file's name of it.

        Returns:
            Transformers' name, known or not, and the pattern of the list that it is one of, or None.
        """
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._whole)
        if renamed not in self._whole and name in self._whole:
            renamed, pattern = rename_source_key(name, [], [], prefix, self._whole)
        return renamed, pattern

    def sort(self, names: Sequence[str]) -> tuple[dict[str, list[FilePart]], dict[str, str]]:
        """Sort files' names by the tensors of Transformers' model that they are parts of.

        Args:
            names: All names in the files.

        Returns:
            Transformers' names → all parts that it is made of, also such as no file has, and what is a part of none:
            the file's name → what Transformers would call it.

        Raises:
            UnknownLayoutError: A tensor is made of those in the files in a way that isn't read slice by slice.
        """
        parts: dict[str, list[FilePart]] = defaultdict(list)
        others: dict[str, str] = {}
        lists: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        for name in names:
            renamed, pattern = self.to_transformers(name)
            if renamed not in self._whole:
                others[name] = renamed
            elif pattern is None:
                shape = self._whole[renamed]
                parts[renamed].append(FilePart(name, Block.of_all(shape), shape))
            else:
                index = self._index(name, pattern)
                if index is None or index in lists[renamed][pattern]:
                    others[name] = renamed
                else:
                    lists[renamed][pattern][index] = name
        for target, by_pattern in lists.items():
            for (pattern, index), part in self._list(target, self._converter_of[next(iter(by_pattern))]).items():
                name = by_pattern[pattern].get(index) or _sibling(by_pattern[pattern], index) or part.name
                parts[target].append(replace(part, name=name))
            taken = {part.name for part in parts[target]}
            others.update({n: target for each in by_pattern.values() for n in each.values() if n not in taken})
        return dict(parts), others

    def saved_as(self, name: str) -> list[FilePart]:
        """What ``save_pretrained`` calls a tensor of Transformers' model, built from a config, in files.

        Args:
            name: Transformers' name.

        Returns:
            The tensors in the files that it is made of.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, apply_converters, apply_renamings

        own = get_model_conversion_mapping(self._model, add_legacy=False)
        kept = [rule for rule in reversed(own) if not isinstance(rule, PrefixChange)]
        reverse = [rule.reverse_transform() for rule in kept]
        converters = [rule for rule in reverse if hasattr(rule, "operations")]
        renamings = [rule for rule in reverse if not hasattr(rule, "operations")]
        first, pattern = apply_converters(name, converters)
        if pattern is None:
            shape = self._whole[name]
            return [FilePart(apply_renamings(name, renamings), Block.of_all(shape), shape)]
        back = next(rule for rule in converters if pattern in rule.source_patterns)
        forth = kept[reverse.index(back)]
        saved = []
        for (source, index), part in self._list(name, forth).items():
            target = back.target_patterns[forth.source_patterns.index(source)]
            each = first.replace(back.target_patterns[0], target).replace("*", str(index))
            saved.append(replace(part, name=apply_renamings(each, renamings)))
        return saved

    def _index(self, name: str, pattern: str) -> int | None:
        """Which of the list a file's tensor is, by the number where the pattern has its star."""
        from transformers.core_model_loading import apply_renamings

        found = re.search(pattern.replace("*.", r"(\d+)\."), apply_renamings(name, self._renamings))
        return None if found is None else int(found[1]) if found.re.groups else 0

    def _list(self, target: str, converter: Any) -> dict[tuple[str, int], FilePart]:
        """The parts that a converter stacks, and joins, to one tensor: by pattern and number."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        shape, sources = self._whole[target], converter.source_patterns
        kinds = [(type(operation), operation.dim) for operation in converter.operations]
        stacks = kinds[0] == (MergeModulelist, 0)
        joins = [dim for kind, dim in kinds if kind is Concatenate]
        dim = joins[0] if joins else len(shape) - 1
        known = kinds == [(MergeModulelist, 0)] * stacks + [(Concatenate, dim)] * len(joins) and dim >= stacks
        if not known or len(joins) != (len(sources) > 1) or shape[dim] % len(sources):
            raise UnknownLayoutError(
                f"Transformers makes {target} of the files' tensors by {converter.operations}, which can't be done "
                "slice by slice. Load this checkpoint by from_pretrained."
            )
        width = shape[dim] // len(sources)
        size = tuple(width if d == dim else 1 if stacks and d == 0 else n for d, n in enumerate(shape))
        parts = {}
        for which, pattern in enumerate(sources):
            for index in range(shape[0] if stacks else 1):
                start = tuple(which * width if d == dim else index if d == 0 else 0 for d in range(len(shape)))
                block = Block(start, (0,) * len(shape), size)
                name = f"{target} ({pattern.replace('*', str(index))})"
                parts[pattern, index] = FilePart(name, block, size[stacks:], apart=stacks)
        return parts


def _sibling(named: Mapping[int, str], index: int) -> str | None:
    """What the files would call another of a list."""
    for each, name in named.items():
        before, found, after = name.rpartition(f".{each}.")
        return f"{before}.{index}.{after}" if found else None
    return None
