"""An upstream that doesn't call what we hang on gives stock's results and one warning; a mended one, silence."""

import inspect
import warnings
from typing import Any

import pytest

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.capabilities import UPSTREAM_FIXES, parts_to_leave_out
from lightning_zero3.substitution import substituted
from tests.fits import Pairs, Regression, assert_equal_bits, fit, optimizer_of, tensors_of


def run(strategy: Any = "zero3_fast") -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Regression(), Pairs(), strategy)
    return trainer, [str(w.message) for w in caught if "lightning_zero3" in str(w.message)]


CALLERS = {
    "_prepare_fp32_grad_for_sub_group": "_prepare_sub_group",
    "_create_fp32_partitions": "_setup_for_real_optimizer",
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
    }


@pytest.mark.parametrize(
    ("hook", "part"),
    [
        ("_prepare_fp32_grad_for_sub_group", "scoped_grad_clear"),
        ("_create_fp32_partitions", "alias_master_weights"),
    ],
)
def test_a_renamed_hook_leaves_stock_behaviour_and_one_warning(ranks, hook, part):
    seen = ranks(1).run(renamed, hook)[0]
    assert seen["quiet"] == []
    assert seen["missing"] == {part}
    assert len(seen["loud"]) == 1
    assert part in seen["loud"][0]
    assert hook in seen["loud"][0]
    assert seen["aliased"] == (0 if part == "alias_master_weights" else 1)


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
