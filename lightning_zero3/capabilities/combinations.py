# SPDX-License-Identifier: Apache-2.0
"""What may be combined with ``zero3_fast``, each with its evidence; ``docs/combinations.md`` is made from it.

A combination that is neither tested nor refused says so. Longer than 400 lines because it is one table, of a row for
each thing that was tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_zero3.capabilities import grid
from lightning_zero3.capabilities.fixes import UPSTREAM_FIXES
from lightning_zero3.capabilities.limits import UPSTREAM_LIMITS

Status = Literal["tested", "refused", "upstream's path", "untested"]


@dataclass(frozen=True)
class Combination:
    """One row of the table.

    Args:
        what: What is combined.
        status: ``tested``; ``refused``, with a message; ``upstream's path``, where our parts are off; ``untested``.
        note: What a reader should know.
        evidence: ``file::function`` of a test; empty only where untested.
    """

    what: str
    status: Status
    note: str = ""
    evidence: str = ""


_D = "tests/distributed"

COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "fp32; bf16 with fp32 masters; bf16 masters and states; torch autocast, 1 and 2 ranks",
        "tested",
        "bit for bit stock's, with clipping off, on and saturated, and with accumulation",
        f"{_D}/test_same_as_stock.py::test_every_switch_gives_stocks_bits",
    ),
    Combination(
        "expert parallel size 1 and 2, fp32 and bf16, 1 and 2 ranks",
        "tested",
        "bit for bit stock's optimizer on the same layers",
        f"{_D}/test_same_as_stock.py::test_expert_parallel_training_has_stocks_bits",
    ),
    Combination(
        "the merged step: each of its switches alone and all, every precision, clipping, accumulation, 1 and 2 ranks",
        "tested",
        "bit for bit stock's",
        f"{_D}/test_fast_step.py::test_each_switch_alone_and_all_have_stocks_bits",
    ),
    Combination(
        "the merged step with torch Adam, AdamW, SGD (loop, foreach, fused) and DeepSpeed FusedAdam, groups with "
        "hyper-parameters of their own, learning rates changed each step",
        "tested",
        "bit for bit stock's; one call per chunk and distinct set of hyper-parameters",
        f"{_D}/test_fast_step.py::test_groups_with_hyper_parameters_of_their_own",
    ),
    Combination(
        "any other optimizer, a subclass of a known one",
        "upstream's path",
        "one call per sub-group; norms, gather and release are merged all the same",
        f"{_D}/test_fast_step.py::test_other_optimizers_are_called_as_upstream_does",
    ),
    Combination(
        "the merged step with offload, ZenFlow, Muon, a GradScaler, or hooks on the optimizer's step",
        "upstream's path",
        "said once in the log",
        f"{_D}/test_fast_step_work.py::test_what_upstream_has_to_do_is_left_to_it",
    ),
    Combination(
        "the merged step after resuming from a stock checkpoint",
        "tested",
        "bit for bit stock's",
        f"{_D}/test_fast_step.py::test_resuming_from_a_stock_checkpoint",
    ),
    Combination(
        "gradient norms reduced together on 4 ranks",
        "tested",
        "within 4 fp64 ulps of stock's; bit for bit with `coalesce_grad_norms=False`",
        f"{_D}/test_fast_step_work.py::test_four_ranks_have_the_norm_within_4_ulps_and_the_same_without_the_switch",
    ),
    Combination(
        "expert parallelism, fp32, against the model as it is",
        "tested",
        "losses equal to 5 decimals",
        f"{_D}/test_expert_parallel.py::test_losses_equal_the_run_without_expert_parallelism",
    ),
    Combination(
        "expert parallelism for GLM-4.5, Mixtral, Qwen3-MoE, Qwen3.5-MoE, MiniMax-M3, with the auxiliary loss",
        "tested",
        "logits, losses and every gradient as Transformers' own, within 1e-5",
        f"{_D}/test_same_mathematics.py::test_one_rank_with_autoep_layers",
    ),
    Combination(
        "correction biases that are moved (`router_bias_update_speed`): GLM-4.5, MiniMax-M3; without expert "
        "parallelism, sizes 1 and 2; accumulation, activation checkpointing of both kinds, validation between steps; "
        "1 and 2 ranks",
        "tested",
        "bit for bit one process's; 4 ranks in the slow suite",
        f"{_D}/test_router.py::test_biases_move_as_in_one_process",
    ),
    Combination(
        "moved correction biases under tensor parallelism 2, alone and with expert parallelism 2, 2 ranks",
        "tested",
        "bit for bit one process's; TP 2 × EP 2 on 4 ranks in the slow suite",
        f"{_D}/test_router.py::test_tensor_parallel_peers_move_alike",
    ),
    Combination(
        "moved correction biases in bf16, loaded in bf16, or with `buffer_dtype: bf16`",
        "tested",
        "fp32 all the same",
        f"{_D}/test_router.py::test_biases_are_fp32_in_16_bit_training",
    ),
    Combination(
        "moved correction biases in a model that has none",
        "refused",
        "",
        "tests/unit/test_strategy.py::test_a_model_without_correction_biases",
    ),
    Combination(
        "the auxiliary loss of Mixtral, Qwen3-MoE, Qwen3.5-MoE, MiniMax-M3 under expert parallel size 2",
        "tested",
        "in the loss with `output_router_logits=True`, as in Transformers; named where it is off",
        f"{_D}/test_auxiliary_loss.py::test_the_loss_has_the_auxiliary_loss_in_it",
    ),
    Combination(
        "expert parallelism on 2 ranks; tensor parallelism 2; both, for the same models, fp32",
        "tested",
        "logits, losses and every gradient as Transformers' own in one process, within 1e-5",
        f"{_D}/test_same_mathematics.py::test_two_ranks",
    ),
    Combination(
        "expert parallelism 2 and 4, tensor parallelism 2, and both, on 4 ranks, for the same models, fp32",
        "tested",
        "the same; Qwen3.5-MoE with TP 2 × EP 2 in the default suite, the rest with `-m slow`",
        f"{_D}/test_same_mathematics.py::test_four_ranks",
    ),
    Combination(
        "expert parallelism, tensor parallelism for text models inside models of text and vision",
        "tested",
        "Qwen3.5-MoE and MiniMax-M3, text only",
        f"{_D}/test_same_mathematics.py::test_the_text_model_of_a_composite",
    ),
    Combination(
        "expert parallelism in bf16",
        "tested",
        "routers choose and weigh as Transformers' own in bf16: GLM's in fp32",
        f"{_D}/test_same_mathematics.py::test_in_bf16_routers_choose_as_transformers_own",
    ),
    Combination(
        "tensor parallelism with `expert_parallel_size=1`",
        "refused",
        "DeepSpeed's layers would count gradients twice",
        "tests/unit/test_ds_config_parallel.py::test_tensor_parallelism_with_whole_expert_sets_is_refused",
    ),
    Combination(
        "tensor parallelism: heads or widths that it doesn't divide",
        "refused",
        "",
        "tests/unit/moe/test_tensor_parallel.py::test_what_can_not_be_shared_out_is_refused",
    ),
    Combination(
        "tensor parallelism, alone and with expert parallelism, × `zero.Init` × fp32, bf16",
        "tested",
        "the first loss is that of the whole model in one process",
        f"{_D}/test_tensor_parallel.py::test_a_model_built_in_partitions_is_the_one_that_seed_gives",
    ),
    Combination(
        "tensor parallelism, alone and with expert parallelism, × samplers, iterable data sets, dicts and tuples",
        "tested",
        "in fit and validation, peers see the same samples and data-parallel ranks different ones",
        f"{_D}/test_peer_batches.py::test_peers_see_the_same_samples_and_data_parallel_ranks_different_ones",
    ),
    Combination(
        "tensor parallelism: peers whose first batches differ",
        "refused",
        "in the first step, on all ranks",
        f"{_D}/test_peer_batches.py::test_peers_with_different_batches_are_told_before_anything_is_computed",
    ),
    Combination(
        "tensor parallelism with checkpoints, 16-bit or single files",
        "untested",
    ),
    Combination(
        "`zero.Init` (a model built in configure_model), with and without expert parallelism",
        "tested",
        "",
        f"{_D}/test_build.py::test_a_model_built_in_partitions_has_the_values_of_a_whole_one",
    ),
    Combination(
        "optimizer on the CPU",
        "tested",
        "no alias",
        f"{_D}/test_step_paths.py::test_cpu_optimizer_offload",
    ),
    Combination(
        "optimizer and parameters on the CPU",
        "tested",
        "no alias",
        f"{_D}/test_master_alias.py::test_nothing_is_shared_when_something_is_offloaded",
    ),
    Combination(
        "optimizer on NVMe, swappable and other sub-groups mixed",
        "tested",
        "fits are in the grid. No alias; upstream's step prepares no gradients there, so it clears none",
        f"{_D}/test_step_paths.py::test_nvme_swap_with_swappable_and_other_sub_groups_mixed",
    ),
    Combination(
        "a gradient norm that is no number",
        "tested",
        "the step is skipped on 0.19.7 and 0.19.8",
        f"{_D}/test_step_paths.py::test_a_norm_that_is_no_number_skips_the_step",
    ),
    Combination(
        "`offload_states` and `reload_states`, every subset, any optimizer whose state is tensors",
        "tested",
        "bit for bit a run that never moved; page-locked memory and copies that overlap are unproven on CUDA",
        f"{_D}/test_moving.py::test_every_subset_pinned_or_not_blocking_or_not_with_a_step_between",
    ),
    Combination(
        "checkpoints of ours loaded by stock, and of stock by ours: full, without optimizer states, module only",
        "tested",
        "training goes on bit for bit",
        f"{_D}/test_checkpoint.py::test_checkpoints_load_both_ways_between_ours_and_stock",
    ),
    Combination(
        "validate, test, predict after fit, by another Trainer, alone, and of a sharded checkpoint in a fresh one; "
        "fp32, bf16-mixed, bf16-true, autocast; expert and tensor parallelism, alone and together; whole builds and "
        "`from_config` in `configure_model`; 1 and 2 ranks",
        "tested",
        "bit for bit the validation inside fit, auxiliary losses included; four cases in the default suite, the "
        "rest with `-m slow`",
        f"{_D}/test_evaluate.py::test_an_evaluation_gives_the_bits_of_the_one_inside_fit",
    ),
    Combination(
        "evaluating a sharded checkpoint of another number of ranks (2 on 1, 1 on 2)",
        "tested",
        "the same bits; refused with expert or tensor parallelism",
        f"{_D}/test_evaluate.py::test_another_number_of_ranks_reads_the_same_weights",
    ),
    Combination(
        '`resume_layout="universal"`: a fit goes on with 4 → 2, 2 → 4 and 2 → 1 ranks; EP 2 → 4, EP 2 → 1, with and '
        "without expert parallelism; TP 2 → 1, 1 → 2; both at once; GLM, Qwen3.5, Mixtral, MiniMax-M3; fp32, "
        "bf16-mixed, optimizer on the CPU; parameters in another order",
        "tested",
        "masters and moments to the bit, there and back; losses within 1e-6 of the unchanged run's in fp32, 1e-2 in "
        "bf16; three cases in the default suite, the rest with `-m slow`",
        f"{_D}/test_other_layouts.py::test_a_fit_goes_on_in_another_layout",
    ),
    Combination(
        "`model.generate` in validation with sentences of unequal lengths on 2 ranks, expert parallelism too",
        "tested",
        "the tokens of the whole model; `synced_gpus` is set",
        f"{_D}/test_evaluate.py::test_ranks_generate_sentences_of_unequal_lengths",
    ),
    Combination(
        "a second fit of a module, by another Trainer",
        "tested",
        "bit for bit a fit of a new module with these weights; the first engine's memory is free",
        f"{_D}/test_second_run.py::test_a_second_fit_goes_on_from_the_weights_and_the_first_gives_its_memory_back",
    ),
    Combination(
        "a second fit of a module with other parallel sizes",
        "refused",
        "",
        f"{_D}/test_second_run.py::test_layers_that_are_shared_out_otherwise_are_refused",
    ),
    Combination(
        "torch autocast with a 16-bit precision",
        "refused",
        "DeepSpeed would silently drop autocast",
        "tests/unit/test_strategy.py::test_a_conflict_with_the_trainer",
    ),
    Combination(
        "a DeepSpeed whose Stage-3 step is laid out in another way",
        "upstream's path",
        "with one warning",
        f"{_D}/test_capabilities.py::test_a_renamed_hook_leaves_stock_behaviour_and_one_warning",
    ),
    Combination(
        "experts in a ModuleList or ModuleDict, fused experts of Transformers; ranks that use different ones, 2 ranks",
        "tested",
        "one process's numbers",
        f"{_D}/test_leaf_modules.py::test_ranks_that_use_different_experts_compute_what_one_process_does",
    ),
    Combination(
        "a leaf module that is called twice in one forward, without a tensor argument, or returns a dict",
        "refused",
        "on all ranks, in the first step",
        f"{_D}/test_leaf_modules.py::test_a_call_whose_gradients_cannot_be_waited_for_is_refused_on_all_ranks",
    ),
    Combination(
        "each precision, bf16 masters, autocast: dtypes of weights, masters, states, gradients, buffers, reductions",
        "tested",
        "docs/precision.md",
        f"{_D}/test_precision.py::test_each_cell_of_the_table",
    ),
    Combination(
        "a precision plugin other than DeepSpeed's (MixedPrecision, HalfPrecision)",
        "refused",
        "its backward goes past the engine",
        "tests/unit/test_precision.py::test_a_plugin_that_goes_past_the_engine_is_refused_before_any_process_group",
    ),
    Combination("fp16", "untested", "DeepSpeed has no fp16 on a CPU"),
    Combination("CUDA", "untested", "no GPU has been at hand yet"),
    Combination(
        "tied, doubly registered and frozen weights; nothing or everything persistent; overlapping communication; "
        "hpZeRO; Muon; `zero.Init`; torch's GradScaler",
        "tested",
        "bit for bit stock's, with the alias on",
        f"{_D}/test_layouts.py::test_a_layout_has_stocks_bits",
    ),
    Combination(
        "torch autocast to fp16",
        "tested",
        "the GradScaler's path is upstream's own, and its scale falls after an overflow",
        f"{_D}/test_layouts.py::test_the_gradient_scaler_of_autocast_to_fp16",
    ),
    Combination(
        "universal checkpoints",
        "tested",
        "read as stock reads them",
        f"{_D}/test_checkpoint.py::test_universal_checkpoints",
    ),
    Combination(
        "a single consolidated file (`load_full_weights`)",
        "tested",
        "masters, buffers, strictness",
        f"{_D}/test_checkpoint.py::test_a_single_file_restores_masters_and_buffers_on_every_rank",
    ),
    Combination(
        "loading a checkpoint while states are offloaded",
        "refused",
        "reload them first",
        f"{_D}/test_moving.py::test_states_that_are_away_can_be_saved_but_not_loaded",
    ),
    Combination(
        "a parameter that is unfrozen after set-up",
        "refused",
        "freeze it after set-up instead",
        f"{_D}/test_missing_gradients.py::test_a_parameter_unfrozen_later_is_refused_and_one_frozen_later_is_trained",
    ),
    Combination(
        "DeepCompile with offload_opt_states",
        "upstream's path",
        "two copies",
        "tests/unit/test_engine.py::test_deepcompile_that_moves_masters_in_each_step_keeps_two_copies",
    ),
    Combination(
        "ZenFlow",
        "upstream's path",
        "two copies",
        f"{_D}/test_master_alias.py::test_whatever_moves_weights_or_masters_keeps_two_copies",
    ),
    Combination(
        "a LightningModule wrapped by `torch.compile`",
        "refused",
        "by Lightning; compile inner modules in place (`self.model.compile()`)",
        f"{_D}/test_grid.py::test_a_whole_module_that_was_wrapped_is_refused_by_lightning",
    ),
    Combination("SuperOffload", "untested"),
)


def markdown() -> str:
    """The table, and what is known of upstream, as a page."""
    lines = [
        "# Combinations",
        "",
        "Made from `lightning_zero3/capabilities` by `python docs/generate.py`.",
        "",
        "| what | status | note | evidence |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.what} | {row.status} | {row.note} | {f'`{row.evidence}`' if row.evidence else ''} |"
        for row in COMBINATIONS
    ]
    lines += ["", *grid.markdown().splitlines()]
    lines += [
        "",
        "## What is worked around in DeepSpeed's Stage-3 optimizer",
        "",
        "| part | upstream symbol | reason | affected | expires when |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {f.name} | `{f.symbol}` | {f.reason} | {f.affected} | {f.expires} |" for f in UPSTREAM_FIXES]
    lines += [
        "",
        "## What upstream can't do, and what follows",
        "",
        "| limit | upstream symbol | reason | affected | here | expires when |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {x.name} | `{x.symbol}` | {x.reason} | {x.affected} | {x.consequence} | {x.expires} |"
        for x in UPSTREAM_LIMITS
    ]
    return "\n".join(lines) + "\n"
