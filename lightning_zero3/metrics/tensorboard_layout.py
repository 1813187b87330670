# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's "Custom Scalars" page: which metrics share a chart."""

from __future__ import annotations

import re
from typing import Any

from lightning_zero3.metrics import names


def _exactly(*metrics: str) -> list[Any]:
    # TensorBoard takes them for regular expressions, matched from the beginning.
    return ["Multiline", [f"{re.escape(name)}$" for name in metrics]]


def _with_spread(name: str) -> list[Any]:
    smallest, _ = names.spread_of(names.BY_NAME[name])
    return _exactly(name, smallest.name)


LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Step": {
        "where a step's time goes (ms)": _exactly(
            names.STEP_TOTAL, names.FWD, names.BWD, names.STEP_MICROSTEP, names.DATA_WAIT
        ),
        "inside the optimizer step and backward (ms)": _exactly(
            names.STEP_MICROSTEP, names.OPTIMIZER_STEP, names.BWD_INNER, names.BWD_ALLREDUCE
        ),
        "tokens per second": _exactly(names.TOKENS_PER_SECOND),
        "tokens per second and device": _exactly(names.DEVICE_TOKENS_PER_SECOND),
        "model FLOPs utilisation": _exactly(names.MFU),
    },
    "Memory": {
        "GPU (GiB)": _exactly(names.PEAK_RESERVED, names.PEAK_ALLOCATED, names.ALLOCATED_BETWEEN_STEPS),
        "host (GiB)": _exactly(names.HOST_RSS_PEAK, names.HOST_RSS),
    },
    "Training": {
        "loss": _exactly(names.LOSS_OF_STEP),
        "gradient norm": _exactly(names.GRAD_NORM),
        "learning rate": _exactly(names.LEARNING_RATE),
        "skipped steps": _exactly(names.SKIPPED_STEPS),
    },
    "Experts": {
        label: ["Multiline", [f"{re.escape(name)}(/.*)?$"]]
        for label, name in (
            ("load, fullest over mean", names.EXPERT_LOAD),
            ("entropy, of 1", names.EXPERT_ENTROPY),
            ("dead experts", names.DEAD_EXPERTS),
        )
    },
    "Spread over ranks": {
        f"{names.BY_NAME[name].label}: largest and smallest": _with_spread(name)
        for name in (names.STEP_TOTAL, names.FWD, names.BWD, names.STEP_MICROSTEP, names.DATA_WAIT, names.HOST_RSS)
    },
}


def add_layout(loggers: list[Any]) -> None:
    """Give the layout to those loggers that are TensorBoard's.

    Args:
        loggers: The Trainer's.
    """
    for logger in loggers:
        # By name, since each of Lightning's packages has its own.
        if "TensorBoardLogger" in (kind.__name__ for kind in type(logger).__mro__):
            # On ranks other than 0 it is a dummy that takes any call.
            logger.experiment.add_custom_scalars(LAYOUT)
