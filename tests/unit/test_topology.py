# SPDX-License-Identifier: Apache-2.0
"""The layout of ranks: properties of the groups, and DeepSpeed's own rank lists for comparison."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero3.topology import Topology, divisors

LAYOUTS = st.builds(
    lambda groups, size: Topology(world_size=groups * size, expert_parallel_size=size),
    st.integers(1, 12),
    st.integers(1, 12),
)


def both_kinds_of_groups(layout: Topology) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    ranks = range(layout.world_size)
    return {layout.expert_parallel_ranks(rank) for rank in ranks}, {
        layout.expert_data_parallel_ranks(rank) for rank in ranks
    }


@settings(deadline=None)
@given(LAYOUTS)
def test_groups_of_either_kind_partition_the_ranks(layout: Topology) -> None:
    for groups in both_kinds_of_groups(layout):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))


@settings(deadline=None)
@given(LAYOUTS)
def test_every_rank_is_in_its_own_groups(layout: Topology) -> None:
    for rank in range(layout.world_size):
        assert rank in layout.expert_parallel_ranks(rank)
        assert rank in layout.expert_data_parallel_ranks(rank)


@settings(deadline=None)
@given(LAYOUTS)
def test_groups_have_the_sizes_that_make_up_the_world(layout: Topology) -> None:
    for rank in range(layout.world_size):
        assert len(layout.expert_parallel_ranks(rank)) == layout.expert_parallel_size
        assert len(layout.expert_data_parallel_ranks(rank)) * layout.expert_parallel_size == layout.world_size


@settings(deadline=None)
@given(LAYOUTS)
def test_groups_of_different_kinds_share_one_rank(layout: Topology) -> None:
    # Otherwise two ranks of one expert-parallel group would hold the same experts.
    expert_parallel, expert_data_parallel = both_kinds_of_groups(layout)
    for group in expert_parallel:
        for across in expert_data_parallel:
            assert len(set(group) & set(across)) == 1


@pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12, 32])
def test_the_layout_is_deepspeeds(world_size: int) -> None:
    from deepspeed.utils.groups import _get_expert_parallel_ranks

    for size in divisors(world_size):
        layout = Topology(world_size, size)
        expert_parallel, expert_data_parallel = _get_expert_parallel_ranks(world_size, 1, size)
        for rank in range(world_size):
            assert [list(layout.expert_parallel_ranks(rank))] == [group for group in expert_parallel if rank in group]
            assert [list(layout.expert_data_parallel_ranks(rank))] == [
                group for group in expert_data_parallel if rank in group
            ]


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64))
def test_a_size_that_does_not_divide_the_ranks_is_refused_with_those_that_do(world_size: int, size: int) -> None:
    if world_size % size == 0:
        assert Topology(world_size, size).expert_parallel_size == size
        return
    with pytest.raises(
        ValueError, match=f"expert_parallel_size={size} doesn't divide the {world_size} ranks"
    ) as caught:
        Topology(world_size, size)
    offered = str(caught.value).rpartition("Sizes that do: ")[2].rstrip(".").split(", ")
    assert [int(number) for number in offered] == [n for n in range(1, world_size + 1) if world_size % n == 0]
    for number in offered:
        assert Topology(world_size, int(number)).expert_parallel_size == int(number)


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_1_is_refused_too(size: int) -> None:
    # A user's own expert_parallel.autoep_size comes here without passing through Zero3Options.
    refused = False
    try:
        Topology(8, size)
    except ValueError as error:
        refused = f"expert_parallel_size={size}" in str(error)
    assert refused


@settings(deadline=None)
@given(LAYOUTS, st.integers(1, 64))
def test_experts_that_cannot_be_shared_out_are_refused_with_sizes_that_work(layout: Topology, experts: int) -> None:
    if experts % layout.expert_parallel_size == 0:
        layout.require_experts_divide(experts, "a layer")
        return
    with pytest.raises(ValueError, match=f"doesn't divide the {experts} experts of model.layers.1.mlp") as caught:
        layout.require_experts_divide(experts, "model.layers.1.mlp")
    assert f"expert_parallel_size={layout.expert_parallel_size}" in str(caught.value)
    offered = str(caught.value).rpartition("ranks: ")[2].rstrip(".").split(", ")
    assert offered  # 1 always works
    for number in offered:
        Topology(layout.world_size, int(number)).require_experts_divide(experts, "a layer")


def test_sizes_that_divide_only_the_experts_are_not_offered() -> None:
    with pytest.raises(ValueError, match=r"both the experts and the 8 ranks: 1, 2\.$"):
        Topology(8, 4).require_experts_divide(6, "a layer")


@settings(deadline=None)
@given(st.integers(1, 400))
def test_divisors_are_all_and_ascending(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert set(found) == {a for a in range(1, number + 1) for b in [number // a] if a * b == number}


SPLIT_LAYOUTS = st.builds(
    lambda groups, size: Topology(world_size=groups * size, tensor_parallel_size=size),
    st.integers(1, 12),
    st.integers(1, 12),
)


@settings(deadline=None)
@given(SPLIT_LAYOUTS)
def test_tensor_parallel_peers_see_one_batch_and_data_parallel_ranks_all_of_them(layout: Topology) -> None:
    for rank in range(layout.world_size):
        peers, lane = layout.tensor_parallel_ranks(rank), layout.data_parallel_ranks(rank)
        assert rank in peers
        assert rank in lane
        assert len(peers) == layout.tensor_parallel_size
        assert {layout.data_parallel_rank(peer) for peer in peers} == {layout.data_parallel_rank(rank)}
        assert [layout.data_parallel_rank(other) for other in lane] == list(range(layout.data_parallel_size))


@pytest.mark.parametrize(("world_size", "tensor", "experts"), [(4, 2, 2), (4, 2, 4), (8, 2, 4), (8, 4, 2), (12, 3, 4)])
def test_the_layout_with_both_kinds_is_deepspeeds(world_size: int, tensor: int, experts: int) -> None:
    from deepspeed.module_inject.auto_ep_folding import build_folding_spec, local_folding_ranks

    layout = Topology(world_size, experts, tensor)
    spec = build_folding_spec(world_size=world_size, pp_size=1, tp_size=tensor, ep_size=experts)
    for rank in range(world_size):
        assert local_folding_ranks(rank, spec) == {
            "tp": layout.tensor_parallel_ranks(rank),
            "dense_dp": layout.data_parallel_ranks(rank),
            "ep": layout.expert_parallel_ranks(rank),
            "edp": layout.expert_data_parallel_ranks(rank),
        }


def test_a_tensor_parallel_size_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 doesn't divide the 6 ranks .*: 1, 2, 3, 6\."):
        Topology(world_size=6, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size=0: a whole number"):
        Topology(world_size=6, tensor_parallel_size=0)
    layout = Topology(world_size=8, tensor_parallel_size=4)
    layout.require_divides(8, "heads")
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 doesn't divide heads: 6\. .* 8 ranks: 1, 2\."):
        layout.require_divides(6, "heads")
