# SPDX-License-Identifier: Apache-2.0
"""FLOPs that a Hugging Face language model needs for a batch: the model's, whatever a run spends on top.

Counted as in arXiv:2204.02311, appendix B: products of matrices only, two FLOPs for a multiplication and an addition;
nothing for recomputed activations. Beyond that: only the experts that a token goes to; attention over the keys that a
query sees (itself and those before it, within a window or the chosen blocks where the model has such), at the
sequences' own lengths; no gradients of frozen weights, and none of an indexer, whose choice passes none on. What isn't
known isn't guessed: :class:`UnknownFlopsError`.

Note [How layers are recognised]
    By what they hold, not by a table of models. Weights of linear layers, routers and convolutions are used once per
    token; a module's 3-dimensional weights are its experts', of which a token uses ``num_experts_per_tok``. Attention
    has ``q_proj``, ``k_proj``, ``v_proj`` and ``head_dim`` (or, compressed, ``qk_head_dim`` and ``v_head_dim``); linear
    attention has heads of keys and values (``head_k_dim``, ``head_v_dim``), whose states take three products each. A
    model is known when as many layers as its config has hold one of these, and every matrix has been counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_PER_WEIGHT = 2  # a multiplication and an addition


class UnknownFlopsError(ValueError):
    """A model's FLOPs can't be counted; the message says which part isn't known."""


@dataclass(frozen=True)
class Attention:
    """Attention of one layer over the keys that a query sees.

    Args:
        per_pair: FLOPs of a forward for one query and one key, of all heads.
        window: The most keys that a query sees, itself included; None for all before it.
        blocks: Size of a block of keys, and how many of them a query sees, its own always among them.
        backward: Whether gradients pass through.
    """

    per_pair: int
    window: int | None = None
    blocks: tuple[int, int] | None = None
    backward: bool = True

    def pairs(self, length: int) -> int:
        """Pairs of a query and a key that it sees, in a sequence.

        Args:
            length: Tokens of the sequence.

        >>> Attention(1).pairs(4), Attention(1, window=2).pairs(4), Attention(1, blocks=(2, 1)).pairs(4)
        (10, 7, 6)
        """
        if self.blocks is not None:
            size, chosen = self.blocks
            others = [min(query // size, chosen - 1) * size for query in range(length)]
            return sum(others) + sum(query % size + 1 for query in range(length))
        seen = length if self.window is None else min(length, self.window)
        return seen * (seen + 1) // 2 + (length - seen) * seen


@dataclass(frozen=True)
class ModelFlops:
    """What a model's FLOPs are made of.

    Args:
        weights: Of a forward, per token, with weights: those that a token uses.
        trained_weights: Of these, with weights that are trained.
        states: Of a forward, per token, without weights and whatever comes before (linear attention).
        attention: One for each layer that has it.
        choices: Of a forward, per token, with weights that choose what is looked at: nothing comes back through them.
    """

    weights: int
    trained_weights: int
    states: int = 0
    attention: tuple[Attention, ...] = ()
    choices: int = 0

    def forward(self, lengths: Sequence[int]) -> int:
        """FLOPs of a forward.

        Args:
            lengths: Tokens of each sequence.

        >>> ModelFlops(weights=100, trained_weights=100, attention=(Attention(10),)).forward([1, 2])
        340
        """
        return sum(lengths) * (self.weights + self.choices + self.states) + self._of_pairs(lengths, self.attention)

    def training(self, lengths: Sequence[int]) -> int:
        """FLOPs of a forward and a backward; whatever is trained of the model.

        Args:
            lengths: Tokens of each sequence.

        >>> ModelFlops(weights=100, trained_weights=40).training([1])
        240
        """
        # Backward: the gradient of what came in takes another forward's products, and so does that of the weights.
        of_weights = sum(lengths) * (self.weights + self.trained_weights)
        two_sided = [kind for kind in self.attention if kind.backward]
        return (
            self.forward(lengths) + of_weights + 2 * (sum(lengths) * self.states + self._of_pairs(lengths, two_sided))
        )

    @staticmethod
    def _of_pairs(lengths: Sequence[int], attention: Iterable[Attention]) -> int:
        return sum(kind.per_pair * kind.pairs(length) for kind in attention for length in lengths)


def flops_or_reason(root: nn.Module) -> ModelFlops | str:
    """As :func:`count_flops`, with the reason in words where they aren't known.

    Args:
        root: The model, or a module with one in it.
    """
    try:
        return count_flops(root)
    except UnknownFlopsError as error:
        return str(error)


def count_flops(root: nn.Module) -> ModelFlops:
    """Count the FLOPs of the language model inside a module.

    The model must be as Transformers made it, its weights whole, on the meta device or partitioned by ZeRO; not yet
    with AutoEP's or AutoTP's layers. Of a model of text and vision, the text model and its head.

    Args:
        root: The model, or a module with one in it.

    Raises:
        UnknownFlopsError: There is none or several, or a part of it isn't known.
    """
    model = _the_model(root)
    config = model.config.get_text_config()
    modules = list(_language_modules(model, config))
    attention: list[Attention] = []
    choosing = {id(part) for _, module in modules for part in _indexer_of(module)}
    weights = trained = states = choices = mixers = 0
    for path, module in modules:
        used, with_gradient = _of_weights(path, module, config)
        if id(module) in choosing:
            choices += used
        else:
            weights, trained = weights + used, trained + with_gradient
        if (state := _of_states(module)) is not None:
            states, mixers = states + state, mixers + 1
        elif (kinds := _attention_of(path, module, config)) is not None:
            attention, mixers = [*attention, *kinds], mixers + 1
    if mixers != config.num_hidden_layers:
        raise UnknownFlopsError(
            f"{type(model).__name__} has {config.num_hidden_layers} layers, but attention was recognised in {mixers}."
        )
    return ModelFlops(weights, trained, states, tuple(attention), choices)


def _indexer_of(module: nn.Module) -> Iterable[nn.Module]:
    indexer = getattr(module, "indexer", None)
    return indexer.modules() if isinstance(indexer, nn.Module) else ()


def _the_model(root: nn.Module) -> Any:
    outermost: list[Any] = []
    inside: set[int] = set()
    for module in root.modules():
        if id(module) not in inside and hasattr(module, "save_pretrained") and hasattr(module.config, "model_type"):
            # PEFT's wrapper has the config of the model in it.
            found: Any = module
            outermost.append(found.get_base_model() if hasattr(found, "get_base_model") else found)
            inside.update(map(id, module.modules()))
    if len(outermost) != 1:
        raise UnknownFlopsError(f"{type(root).__name__} holds {len(outermost)} Hugging Face models, not one.")
    return outermost[0]


def _language_modules(model: Any, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules that a token of text goes through, each once."""
    parts: list[tuple[str, Any]] = [("", model)]
    if config is not model.config:
        texts = [(path, module) for path, module in model.named_modules() if getattr(module, "config", None) is config]
        if not texts:
            raise UnknownFlopsError(f"{type(model).__name__} holds no module with its text model's config.")
        parts = [texts[0], ("its head", model.get_output_embeddings())]
    seen: set[int] = set()
    for prefix, part in parts:
        for path, module in part.named_modules() if part is not None else ():
            if id(module) not in seen:
                seen.add(id(module))
                yield f"{prefix}.{path}".strip("."), module


def _of_weights(path: str, module: nn.Module, config: Any) -> tuple[int, int]:
    """FLOPs of a forward with a module's own weights, and with those of them that are trained, per token."""
    used = trained = 0
    if isinstance(module, nn.Embedding):
        return 0, 0  # looked up
    for name, parameter in module.named_parameters(recurse=False):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) < 2:
            continue
        flops = _PER_WEIGHT * shape.numel()
        is_weight = name == "weight" and (len(shape) == 2 or isinstance(module, nn.Conv1d))
        if len(shape) == 3 and not is_weight:
            flops = flops * _experts_per_token(path, config) // shape[0]
        elif not is_weight:
            raise UnknownFlopsError(f"{path}.{name} ({type(module).__name__}) is a matrix of unknown use.")
        used += flops
        trained += flops if parameter.requires_grad else 0
    return used, trained


def _experts_per_token(path: str, config: Any) -> int:
    chosen = getattr(config, "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        raise UnknownFlopsError(f"{path} holds experts, but the config has no num_experts_per_tok.")
    return chosen


def _of_states(module: Any) -> int | None:
    """Linear attention: a state of keys × values for each head of values, decayed, corrected and read."""
    if not all(hasattr(module, name) for name in ("num_v_heads", "head_k_dim", "head_v_dim")):
        return None
    return 3 * _PER_WEIGHT * int(module.num_v_heads * module.head_k_dim * module.head_v_dim)


def _attention_of(path: str, module: Any, config: Any) -> list[Attention] | None:
    if hasattr(module, "qk_head_dim") and hasattr(module, "v_head_dim"):
        per_pair = _PER_WEIGHT * config.num_attention_heads * (module.qk_head_dim + module.v_head_dim)
    elif all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "head_dim")):
        # Scores and their products with the values.
        per_pair = _PER_WEIGHT * config.num_attention_heads * 2 * module.head_dim
    else:
        return None
    if getattr(module, "is_causal", True) is not True:
        raise UnknownFlopsError(f"{path} ({type(module).__name__}) isn't causal.")
    indexer = getattr(module, "indexer", None)
    if indexer is None:
        return [Attention(per_pair, window=_window(module, config))]
    if getattr(indexer, "local_blocks", 0) < 1 or not hasattr(indexer, "topk_blocks"):
        raise UnknownFlopsError(f"{path} ({type(module).__name__}) chooses keys in an unknown way.")
    blocks = (indexer.block_size, max(indexer.topk_blocks, indexer.local_blocks))
    # The indexer scores every key that comes before.
    scores = Attention(_PER_WEIGHT * indexer.num_heads * indexer.head_dim, backward=False)
    return [scores, Attention(per_pair, blocks=blocks)]


def _window(module: Any, config: Any) -> int | None:
    if hasattr(module, "sliding_window"):
        window = module.sliding_window
    else:
        kinds = getattr(config, "layer_types", None)
        layer = getattr(module, "layer_idx", None)
        slides = kinds is None or layer is None or kinds[layer] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if slides else None
    return window if isinstance(window, int) else None
