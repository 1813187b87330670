# SPDX-License-Identifier: Apache-2.0
"""``Zero3FastStrategy``: Lightning's hooks, in the order in which a Trainer calls them, each delegating to one room.

Upstream symbols (Lightning 2.6.6), of ``DeepSpeedStrategy``: ``setup_environment``, ``setup_distributed`` and
``_init_deepspeed_distributed`` (refuse a CPU); ``_init_config_if_needed``, ``_config_initialized`` (a KeyError on a
bare config); ``_setup_model_and_optimizer``, ``_initialize_deepspeed_inference``, ``_init_optimizers``,
``_auto_select_batch_size`` (its private hooks; it has no public ones for an engine, an optimizer or a batch size of
one's own); ``_restore_zero_state`` (no masters, no buffers); ``teardown`` (moves a refused meta module, which hides
the refusal). Detected by tests. Expires when Lightning allows CPUs and has hooks for the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_zero3 import ds_config, loaders, precision, refusals, same_batches
from lightning_zero3.checkpoints.consolidated import load_consolidated
from lightning_zero3.engine_setup import EngineSetup
from lightning_zero3.evaluating import EvaluatingStrategy
from lightning_zero3.lightning_packages import package_of
from lightning_zero3.moe import expert_parallel, parallel_layers
from lightning_zero3.moe.build import meta_tensors, refuse_meta_tensors
from lightning_zero3.moe.peer_batches import PeerBatchesStrategy
from lightning_zero3.resuming.hooks import ResumingStrategy
from lightning_zero3.saving import SavingStrategy
from lightning_zero3.stepping.hooks import SteppingStrategy
from lightning_zero3.strategy_options import OptionsOfAStrategy
from lightning_zero3.substitution import substituted

# In every checkpoint of a Trainer's, and needed to load one.
_VERSION = "pytorch-lightning_version"


class TrainerStrategy(
    EngineSetup,
    OptionsOfAStrategy,
    PeerBatchesStrategy,
    ResumingStrategy,
    SteppingStrategy,
    SavingStrategy,
    EvaluatingStrategy,
):
    """Mixin over the ``DeepSpeedStrategy`` of either of Lightning's packages that have a Trainer."""

    def setup_environment(self) -> None:
        """Check everything that can be known, then set up the device and the process group.

        Raises:
            ConfigConflictError: The config and the Trainer differ.
            ValueError: A parallel size doesn't fit ranks, experts, heads or widths, or there is no layer to share.
            RuntimeError: The accelerator isn't supported, or isn't the one that DeepSpeed was imported for.
            UnsupportedFeatureError: A callback, a hook or a setting of the Trainer can't work with partitioned weights.
            SetupError: The module's layers are shared out in another way, by an earlier run.
        """
        self._check_accelerator()
        refusals.check(self.lightning_module, self.world_size, self.options.stock_semantics)
        self._check_config()
        if self.lightning_module is not None:
            refuse_meta_tensors(self.lightning_module)
        self._check_parallel_layers()
        self._check_router_biases()
        # DeepSpeedStrategy's own method refuses anything but CUDA; its base class sets up the environment for any.
        super(self.upstream, self).setup_environment()

    def setup(self, trainer: Any) -> None:
        """As Lightning's, with buffers kept in fp32, or named, as docs/precision.md says."""
        stock = self.options.stock_semantics
        with precision.keeping_what_is_fp32(self.precision_plugin, self.config, stock_semantics=stock):
            super().setup(trainer)

    def setup_distributed(self) -> None:
        """Make the process group: NCCL for CUDA, gloo for CPU."""
        with self._making_process_group():
            if self.root_device.type == "cuda":
                super().setup_distributed()
            else:
                # The same as Lightning's, less its check of GPU indices, which CPU devices fail.
                reset_seed()
                self.set_world_ranks()
                self._init_deepspeed_distributed()

    def teardown(self) -> None:
        """As Lightning's, which moves the module to the CPU and fails on one that was refused for being on meta."""
        module = self.lightning_module
        with ExitStack() as scope:
            if module is not None and meta_tensors(module):
                scope.enter_context(substituted(module, "cpu", lambda: module))
            super().teardown()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """What ``configure_model`` runs in: each module is partitioned as it is built, with a whole model's values."""
        if self.options.stock_semantics:
            with super().model_sharded_context():
                yield
            return
        self._init_config_if_needed()
        with self._sharded_build():
            yield

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        return self._training_engine(model, optimizer, lr_scheduler)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self.model = self._evaluating_engine(model)

    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        return refusals.the_optimizer(self.lightning_module)

    def _auto_select_batch_size(self) -> int:
        return loaders.micro_batch_size(self.lightning_module)

    def process_dataloader(self, dataloader: object) -> object:
        """Make sure that all ranks have the same number of batches."""
        seeded = super().process_dataloader(dataloader)
        return same_batches.made_sure_of(seeded, self.lightning_module, self._timeout)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's; a checkpoint that Fabric has saved has none of a Trainer's entries, and is loaded without.

        Args:
            checkpoint_path: Where.
            weights_only: As Lightning's.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if _VERSION in checkpoint:
            return checkpoint
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            rank_zero_warn(
                f"{checkpoint_path} has none of a Trainer's entries: it was saved by Fabric or by an engine. "
                "Weights, masters and moments are loaded; steps, epochs, schedulers and callbacks begin anew."
            )
        return {**checkpoint, _VERSION: package_of(self).__version__, "lr_schedulers": []}

    def _restore_zero_state(self, ckpt: Mapping[str, Any], strict: bool) -> None:
        if self.options.stock_semantics:
            super()._restore_zero_state(ckpt, strict)
            return
        assert self.lightning_module is not None
        load_consolidated(self.lightning_module, ckpt["state_dict"], strict)

    def _check_config(self) -> None:
        module = self.lightning_module
        if module is None or self._config_initialized:
            return
        precision.require_deepspeed_precision(self.precision_plugin)
        ds_config.check_against_trainer(
            self.config,
            trainer=module.trainer,
            world_size=self.world_size,
            precision=self.precision_plugin.precision,
            micro_batch_size=self._auto_select_batch_size() if "train_batch_size" in self.config else None,
        )
        ds_config.settle_trainer_values(self.config)

    def _check_parallel_layers(self) -> None:
        experts = ds_config.expert_parallel_section(self.config)
        tensors = ds_config.tensor_parallel_section(self.config)
        module = self.lightning_module
        if self.options.verify_parallel and (module is None or module.trainer.state.fn == TrainerFn.FITTING):
            parallel_layers.refuse_nothing_to_verify(self.config)
        if module is None or self._check_layers_of_an_earlier_engine(module) or (experts is None and tensors is None):
            return
        topology = parallel_layers.topology_of(self.config, self.world_size)
        parent = package_of(module).LightningModule
        if expert_parallel.holds_a_model(module) or not is_overridden("configure_model", module, parent):
            parallel_layers.targets(module, self.config, self.world_size)
        elif experts is not None:
            # The model is built later, in the process group; its config often hangs on the module already.
            expert_parallel.check_declared_configs(module, experts.get("preset_model"), topology)


class Zero3FastStrategy(TrainerStrategy, DeepSpeedStrategy):
    """ZeRO Stage 3 with a faster, leaner optimizer step, and expert parallelism for Hugging Face MoE models.

    A drop-in for ``Trainer(strategy="deepspeed_stage_3")``: registered as ``"zero3_fast"``, and as
    ``"zero3_fast_offload"`` with the optimizer on the CPU. Runs on CUDA GPUs, and on CPUs with gloo.

    Args:
        config: A DeepSpeed config dict or a path to one in JSON. It is copied, never changed. Where it is silent,
            arguments and options fill it in; where it and they differ, :class:`ConfigConflictError` names both.
        scoped_grad_clear: Visit each parameter once per optimizer step to clear gradients, instead of once per
            sub-group. Where the installed DeepSpeed clears once per step (0.19.8), its own clear is used.
        alias_master_weights: Let a sub-group's weight partition be its master copy where the two would be identical
            (same dtype, same device, nothing offloaded): plain fp32, torch autocast over fp32 weights, bf16 masters.
            Saves 4 (fp32) or 2 (bf16) bytes per parameter.
        coalesce_grad_norms: Compute the gradient norms of all sub-groups together, with one reduction per process
            group instead of one or two per sub-group.
        batch_optimizer_step: Call the optimizer once for many sub-groups, where it is known to treat each tensor for
            itself: torch's Adam, AdamW and SGD, DeepSpeed's FusedAdam and CPUAdam. Any other optimizer, offload,
            ZenFlow and Muon take upstream's step.
        coalesce_persistent_gather: Gather the persistent parameters after the step by one collective per process group
            and dtype, instead of one per parameter.
        skip_redundant_release: Before the step, release only parameters that are still gathered, in one pass.
        bucket_per_process_group: Let gradients of two process groups (AutoEP's experts and all other parameters) wait
            for their reductions side by side in the one bucket, instead of one after the other.
        lean_hooks: Around each module's forward and backward do only what is needed: nothing for modules without
            parameters, no wrappers, no inspection of signatures; copy a bucket's gradients in one call; count devices
            once instead of in every reduction.
        lean_linear: Call the function that DeepSpeed puts in linear layers without an inspection of its signature.
        step_bytes_budget: Bytes of gradients, in the masters' dtype, that one call to the optimizer updates; at least
            one sub-group's. ``None``: as many as fit in memory that is idle during the step (the reduction bucket),
            such that the step's peak is no higher than stock's.
        expert_parallel_size: Number of ranks that share one set of experts. ``None`` leaves the model's MoE layers as
            they are; 1 replaces them by AutoEP's layers with all experts on every rank. It must divide the number of
            ranks and of experts.
        expert_parallel_preset: Name of DeepSpeed's AutoEP preset; ``None`` resolves it from the model's config.
        router_bias_update_speed: How far a router's correction bias (``e_score_correction_bias``) moves after each
            optimizer step, to even out the experts' loads without an auxiliary loss, as DeepSeek-V3, GLM-4.5 and
            MiniMax do (0.001, and 0 near the end of training). ``None`` leaves biases as they are. Works with and
            without ``expert_parallel_size``.
        tensor_parallel_size: Number of consecutive ranks that share each layer and see the same data. ``None`` and 1
            leave layers whole. It must divide the number of ranks, of heads and the layers' widths.
        verify_parallel: Before training, compare logits, loss, auxiliary loss and every gradient of a small copy of the
            Hugging Face model, with this run's parallel sizes and DeepSpeed config, with plain Transformers on one
            process, within 1e-5 in fp32 (and what routers choose in bf16, where the run is in bf16), and raise
            ``DifferentMathematicsError`` on all ranks where they differ. Takes seconds; weights, memory and random
            states stay as they are. Needs ``expert_parallel_size`` or ``tensor_parallel_size``.
        async_save: Let training go on while a checkpoint is written. What is saved is copied to host memory first, as
            many bytes as the rank writes (with Adam and fp32 masters, 12 per parameter of its share); one save waits
            for the one before. It is committed, and its errors are raised on all ranks, at a later micro-batch or at
            the end of the fit.
        stock_semantics: Give exactly ``deepspeed_stage_3``'s numbers, its known faults included: none of the
            corrections that docs/corrections.md lists is applied.
        resume_layout: ``"universal"``: a fit goes on from a sharded checkpoint of other numbers of ranks, other expert
            or tensor parallel sizes, or another order of parameters (docs/checkpoints.md). Each rank reads its share
            of masters and moments from all ranks' files, and every number is as it was saved. ``None``: such a
            checkpoint is refused before anything is changed.
        trust_checkpoint: Read checkpoints without a restriction, as DeepSpeed does. Whatever code is in them is run:
            only for files whose every writer you trust. Without it, a checkpoint that holds anything but tensors, plain
            values and a short list of known classes is refused (docs/checkpoints.md).
        **deepspeed_arguments: Any other argument of ``lightning.pytorch.strategies.DeepSpeedStrategy`` but ``stage``
            and ``zero_optimization``. One that is at Lightning's default counts as not given.

    Raises:
        ConfigConflictError: ``config`` and an argument or option differ.
        TypeError: An unknown argument, or an option of the wrong type.
        ValueError: An option out of range.
    """

    upstream = DeepSpeedStrategy
