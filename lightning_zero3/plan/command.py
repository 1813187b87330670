# SPDX-License-Identifier: Apache-2.0
"""The command: options to a setup, a setup to a report, a report to a table or to JSON."""

from __future__ import annotations

import json as json_format
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lightning_zero3.charts import require_drawable
from lightning_zero3.config import SetupError
from lightning_zero3.gpus import Gpu
from lightning_zero3.gpus import gpu as gpu_named
from lightning_zero3.plan.child import find_structure
from lightning_zero3.plan.estimate import memory_by_part
from lightning_zero3.plan.longest import longest_that_fits
from lightning_zero3.plan.models import load_model, recipe_settings
from lightning_zero3.plan.predict import predict
from lightning_zero3.plan.report import assemble
from lightning_zero3.plan.settings import Optimizer, Precision, Setup, said_by
from lightning_zero3.plan.shape import shape_of
from lightning_zero3.plan.sweep import swept
from lightning_zero3.plan.tables import show, show_sweep


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
    offload_optimizer: bool | None = None,
    offload_parameters: bool | None = None,
    optimizer: Optimizer | None = None,
    sub_group_size: int | None = None,
    reduce_bucket_size: int = 500_000_000,
    persistence_threshold: int = 100_000,
    max_group_size: int | None = None,
    zero_init: bool = True,
    rank: int = 0,
    block_sparse_kernel: bool = False,
    gpu: str = "H200",
    rehearse: bool = True,
    max: bool = False,
    sweep: bool = False,
    chart: str | None = None,
    json: bool = False,
) -> int:
    """Tell what a run at its true scale will be like, without its GPUs.

    DeepSpeed's own set-up and a few steps run for one rank, with tensors that hold no data: about a minute, a GiB.

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
        offload_optimizer: Masters and moments are on the host (else false).
        offload_parameters: Weights are on the host (else false).
        optimizer: deepspeed: AdamW named in the DeepSpeed config. torch: one that the module makes (the recipe's; else
            deepspeed).
        sub_group_size: Elements of a rank's share after which a sub-group ends (the recipe's; else 10^9, as DeepSpeed).
        reduce_bucket_size: Elements of the bucket in which gradients are reduced.
        persistence_threshold: Parameters of fewer elements stay gathered between steps.
        max_group_size: What if AutoEP cut groups of experts at so many elements, instead of at 178,956,971? 0 is no
            cap. The plan is then of such a run, beside what it is as DeepSpeed is; no option changes it in training.
        zero_init: The model is built in configure_model, partitioned while it is built.
        rank: Whose view is planned.
        block_sparse_kernel: MiniMax-M3's sparse attention is a kernel's; Transformers' own makes a mask of all pairs of
            tokens.
        gpu: Which one the memory is held against: H100, H200, B200 or MI300X.
        rehearse: Rehearse the first steps, for the memory that they take. Without, only the structure is told, sooner.
        max: Look for the largest sequence length that fits, and plan that.
        sweep: In place of one plan: the combinations of expert and tensor parallelism, precision and offload that fit,
            the fastest first, and why the others don't. What of these is given here is the same in all of them.
        chart: With --sweep, a PNG file to draw it in.
        json: Print one JSON object instead of tables.

    Returns:
        0.

    Raises:
        SetupError: What is asked for can't be; the message says why.
    """
    given = {name: value for name, value in locals().items() if name in _of_a_setup() and value is not None}
    setup = Setup(**{**_defaults(recipe), **given})
    device = gpu_named(gpu)
    if chart is not None and not sweep:
        raise SetupError("--chart has no effect without --sweep.")
    if sweep and max:
        raise SetupError("--sweep and --max: one of them; --max is of one combination.")
    if chart is not None:
        require_drawable(Path(chart))  # at once, and not when a sweep's minutes are over
    if sweep:
        found = swept(setup, device, fixed=frozenset(given))
        if chart is not None:
            from lightning_zero3.plan.charts import draw_sweep  # matplotlib is no dependency of training

            draw_sweep(found, Path(chart))
    else:
        found = _found(setup, device, rehearse=rehearse, longest=max)
    if json:
        print(json_format.dumps(found))
    elif sweep:
        show_sweep(found)
    else:
        show(found)
    return 0


def setup_of_recipe(recipe: str, **given: Any) -> Setup:
    """A recipe's full size as a setup.

    Args:
        recipe: Its name.
        given: What is other than the recipe says; fields of a Setup.

    Raises:
        SetupError: There is no such recipe, or a value can't be.
    """
    return Setup(**{"recipe": recipe, **_defaults(recipe), **given})


def _of_a_setup() -> frozenset[str]:
    return frozenset(field.name for field in fields(Setup))


def _defaults(recipe: str | None) -> dict[str, Any]:
    """What a recipe's full size says of a setup, where the command line doesn't."""
    return {} if recipe is None else said_by(recipe_settings(recipe))


def _found(setup: Setup, gpu: Gpu, *, rehearse: bool, longest: bool) -> dict[str, Any]:
    planned = load_model(setup)  # here already: what is wrong with it needs no second process
    shape = shape_of(planned.config)
    more: dict[str, Any] = {}
    if longest:
        more = longest_that_fits(setup, shape, gpu)
        if more["longest_sequence_length"] is not None:
            setup = replace(setup, sequence_length=more["longest_sequence_length"])
    if rehearse:
        structure, memory = memory_by_part(setup, shape)
    else:
        structure, memory = find_structure(setup), None
    as_it_is = None if setup.max_group_size is None else find_structure(replace(setup, max_group_size=None))
    report = assemble(
        planned.title,
        setup,
        structure,
        as_it_is,
        memory=memory,
        prediction=predict(setup, structure, shape),
        gpu=gpu,
    )
    return {**report, **more}
