# SPDX-License-Identifier: Apache-2.0
"""What the installed DeepSpeed already does: read from its code, checked here against its parsed source."""

import ast
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import instrument_w_nvtx

from lightning_zero3.capabilities.fixes import (
    BATCHED_STEP,
    GRAD_CLEAR,
    GRAD_NORMS,
    MASTER_ALIAS,
    PERSISTENT_GATHER,
    RELEASE,
    UPSTREAM_FIXES,
    aliases_master_weights,
    clears_once_per_step,
)
from lightning_zero3.capabilities.limits import UPSTREAM_LIMITS
from lightning_zero3.capabilities.probing import UpstreamFix, UpstreamLimit, referenced_names
from lightning_zero3.optimizer.switches import Switches


def upstream_method(name: str) -> ast.FunctionDef:
    """The definition in DeepSpeed's file, found without going through the function object and its wrappers."""
    tree = ast.parse(inspect.getsource(stage3))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


class ClearsPerSubGroup(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    @instrument_w_nvtx
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        self.zero_grad(set_to_none=True)
        self.averaged_gradients[sub_group_id] = None


class ClearsPerSubGroupInAHelper(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        def clear() -> None:
            self.zero_grad(set_to_none=True)

        clear()


class ClearsElsewhere(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    @instrument_w_nvtx
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """A text about zero_grad is no call of it."""
        self.averaged_gradients[sub_group_id] = "zero_grad"


class ComparesWithAString(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    def _create_fp32_partitions(self) -> None:
        for tensor in self.fp16_partitioned_groups_flat:
            if tensor.device == self.device:
                self.fp32_partitioned_groups_flat.append(tensor)


class ComparesDevices(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    @instrument_w_nvtx
    def _create_fp32_partitions(self) -> None:
        for tensor in self.fp16_partitioned_groups_flat:
            if tensor.device == torch.device(self.device):
                self.fp32_partitioned_groups_flat.append(tensor)


def test_the_names_of_deepspeeds_own_wrapped_methods_are_read() -> None:
    # Every attribute that the parsed source mentions, whatever the release.
    method = upstream_method("_prepare_fp32_grad_for_sub_group")
    mentioned = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    assert mentioned
    assert mentioned - {"instrument_w_nvtx"} <= referenced_names(
        DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group
    )


def test_the_installed_deepspeed_clears_where_its_source_says() -> None:
    method = upstream_method("_prepare_fp32_grad_for_sub_group")
    clears_there = any(isinstance(node, ast.Attribute) and node.attr == "zero_grad" for node in ast.walk(method))
    assert clears_once_per_step(DeepSpeedZeroOptimizer_Stage3) is not clears_there


@pytest.mark.parametrize(
    ("optimizer", "once"),
    [(ClearsPerSubGroup, False), (ClearsPerSubGroupInAHelper, False), (ClearsElsewhere, True)],
)
def test_clearing_is_told_by_the_call_in_the_sub_groups_method(optimizer: type[Any], once: bool) -> None:
    assert clears_once_per_step(optimizer) is once


def test_the_installed_deepspeed_aliases_where_its_source_says() -> None:
    method = upstream_method("_create_fp32_partitions")
    compares_devices = any(
        isinstance(node, ast.Compare) and "torch.device(self.device)" in ast.unparse(node) for node in ast.walk(method)
    )
    assert aliases_master_weights(DeepSpeedZeroOptimizer_Stage3) is compares_devices


@pytest.mark.parametrize(("optimizer", "aliases"), [(ComparesWithAString, False), (ComparesDevices, True)])
def test_aliasing_is_told_by_the_comparison_of_devices(optimizer: type[Any], aliases: bool) -> None:
    assert aliases_master_weights(optimizer) is aliases


def test_a_device_is_never_equal_to_its_name() -> None:
    # The fault that MASTER_ALIAS works around: if torch changes this, upstream's branch comes alive by itself.
    assert torch.zeros(1).device != "cpu"


@pytest.mark.parametrize("fix", UPSTREAM_FIXES, ids=lambda fix: fix.name)
def test_the_symbol_of_every_fix_exists_upstream(fix: UpstreamFix) -> None:
    found: Any = stage3
    for name in fix.symbol.split("."):
        found = getattr(found, name)
    assert callable(found)


@pytest.mark.parametrize("fix", UPSTREAM_FIXES, ids=lambda fix: fix.name)
def test_every_fix_says_what_why_where_and_until_when(fix: UpstreamFix) -> None:
    assert fix.reason
    assert fix.affected
    assert fix.expires
    assert isinstance(fix.mended(DeepSpeedZeroOptimizer_Stage3), bool)


def test_every_fix_reads_the_method_that_it_names() -> None:
    switches = {name for name, value in dataclasses.asdict(Switches()).items() if isinstance(value, bool)}
    assert {fix.name for fix in UPSTREAM_FIXES} == switches
    assert GRAD_CLEAR.mended(ClearsElsewhere)
    assert not GRAD_CLEAR.mended(ClearsPerSubGroup)
    assert MASTER_ALIAS.mended(ComparesDevices)
    assert not MASTER_ALIAS.mended(ComparesWithAString)


class StepsInAnotherOrder(DeepSpeedZeroOptimizer_Stage3):
    """Updates before it has scaled the gradients."""

    def step(self, closure: Any = None) -> None:
        self._pre_step()
        self._partition_all_parameters()
        self._get_norm_groups()
        for index, _ in enumerate(self.fp16_groups):
            self._prepare_sub_group(index, set())
            self._optimizer_step(index)
            self.unscale_and_clip_grads(index, None)
            self._reassign_or_swap_out_partitioned_parameters(index)
            self._release_sub_group(index, set())
        self._post_step(set())


class CoordinatesElsewhere(DeepSpeedZeroOptimizer_Stage3):
    """Gathers persistent parameters in another place."""

    def _post_step(self, timer_names: Any) -> None:
        self.invalidate_secondary_tensor()


def test_another_order_of_calls_is_no_layout_that_is_known() -> None:
    (missing,) = BATCHED_STEP.missing_hooks(StepsInAnotherOrder)
    assert "in this order" in missing
    assert not RELEASE.missing_hooks(StepsInAnotherOrder)
    assert not GRAD_NORMS.missing_hooks(StepsInAnotherOrder)


def test_names_that_upstream_no_longer_uses_are_missed() -> None:
    missing = PERSISTENT_GATHER.missing_hooks(CoordinatesElsewhere)
    assert missing == ["a use of persistent_parameters", "a use of all_gather"]
    assert not BATCHED_STEP.missing_hooks(DeepSpeedZeroOptimizer_Stage3)


@pytest.mark.parametrize("limit", UPSTREAM_LIMITS, ids=lambda limit: limit.name)
def test_every_limit_is_probed_and_explained(limit: UpstreamLimit) -> None:
    assert isinstance(limit.present(), bool)
    for text in (limit.symbol, limit.reason, limit.affected, limit.consequence, limit.expires):
        assert text
