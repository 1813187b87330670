# SPDX-License-Identifier: Apache-2.0
"""What the engine's builder decides before DeepSpeed is asked."""

import pytest

from lightning_zero3.engine import _something_rebinds_masters


@pytest.mark.parametrize(
    ("config", "rebinds"),
    [
        ({}, False),
        ({"compile": {"deepcompile": True}}, False),
        ({"compile": {"deepcompile": True, "offload_opt_states": True}}, True),
    ],
)
def test_deepcompile_that_moves_masters_in_each_step_keeps_two_copies(config, rebinds):
    assert _something_rebinds_masters(config) is rebinds
