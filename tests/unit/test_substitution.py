# SPDX-License-Identifier: Apache-2.0
"""A name replaced for the length of a block: always put back, and never invented."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from lightning_zero3.substitution import substituted


class Owner:
    value = "original"


def a_module() -> ModuleType:
    module = ModuleType("upstream")
    module.value = "original"  # type: ignore[attr-defined]
    return module


OWNERS = pytest.mark.parametrize("make", [a_module, lambda: type("Copy", (), {"value": "original"}), SimpleNamespace])


@OWNERS
def test_the_replacement_stands_inside_and_the_original_afterwards(make: Callable[[], ModuleType]) -> None:
    owner = make()
    owner.value = original = object()
    with substituted(owner, "value", "replacement"):
        assert owner.value == "replacement"
    assert owner.value is original


@OWNERS
def test_the_original_is_back_after_an_error_which_passes_through(make: Callable[[], ModuleType]) -> None:
    owner = make()
    owner.value = original = object()
    with pytest.raises(KeyError, match="from inside"), substituted(owner, "value", "replacement"):
        raise KeyError("from inside")
    assert owner.value is original


def test_a_name_that_upstream_dropped_is_an_error_and_is_not_created() -> None:
    with pytest.raises(AttributeError, match="gone"), substituted(Owner, "gone", 1):
        pytest.fail("the block must not run")
    assert not hasattr(Owner, "gone")


def test_other_names_are_left_alone() -> None:
    owner = SimpleNamespace(value="original", other=[1])
    with substituted(owner, "value", "replacement"):
        assert owner.other == [1]
        owner.other = [2]
    assert owner == SimpleNamespace(value="original", other=[2])


def test_blocks_nest() -> None:
    owner = SimpleNamespace(value="original")
    with substituted(owner, "value", "outer"):
        with substituted(owner, "value", "inner"):
            assert owner.value == "inner"
        assert owner.value == "outer"
    assert owner.value == "original"


def test_what_the_block_itself_sets_does_not_survive() -> None:
    owner = SimpleNamespace(value="original")
    with substituted(owner, "value", "replacement"):
        owner.value = "set inside"
    assert owner.value == "original"


def test_an_inherited_name_does_not_stay_behind() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        pass

    with substituted(Derived, "name", lambda self: "derived"):
        assert Derived().name() == "derived"
    assert Derived().name() == "base"
    assert "name" not in vars(Derived)


def test_a_static_method_comes_back_as_one() -> None:
    class Owner:
        @staticmethod
        def double(number: int) -> int:
            return 2 * number

    with substituted(Owner, "double", staticmethod(lambda number: 3 * number)):
        assert Owner().double(2) == 6
    assert Owner().double(2) == 4
