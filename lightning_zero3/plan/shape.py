# SPDX-License-Identifier: Apache-2.0
"""What of a Hugging Face config says how much is computed and sent: widths, heads, experts, kinds of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A text model's sizes.

    Args:
        hidden: Width of the residual stream.
        vocabulary: Tokens.
        heads: Query heads.
        key_value_heads: Key and value heads.
        head_dim: Width of a head's queries and keys.
        value_dim: Width of its values.
        experts: Routed experts of an MoE layer; 0 without any.
        experts_per_token: How many of them see a token.
        layer_types: Kind of attention of each layer, by Transformers' names.
        window: Keys that ``sliding_attention`` sees.
        sparse_keys: Keys that ``minimax_m3_sparse`` sees, chosen by an indexer.
        index_width: Heads × width of that indexer.
        state: Elements of the state of ``linear_attention`` (value heads × key width × value width).
        tied: Whether logits are computed with the embedding.
    """

    hidden: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_dim: int
    value_dim: int
    experts: int
    experts_per_token: int
    layer_types: tuple[str, ...]
    window: int
    sparse_keys: int
    index_width: int
    state: int
    tied: bool


def shape_of(config: Any) -> Shape:
    """Read a text model's config.

    Args:
        config: A ``PretrainedConfig`` of a text model, cut to the planned layers.
    """

    def of(*names: str, default: int = 0) -> int:
        return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), default)

    heads = of("num_attention_heads")
    head_dim = of("head_dim", default=config.hidden_size // heads)
    return Shape(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=heads,
        key_value_heads=of("num_key_value_heads", default=heads),
        head_dim=head_dim,
        value_dim=of("v_head_dim", default=head_dim),
        experts=of("n_routed_experts", "num_experts", "num_local_experts"),
        experts_per_token=of("num_experts_per_tok", "moe_topk"),
        layer_types=tuple(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers),
        window=of("sliding_window"),
        sparse_keys=of("index_topk_blocks") * of("index_block_size"),
        index_width=of("index_n_heads") * of("index_head_dim"),
        state=of("linear_num_value_heads") * of("linear_key_head_dim") * of("linear_value_head_dim"),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
