"""GLM-4.5-Air with ZeRO Stage 3 and expert parallelism.

``python recipes/glm45air.py`` trains a scaled-down model of the same architecture, in two processes without a GPU or
on every GPU of this machine, on the Python standard library's own source. ``--size full`` is the true model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from lightning_zero3.config import SetupError
from shared.run import Settings, local_processes, train

SETTINGS = {
    # Small enough for two CPU cores, large enough to learn what follows what in source code.
    "tiny": Settings(
        sequence_length=256,
        micro_batch_size=4,
        max_steps=200,
        learning_rate=2e-3,
        warmup_steps=10,
        precision="32-true",
        expert_parallel_size=None,
        recompute_activations=False,
        max_tokens=8_000_000,
        needs_gpu=False,
    ),
    # The settings under which the optimizer step was reported: 4 nodes of 8 H200.
    "full": Settings(
        sequence_length=8192,
        micro_batch_size=1,
        max_steps=100,
        learning_rate=1e-5,
        warmup_steps=10,
        precision="bf16-mixed",
        expert_parallel_size=8,
        recompute_activations=True,
        max_tokens=None,
        needs_gpu=True,
    ),
}


def full_config() -> Any:
    """GLM-4.5-Air's architecture: 46 layers, 45 of them MoE with 128 routed experts and a shared one.

    Source: the published config of zai-org/GLM-4.5-Air, which is ``Glm4MoeConfig``'s defaults with attention biases and
    heads of 128; 106,852,245,504 parameters.
    """
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(attention_bias=True, head_dim=128)


def tiny_config() -> Any:
    """The same architecture scaled down: every kind of layer, router and bias, in 1.6 million parameters."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        attention_bias=True,
        head_dim=32,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        vocab_size=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def main(
    size: Literal["tiny", "full"] = "tiny",
    data: str = "stdlib",
    tokenizer: str | None = None,
    text_field: str = "text",
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    max_steps: int | None = None,
    learning_rate: float | None = None,
    precision: str | None = None,
    expert_parallel_size: int | None = None,
    recompute_activations: bool | None = None,
    max_tokens: int | None = None,
    devices: int | None = None,
    num_nodes: int = 1,
    output: Path = Path("runs/glm45air"),
    seed: int = 0,
    scoped_grad_clear: bool = True,
    alias_master_weights: bool = True,
) -> None:
    """Train GLM-4.5-Air with ZeRO Stage 3 and expert parallelism.

    Args:
        size: tiny: the architecture scaled down, runs anywhere. full: the true model, for 4 nodes of 8 GPUs.
        data: stdlib (the Python standard library's source), a text, .jsonl or .parquet file, a folder or glob of
            such files, or hf:NAME for a Hugging Face data set.
        tokenizer: Folder or hub name of a Hugging Face tokenizer; without one, tokens are bytes.
        text_field: Field or column that holds the text.
        sequence_length: Tokens of one sample (tiny 256, full 8192).
        micro_batch_size: Samples of one micro-step on one rank (tiny 4, full 1).
        max_steps: Optimizer steps (tiny 200, full 100).
        learning_rate: AdamW's (tiny 2e-3, full 1e-5).
        precision: 32-true, bf16-mixed or bf16-true (tiny 32-true, full bf16-mixed).
        expert_parallel_size: Ranks that share one set of experts (tiny: the largest that fits, full 8).
        recompute_activations: Compute layers again in backward (tiny false, full true).
        max_tokens: How much of the data is read (tiny 8 million tokens, full all).
        devices: Processes on this node (the launcher's number, else every GPU, else 2).
        num_nodes: Nodes.
        output: Folder for runs.
        seed: For weights and the order of the data.
        scoped_grad_clear: The strategy's switch, for an A/B.
        alias_master_weights: The strategy's switch, for an A/B.
    """
    settings = SETTINGS[size].with_overrides(
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        max_steps=max_steps,
        learning_rate=learning_rate,
        precision=precision,
        expert_parallel_size=expert_parallel_size,
        recompute_activations=recompute_activations,
        max_tokens=max_tokens,
    )
    from transformers import Glm4MoeForCausalLM

    config = full_config() if size == "full" else tiny_config()
    train(
        f"GLM-4.5-Air ({size})",
        settings=settings,
        model_class=Glm4MoeForCausalLM,
        config=config,
        experts=config.n_routed_experts,
        data=data,
        tokenizer=tokenizer,
        text_field=text_field,
        devices=devices or local_processes(),
        num_nodes=num_nodes,
        output=output,
        seed=seed,
        switches={"scoped_grad_clear": scoped_grad_clear, "alias_master_weights": alias_master_weights},
    )


if __name__ == "__main__":
    from jsonargparse import auto_cli

    try:
        auto_cli(main)
    except SetupError as error:
        # What a person has to change, without the way that the program took to find out.
        sys.exit(f"{Path(__file__).name}: {error}")
