# SPDX-License-Identifier: Apache-2.0
"""What an epoch's logged means are made of so far, and the metrics that callbacks and schedulers look at.

Lightning saves neither: after a resume within an epoch its mean is one over the rest, and a scheduler or a callback
that monitors a metric finds none.

Upstream symbols: ``_ResultMetric``, ``_Metadata``, ``_Sync``, ``_first_loop_iter`` and ``_callback_metrics`` of
Lightning's logger connector (2.6.6); ``Metric._defaults``, ``_update_count`` (torchmetrics 1.x). Detected by tests.
Expires when Lightning saves its results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric

_LOGGED_AS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_SUMS = ("value", "cumulated_batch_size")


def saved_state(trainer: Any) -> dict[str, Any]:
    """Of this rank, as plain tensors, numbers and strings.

    Args:
        trainer: A Trainer in fit.
    """
    results = trainer.fit_loop.epoch_loop._results
    logged = {
        key: {
            "logged_as": {name: getattr(metric.meta, name) for name in _LOGGED_AS},
            "reduce_fx": metric.meta.reduce_fx.__name__,
            "sync_dist": metric.meta.sync.should,
            "rank_zero_only": metric.meta.sync.rank_zero_only,
            "is_tensor": metric.is_tensor,
            "sums": {name: getattr(metric, name) for name in _SUMS if metric.is_tensor and hasattr(metric, name)},
        }
        for key, metric in results.items()
        if metric.meta.on_epoch and not metric.has_reset and metric.meta.sync._group is None
    }
    metrics = {
        path: {"count": part._update_count, "states": {name: getattr(part, name) for name in part._defaults}}
        for path, part in _metrics(trainer)
        if part._update_count
    }
    state = {"logged": logged, "metrics": metrics, "monitored": dict(trainer.callback_metrics)}
    copied: dict[str, Any] = apply_to_collection(state, torch.Tensor, lambda tensor: tensor.detach().cpu().clone())
    return copied


def restore_monitored(state: Mapping[str, Any], trainer: Any) -> None:
    """Give callbacks and schedulers the metrics that they monitor.

    Args:
        state: From :func:`saved_state`.
        trainer: A Trainer whose fit is about to go on.
    """
    trainer._logger_connector._callback_metrics.update(_on(trainer, state["monitored"]))


def restore_epoch(state: Mapping[str, Any], trainer: Any) -> None:
    """Go on with the sums of an epoch that goes on.

    Args:
        state: From :func:`saved_state`.
        trainer: A Trainer whose fit is about to go on within an epoch.
    """
    modules = dict(_metrics(trainer))
    for path, saved in state["metrics"].items():
        if path in modules:
            for name, value in _on(trainer, saved["states"]).items():
                setattr(modules[path], name, value)
            modules[path]._update_count, modules[path]._computed = saved["count"], None
    results = trainer.fit_loop.epoch_loop._results
    # Of either of Lightning's packages.
    kinds = sys.modules[type(results).__module__]
    for key, saved in state["logged"].items():
        meta = kinds._Metadata(**saved["logged_as"], reduce_fx=saved["reduce_fx"])
        meta.sync = kinds._Sync(
            _should=saved["sync_dist"], fn=trainer.strategy.reduce, rank_zero_only=saved["rank_zero_only"]
        )
        metric = kinds._ResultMetric(meta, saved["is_tensor"])
        attribute = modules.get(meta.metric_attribute or "")
        if not saved["is_tensor"] and attribute is None:
            continue
        for name, value in _on(trainer, saved["sums"]).items():
            setattr(metric, name, value)
        if not saved["is_tensor"]:
            metric.value = attribute
        metric._update_count = 1
        results[key] = metric.to(trainer.strategy.root_device)
    # The next batch isn't an epoch's first, which would set all to nothing.
    trainer._logger_connector._first_loop_iter = True


def _metrics(trainer: Any) -> list[tuple[str, Metric]]:
    return [(path, part) for path, part in trainer.lightning_module.named_modules() if isinstance(part, Metric)]


def _on(trainer: Any, state: Any) -> Any:
    return apply_to_collection(state, torch.Tensor, lambda tensor: tensor.to(trainer.strategy.root_device))
