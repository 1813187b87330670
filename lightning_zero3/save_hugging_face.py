# SPDX-License-Identifier: Apache-2.0
"""``SaveHuggingFace``: a Hugging Face folder at the end of a fit, or every N steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_zero3.config import SetupError
from lightning_zero3.moe import export
from lightning_zero3.moe.adapter_export import MERGE, ONLY, require_known
from lightning_zero3.moe.export_contents import precision
from lightning_zero3.moe.export_folder import require_free


class SaveHuggingFace(pl.Callback):
    """Write the model as Transformers' ``save_pretrained`` would, from all ranks.

    Works with models that are partitioned, and with experts and layers that are shared out. An earlier export at the
    same path is replaced when the new one is whole.

    Args:
        dirpath: The folder that is written at the end of the fit; with ``every_n_train_steps``, folders ``step=N`` in
            it are.
        every_n_train_steps: Optimizer steps between two exports; the fit's last step is exported too.
        dtype: ``"fp32"`` for the masters, ``"bf16"`` or ``"fp16"`` for them rounded.
        max_shard_size: The most bytes of a file.
        base: The folder that the model was loaded from, whose other tensors, names and config are taken over.
        tokenizer: A folder whose tokenizer files are copied; by default ``base``.
        adapters: Of a model with a LoRA of PEFT's: ``"merge"`` for the model with it in its weights, ``"only"`` for the
            adapter alone, which ``PeftModel.from_pretrained`` loads.

    Raises:
        SetupError: An argument can't be used.
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_train_steps: int | None = None,
        *,
        dtype: str = "fp32",
        max_shard_size: int | str = "5GB",
        base: str | Path | None = None,
        tokenizer: str | Path | None = None,
        adapters: str = MERGE,
    ) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise SetupError(f"every_n_train_steps={every_n_train_steps}: 1 or more, or None for the fit's end alone.")
        precision(dtype)
        require_known(adapters)
        export.require_folders(base, tokenizer)
        self.dirpath, self.every_n_train_steps = Path(dirpath), every_n_train_steps
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "max_shard_size": max_shard_size,
            "base": base,
            "tokenizer": tokenizer,
            "adapters": adapters,
        }
        self._last = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Refuse a path at which there is something else, before hours of training.

        Raises:
            NotExportedError: There is.
            SetupError: The adapter alone would be without what else the run changes.
        """
        self._last = -1
        speed = getattr(getattr(trainer.strategy, "options", None), "router_bias_update_speed", None)
        if self._options["adapters"] == ONLY and speed is not None:
            raise SetupError(
                f"adapters='only' with router_bias_update_speed={speed}: the run moves the routers' correction biases, "
                "which aren't in an adapter's files. Export adapters='merge', or leave the speed out."
            )
        if stage == "fit" and self.every_n_train_steps is None and trainer.is_global_zero:
            base, tokenizer, adapters = (self._options[each] for each in ("base", "tokenizer", "adapters"))
            require_free(self.dirpath, overwrite=True, alone=adapters == ONLY, made_from=(base, tokenizer))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Export if it is time to."""
        every, step = self.every_n_train_steps, trainer.global_step
        if every is not None and step > 0 and step % every == 0:
            self._save(pl_module, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Export what the fit has ended with."""
        self._save(pl_module, trainer.global_step)

    def _save(self, module: pl.LightningModule, step: int) -> None:
        if step == self._last:
            return
        self._last = step
        path = self.dirpath if self.every_n_train_steps is None else self.dirpath / f"step={step}"
        export.save_pretrained(module, path, overwrite=True, **self._options)
