# SPDX-License-Identifier: Apache-2.0
"""Combinations of a DeepSpeed config and a precision that would silently mean something else."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch.utils.data import DataLoader

from lightning_zero3 import ConfigConflictError, Zero3FastStrategy
from lightning_zero3.precision import PRECISIONS, check_precision
from tests.fits import Pairs, Regression

MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"torch_autocast": {"enabled": True}}, "bf16-mixed", 'Pass Trainer\\(precision="32-true"\\) with torch_autocast'),
    ({"torch_autocast": {"enabled": True}}, "16-true", "silently drop autocast"),
    ({"bf16": {"enabled": True}}, "32-true", 'enables bf16, the Trainer has precision="32-true"'),
    ({"bf16": {"enabled": True}}, "16-mixed", "enables bf16"),
    ({"fp16": {"enabled": True}}, "bf16-true", "enables fp16"),
    ({"bf16": {"enabled": False}}, "bf16-mixed", "bf16.enabled false.*train in fp32"),
    ({"bf16": MASTERS}, "bf16-mixed", 'without "enabled": true.*Add it'),
    ({"bf16": MASTERS}, "32-true", "asks for bf16 masters or states.*drops them silently"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16-mixed", "need masters in bf16"),
    ({"bf16": {"enabled": 1}}, "32-true", "sets bf16.enabled to 1"),
    ({"bf16": {"enabled": "true"}}, "32-true", "sets bf16.enabled to 'true'"),
    ({"fp16": {"enabled": "auto"}}, "16-mixed", "sets fp16.enabled to 'auto'"),
    ({"torch_autocast": {"enabled": "true"}}, "bf16-mixed", "sets torch_autocast.enabled"),
    ({"bfloat16": {"enabled": True}}, "32-true", "an old name for 'bf16'"),
    ({"bfloat16": {"enabled": True}}, "bf16-mixed", "an old name for 'bf16'"),
    ({"amp": {"enabled": True}}, "32-true", "enables amp"),
    ({"data_types": {"param_dtype": "fp32"}}, "bf16-mixed", "whose weights are bf16"),
    ({"data_types": {"param_dtype": "bf16"}}, "32-true", "whose weights are fp32"),
]


@pytest.mark.parametrize(("config", "precision", "says"), REFUSED)
def test_what_would_silently_mean_something_else(config, precision, says):
    with pytest.raises(ConfigConflictError, match=says):
        check_precision(config, precision)


@pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.what)
def test_every_row_of_the_table_is_allowed(row):
    check_precision(row.config, row.precision)


@pytest.mark.parametrize("stock_semantics", [False, True])
@pytest.mark.parametrize("plugin", [MixedPrecision("bf16-mixed", "cpu"), HalfPrecision("bf16-true")])
def test_a_plugin_that_goes_past_the_engine_is_refused_before_any_process_group(plugin, stock_semantics):
    strategy = Zero3FastStrategy(stock_semantics=stock_semantics)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, plugins=[plugin], logger=False)
    with pytest.raises(ConfigConflictError, match=f"the plugin {type(plugin).__name__}"):
        trainer.fit(Regression(), DataLoader(Pairs(), batch_size=2))
    assert not torch.distributed.is_initialized()
