# SPDX-License-Identifier: Apache-2.0
"""An upstream that doesn't call what we hang on gives stock's results and one warning; a mended one, silence."""

import inspect
import warnings
from typing import Any

import pytest

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.capabilities.fixes import UPSTREAM_FIXES, parts_to_leave_out
from lightning_zero3.substitution import substituted
from tests.fits import Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of


def run(strategy: Any = "zero3_fast") -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Regression(), Pairs(), strategy)
    return trainer, [str(w.message) for w in caught if "zero3_fast" in str(w.message)]


CALLERS = {
    "_prepare_fp32_grad_for_sub_group": "_prepare_sub_group",
    "_create_fp32_partitions": "_setup_for_real_optimizer",
    "independent_gradient_partition_epilogue": "overlapping_partition_gradients_reduce_epilogue",
    "_get_norm_groups": "step",
    "_optimizer_step": "step",
    "_post_step": "step",
    "_partition_all_parameters": "step",
}


def calling_another_name(stage3: Any, hook: str) -> Any:
    """The hook's caller, compiled again from its source with the hook under another name, as a release might do."""
    method = inspect.unwrap(getattr(stage3.DeepSpeedZeroOptimizer_Stage3, CALLERS[hook]))
    while method.__name__ == "wrapped_fn":
        method = next(cell.cell_contents for cell in method.__closure__ if inspect.isfunction(cell.cell_contents))
    source = inspect.getsource(method)
    assert hook in source
    namespace = dict(vars(stage3))
    # Inside a class of the same name, so that private names are mangled as they are upstream.
    exec(f"class DeepSpeedZeroOptimizer_Stage3:\n{source.replace(hook, '_renamed')}", namespace)
    return vars(namespace["DeepSpeedZeroOptimizer_Stage3"])[CALLERS[hook]]


def renamed(hook: str) -> dict[str, Any]:
    from deepspeed.runtime.zero import stage3

    plain, quiet = run()
    upstream = stage3.DeepSpeedZeroOptimizer_Stage3
    upstream._renamed = getattr(upstream, hook)
    try:
        with substituted(upstream, CALLERS[hook], calling_another_name(stage3, hook)):
            missing = parts_to_leave_out(upstream)
            trainer, loud = run()
    finally:
        del upstream._renamed
    assert_equal_bits(tensors_of(optimizer_of(trainer)), tensors_of(optimizer_of(plain)))
    return {
        "quiet": quiet,
        "loud": loud,
        "missing": {name for name, why in missing.items() if why},
        "aliased": len(optimizer_of(trainer).aliased_sub_groups()),
        "switches": vars(optimizer_of(trainer).switches),
    }


@pytest.mark.parametrize(
    ("hook", "parts"),
    [
        ("_prepare_fp32_grad_for_sub_group", {"scoped_grad_clear", "batch_optimizer_step"}),
        ("_create_fp32_partitions", {"alias_master_weights"}),
        ("_get_norm_groups", {"coalesce_grad_norms", "batch_optimizer_step", "skip_invalid_norm"}),
        ("_optimizer_step", {"batch_optimizer_step"}),
        ("_post_step", {"coalesce_persistent_gather", "batch_optimizer_step"}),
        ("_partition_all_parameters", {"skip_redundant_release"}),
        (
            "independent_gradient_partition_epilogue",
            {"zero_missing_gradients", "accumulate_backwards", "bucket_per_process_group"},
        ),
    ],
)
def test_a_renamed_hook_leaves_stock_behaviour_and_one_warning(ranks, hook, parts):
    seen = ranks(1).run(renamed, hook)[0]
    assert seen["quiet"] == []
    assert seen["missing"] == parts
    assert len(seen["loud"]) == 1
    # What upstream has mended was off before, and its absence is no news.
    assert any(part in seen["loud"][0] for part in parts)
    assert hook in seen["loud"][0]
    assert seen["aliased"] == (0 if "alias_master_weights" in parts else 1)
    for part in parts & set(seen["switches"]):
        assert not seen["switches"][part]


def installed() -> dict[str, Any]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    trainer, warned = run(Zero3FastStrategy())
    return {
        "warned": warned,
        "missing": {fix.name: fix.missing_hooks(Stage3) for fix in UPSTREAM_FIXES},
        "mended": {fix.name: fix.mended(Stage3) for fix in UPSTREAM_FIXES},
        "switches": vars(optimizer_of(trainer).switches),
    }


def test_the_installed_release_has_every_hook_and_our_parts_step_aside_where_it_is_mended(ranks):
    seen = ranks(1).run(installed)[0]
    assert seen["warned"] == []
    assert not any(seen["missing"].values())
    for name, mended in seen["mended"].items():
        assert seen["switches"][name] is not mended, name


def gathering_otherwise() -> tuple[list[str], bool]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with substituted(GatheredParameters, "_partition_params", lambda *_: None):
        trainer, warned = run()
    return warned, any(hasattr(p.partition, "upstream") for p in trainer.lightning_module.parameters())


def test_another_way_of_gathering_leaves_edits_to_upstream(ranks):
    (message,), wrapped = ranks(1).run(gathering_otherwise)[0]
    assert "keep_edits needs a use of partition" in message
    assert not wrapped


def another_class() -> list[str]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    from lightning_zero3.optimizer.stage3 import FastStage3Optimizer

    # As in a release whose engine builds an optimizer of its own.
    with substituted(FastStage3Optimizer, "with_switches", lambda _: Stage3):
        return run()[1]


def test_an_engine_that_builds_another_optimizer_is_warned_about(ranks):
    (message,) = ranks(1).run(another_class)[0]
    assert "DeepSpeedZeroOptimizer_Stage3 instead of FastStage3Optimizer" in message


def evaluated() -> dict[str, Any]:
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val", ((self.net(x).float() - y.float()) ** 2).mean(), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

    loader = DataLoader(Pairs(length=8), batch_size=2)
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    trainer = fit(Validated(), Pairs(), Zero3FastStrategy(config), limit_val_batches=0)
    module = trainer.lightning_module
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    other = pl.Trainer(
        strategy=Zero3FastStrategy(config), accelerator="cpu", devices=torch.distributed.get_world_size(), **quiet
    )
    value = other.validate(module, loader, verbose=False)[0]["val"]
    predictions = other.predict(module, loader)
    return {"value": value, "dtype": str(predictions[0].dtype), "count": len(predictions)}


def test_validation_and_prediction_after_fit_compute_as_in_fit(ranks):
    first, second = ranks(2).run(evaluated)
    assert first["value"] == second["value"] > 0
    # Autocast is kept; stock Lightning's own inference config drops it.
    assert first["dtype"] == "torch.bfloat16"
    assert first["count"] == 2
