# SPDX-License-Identifier: Apache-2.0
"""What a function's code refers to and calls, whatever it is wrapped in."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from deepspeed.utils import instrument_w_nvtx

from lightning_zero3.capabilities.probing import calls_among, referenced_names


def uses_len_and_abs(numbers: list[int]) -> int:
    return len([abs(number) for number in numbers])


def passed_through(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return sum((function(*args, **kwargs), 0))

    return around


WRAPPINGS = {
    "plain": lambda function: function,
    "deepspeed's": instrument_w_nvtx,
    "deepspeed's twice": lambda function: instrument_w_nvtx(instrument_w_nvtx(function)),
    "functools": passed_through,
    "functools in deepspeed's": lambda function: instrument_w_nvtx(passed_through(function)),
    "deepspeed's in functools": lambda function: passed_through(instrument_w_nvtx(function)),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_names_are_those_of_the_wrapped_function_and_not_the_wrappers(wrap: Callable[..., Any]) -> None:
    names = referenced_names(wrap(uses_len_and_abs))
    assert {"len", "abs"} <= names
    assert "sum" not in names
    assert "__qualname__" not in names  # instrument_w_nvtx's own


def test_names_in_nested_functions_count() -> None:
    def outer() -> Callable[[], Any]:
        def middle() -> Callable[[], Any]:
            return lambda: sorted(())

        return middle

    assert "sorted" in referenced_names(outer)


def test_text_and_local_variables_are_no_references() -> None:
    def function() -> str:
        """Speaks of sorted."""
        reversed = "sorted"
        return reversed

    assert not {"sorted", "reversed"} & referenced_names(function)


def test_a_function_without_python_code_is_refused() -> None:
    with pytest.raises(TypeError, match="built-in function len"):
        referenced_names(len)


class Steps:
    def step(self) -> None:
        self.first()
        for _ in range(3):
            self.second()
        self.third()

    def first(self) -> None: ...

    def second(self) -> None: ...

    def third(self) -> None: ...


def test_calls_come_in_the_order_of_the_code() -> None:
    assert calls_among(Steps.step, {"third", "first", "second"}) == ["first", "second", "third"]
    assert calls_among(instrument_w_nvtx(Steps.step), {"third"}) == ["third"]
