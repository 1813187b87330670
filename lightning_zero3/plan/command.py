"""The command: options to a setup, a setup to a report, a report to a table or to JSON."""

from __future__ import annotations

import json as json_format
from dataclasses import fields, replace
from typing import Any

from lightning_zero3.plan.settings import Optimizer, Precision, Setup

# Of a recipe's full size, where the command line doesn't say it.
_FROM_RECIPES = (
    "expert_parallel_size",
    "expert_parallel_preset",
    "tensor_parallel_size",
    "precision",
    "bf16_masters",
    "sequence_length",
    "micro_batch_size",
    "recompute_activations",
    "loss_tiles",
    "optimizer",
    "sub_group_size",
)


def plan(
    recipe: str | None = None,
    model: str | None = None,
    nodes: int = 1,
    devices: int = 8,
    expert_parallel_size: int | None = None,
    expert_parallel_preset: str | None = None,
    tensor_parallel_size: int | None = None,
    layers: int | None = None,
    precision: Precision | None = None,
    bf16_masters: bool | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    recompute_activations: bool | None = None,
    loss_tiles: int | None = None,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    optimizer: Optimizer | None = None,
    sub_group_size: int | None = None,
    reduce_bucket_size: int = 500_000_000,
    persistence_threshold: int = 100_000,
    max_group_size: int | None = None,
    zero_init: bool = True,
    rank: int = 0,
    json: bool = False,
) -> int:
    """Tell what a run at its true scale will be like, without its GPUs.

    DeepSpeed's own set-up runs for one rank, with tensors that hold no data: under a minute, half a GiB.

    Args:
        recipe: Name of a recipe (glm45air, qwen35, minimax_m3); what isn't given here is as in its full size.
        model: In place of a recipe, a folder with a Hugging Face config.json. Of a model of text and vision, the text
            model is planned. Weights aren't needed.
        nodes: Nodes.
        devices: GPUs of each node.
        expert_parallel_size: Ranks that share one set of experts (the recipe's; else none).
        expert_parallel_preset: DeepSpeed's AutoEP preset, for a model of which none is known.
        tensor_parallel_size: Consecutive ranks that share each layer (the recipe's; else 1).
        layers: Only the first so many layers of the model.
        precision: The Trainer's: 32-true, bf16-mixed or bf16-true (the recipe's; else bf16-mixed).
        bf16_masters: Master weights, gradients and moments in bf16 too (the recipe's; else false).
        sequence_length: Tokens of one sample (the recipe's; else 8192).
        micro_batch_size: Samples of one micro-step on one data-parallel rank (the recipe's; else 1).
        recompute_activations: Layers are computed again in backward (the recipe's; else true).
        loss_tiles: Pieces in which logits and loss are computed (the recipe's; else 1).
        offload_optimizer: Masters and moments are on the host.
        offload_parameters: Weights are on the host.
        optimizer: deepspeed: AdamW named in the DeepSpeed config. torch: one that the module makes (the recipe's; else
            deepspeed).
        sub_group_size: Elements of a rank's share after which a sub-group ends (the recipe's; else 10^9, as DeepSpeed).
        reduce_bucket_size: Elements of the bucket in which gradients are reduced.
        persistence_threshold: Parameters of fewer elements stay gathered between steps.
        max_group_size: What if AutoEP cut groups of experts at so many elements, instead of at 178,956,971? 0 is no
            cap. The plan is then of such a run, beside what it is as DeepSpeed is; no option changes it in training.
        zero_init: The model is built in configure_model, partitioned while it is built.
        rank: Whose view is planned.
        json: Print one JSON object instead of tables.

    Returns:
        0.

    Raises:
        SetupError: What is asked for can't be; the message says why.
    """
    given = {name: value for name, value in locals().items() if name != "json" and value is not None}
    setup = Setup(**{**_defaults(recipe), **given})
    found = _found(setup)
    if json:
        print(json_format.dumps(found))
    else:
        from lightning_zero3.plan.tables import show

        show(found)
    return 0


def _defaults(recipe: str | None) -> dict[str, Any]:
    """What a recipe's full size says of a setup."""
    if recipe is None:
        return {}
    from lightning_zero3.plan.models import recipe_settings

    settings = recipe_settings(recipe)
    known = {field.name for field in fields(Setup)}
    said = {name: getattr(settings, name) for name in _FROM_RECIPES if name in known}
    return {name: value for name, value in said.items() if value is not None}


def _found(setup: Setup) -> dict[str, Any]:
    from lightning_zero3.plan.child import find_structure
    from lightning_zero3.plan.models import load_model
    from lightning_zero3.plan.report import assemble

    planned = load_model(setup)  # here already: what is wrong with it needs no second process
    structure = find_structure(setup)
    as_it_is = None if setup.max_group_size is None else find_structure(replace(setup, max_group_size=None))
    return assemble(planned.title, setup, structure, as_it_is)
