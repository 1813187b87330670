# SPDX-License-Identifier: Apache-2.0
"""Who sits where: integer arithmetic over ranks. No process group is made or asked here.

The layout is DeepSpeed's (``deepspeed/utils/groups.py``, ``_get_expert_parallel_ranks``; with tensor parallelism
``deepspeed/module_inject/auto_ep_folding.py``): consecutive ranks form an expert-parallel group and share one set of
experts; ranks with the same position in their groups hold the same experts and form an expert-data-parallel group.
Consecutive ranks also form a tensor-parallel group, which shares each layer and sees the same data; ranks with the same
position in theirs hold the same slices, see different data and form a data-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero3.config import SetupError


@dataclass(frozen=True)
class Topology:
    """The parallel layout of a run.

    Args:
        world_size: Number of ranks.
        expert_parallel_size: Ranks that share one set of experts; 1 without expert parallelism.
        tensor_parallel_size: Ranks that share each layer; 1 without tensor parallelism.

    Raises:
        SetupError: A size is below 1 or doesn't divide the world.

    >>> layout = Topology(world_size=8, expert_parallel_size=4)
    >>> layout.expert_parallel_ranks(5), layout.expert_data_parallel_ranks(5)
    ((4, 5, 6, 7), (1, 5))
    >>> layout = Topology(world_size=8, tensor_parallel_size=2)
    >>> layout.tensor_parallel_ranks(5), layout.data_parallel_ranks(5), layout.data_parallel_rank(5)
    ((4, 5), (1, 3, 5, 7), 2)
    >>> Topology(world_size=6, expert_parallel_size=4)
    Traceback (most recent call last):
    ...
    lightning_zero3.config.SetupError: expert_parallel_size=4 doesn't divide the 6 ranks of this run. \
Sizes that do: 1, 2, 3, 6.
    """

    world_size: int
    expert_parallel_size: int = 1
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Refuse a size that is none, or that doesn't divide the world."""
        for name in ("expert_parallel_size", "tensor_parallel_size"):
            size = getattr(self, name)
            if size < 1:
                raise SetupError(f"{name}={size}: a whole number of ranks, 1 or more.")
            if self.world_size % size:
                raise SetupError(
                    f"{name}={size} doesn't divide the {self.world_size} ranks of this run. Sizes that do: "
                    f"{_listed(divisors(self.world_size))}."
                )

    @property
    def data_parallel_size(self) -> int:
        """How many different batches the ranks see at once."""
        return self.world_size // self.tensor_parallel_size

    def data_parallel_rank(self, rank: int) -> int:
        """Which of these batches ``rank`` sees."""
        return rank // self.tensor_parallel_size

    def tensor_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that share each layer with ``rank``, in order."""
        first = rank - rank % self.tensor_parallel_size
        return tuple(range(first, first + self.tensor_parallel_size))

    def data_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same slices of layers as ``rank``, in order."""
        return tuple(range(rank % self.tensor_parallel_size, self.world_size, self.tensor_parallel_size))

    def expert_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that share one set of experts with ``rank``, in order."""
        first = rank - rank % self.expert_parallel_size
        return tuple(range(first, first + self.expert_parallel_size))

    def expert_data_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same experts as ``rank``, in order."""
        return tuple(range(rank % self.expert_parallel_size, self.world_size, self.expert_parallel_size))

    def require_experts_divide(self, num_experts: int, layer: str) -> None:
        """Check that each rank of an expert-parallel group can hold the same number of experts.

        Args:
            num_experts: Routed experts of one MoE layer.
            layer: What the message calls it.

        Raises:
            SetupError: The size doesn't divide the number of experts.
        """
        if num_experts % self.expert_parallel_size:
            both = [d for d in divisors(num_experts) if self.world_size % d == 0]
            raise SetupError(
                f"expert_parallel_size={self.expert_parallel_size} doesn't divide the {num_experts} experts of {layer}."
                f" Sizes that divide both the experts and the {self.world_size} ranks: {_listed(both)}."
            )

    def require_divides(self, number: int, what: str) -> None:
        """Check that each rank of a tensor-parallel group can hold as much of something.

        Args:
            number: How many there are.
            what: What the message calls them.

        Raises:
            SetupError: The tensor parallel size doesn't divide their number.
        """
        if number % self.tensor_parallel_size:
            both = [d for d in divisors(number) if self.world_size % d == 0]
            raise SetupError(
                f"tensor_parallel_size={self.tensor_parallel_size} doesn't divide {what}: {number}. Sizes that divide "
                f"both that and the {self.world_size} ranks: {_listed(both)}."
            )


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
