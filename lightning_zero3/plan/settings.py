# SPDX-License-Identifier: Apache-2.0
"""What run is planned: typed, and checked where it is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from lightning_zero3.config import SetupError
from lightning_zero3.topology import Topology

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
Optimizer = Literal["deepspeed", "torch"]
# Beyond any cluster; ranks are listed one by one by DeepSpeed.
_MOST_RANKS = 65_536
# What an element's index, and a buffer's size, must fit into.
_MOST = 2**48
# What a recipe's settings have under the same names.
_OF_A_RECIPE = (
    "expert_parallel_size",
    "expert_parallel_preset",
    "tensor_parallel_size",
    "precision",
    "bf16_masters",
    "sequence_length",
    "micro_batch_size",
    "recompute_activations",
    "loss_tiles",
    "optimizer",
    "sub_group_size",
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run to be planned.

    Args:
        recipe: Name of a recipe; its full size is planned.
        model: Folder with a Hugging Face ``config.json``. One of ``recipe`` and ``model`` is given.
        layers: Keep the first so many layers only; None keeps all.
        nodes: Nodes.
        devices: Ranks (GPUs) of each node.
        expert_parallel_size: Ranks that share one set of experts; None leaves the model's MoE layers as they are.
        expert_parallel_preset: As the strategy's.
        tensor_parallel_size: Ranks that share each layer; 1 leaves layers whole.
        precision: The Trainer's.
        bf16_masters: Masters and optimizer states in bf16, as the report on MiniMax-M3 has them
            (``bf16_master_weights_and_grads`` and ``bf16_optimizer_states``); only with a bf16 precision.
        sequence_length: Tokens of one sample.
        micro_batch_size: Samples of one micro-step on one data-parallel rank.
        recompute_activations: Whether layers are computed again in backward.
        loss_tiles: Pieces in which logits and loss are computed; 1 is Transformers' own loss, with all logits at once.
        block_sparse_kernel: Whether MiniMax-M3's sparse attention is a kernel's, which needs no mask of all pairs of
            tokens; Transformers' own makes one.
        offload_optimizer: Whether masters and states live on the host.
        offload_parameters: Whether weight partitions live on the host.
        optimizer: ``deepspeed``: AdamW named in the DeepSpeed config, whose groups of experts AutoEP's cap cuts;
            ``torch``: one that the module's ``configure_optimizers`` makes, with one group.
        sub_group_size: Elements of a rank's share after which a sub-group ends; DeepSpeed's default.
        reduce_bucket_size: DeepSpeed's, in elements.
        persistence_threshold: Parameters of fewer elements stay gathered (``stage3_param_persistence_threshold``).
        max_group_size: Cap in place of AutoEP's 178,956,971 elements of a group of experts; 0 is no cap; None leaves
            it as it is. Only ever for the plan.
        zero_init: Whether the model is built in ``configure_model``, under ``deepspeed.zero.Init``.
        rank: Whose view is planned.

    Raises:
        SetupError: A value that can't be, with what is allowed.
    """

    recipe: str | None = None
    model: str | None = None
    layers: int | None = None
    nodes: int = 1
    devices: int = 8
    expert_parallel_size: int | None = None
    expert_parallel_preset: str | None = None
    tensor_parallel_size: int = 1
    precision: Precision = "bf16-mixed"
    bf16_masters: bool = False
    sequence_length: int = 8192
    micro_batch_size: int = 1
    recompute_activations: bool = True
    loss_tiles: int = 1
    block_sparse_kernel: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    optimizer: Optimizer = "deepspeed"
    sub_group_size: int = 10**9
    reduce_bucket_size: int = 500_000_000
    persistence_threshold: int = 100_000
    max_group_size: int | None = None
    zero_init: bool = True
    rank: int = 0

    def __post_init__(self) -> None:
        """Check types, ranges and what goes together."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        if (self.recipe is None) == (self.model is None):
            raise SetupError("A plan is of one model: pass --recipe NAME or --model DIR, one of them.")
        for name in (
            "layers",
            "nodes",
            "devices",
            "expert_parallel_size",
            "tensor_parallel_size",
            "sequence_length",
            "micro_batch_size",
            "loss_tiles",
            "sub_group_size",
            "reduce_bucket_size",
        ):
            _check_range(name, getattr(self, name), least=1)
        for name in ("persistence_threshold", "max_group_size", "rank"):
            _check_range(name, getattr(self, name), least=0)
        if self.world_size > _MOST_RANKS:
            raise SetupError(
                f"--nodes {self.nodes} × --devices {self.devices} are {self.world_size:,} ranks; at most "
                f"{_MOST_RANKS:,} can be planned."
            )
        if self.rank >= self.world_size:
            raise SetupError(f"--rank {self.rank}: the ranks of this run are 0 to {self.world_size - 1}.")
        if self.bf16_masters and self.precision == "32-true":
            raise SetupError('--bf16_masters needs --precision bf16-mixed or bf16-true; with "32-true" all is fp32.')
        if self.expert_parallel_preset is not None and self.expert_parallel_size is None:
            raise SetupError("--expert_parallel_preset has no effect without --expert_parallel_size.")
        _ = self.topology  # sizes that don't divide

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.nodes * self.devices

    @property
    def topology(self) -> Topology:
        """Which ranks share what."""
        return Topology(
            world_size=self.world_size,
            expert_parallel_size=self.expert_parallel_size or 1,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    @property
    def offloads(self) -> bool:
        """Whether anything of a rank's lives on the host."""
        return self.offload_optimizer or self.offload_parameters

    @property
    def tokens_per_micro_step(self) -> int:
        """Tokens that one rank sees at once."""
        return self.sequence_length * self.micro_batch_size

    def to_json(self) -> dict[str, Any]:
        """All of it as what JSON knows."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Setup:
        """What :meth:`to_json` has written."""
        return cls(**data)


def said_by(settings: Any) -> dict[str, Any]:
    """What a recipe's settings say of a setup, as fields of one; what they leave open isn't among them.

    Args:
        settings: The recipe's.
    """
    said = {name: getattr(settings, name) for name in _OF_A_RECIPE}
    return {name: value for name, value in said.items() if value is not None}


def _check_type(name: str, value: Any, expected: Any) -> None:
    choices = get_args(expected)
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise SetupError(f"--{name} {value!r}: one of {', '.join(choices)}.")
        return
    allowed = choices or (expected,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in allowed)
        raise SetupError(f"--{name} {value!r}: {names} is expected.")


def _check_range(name: str, value: int | None, *, least: int) -> None:
    if value is not None and not least <= value <= _MOST:
        raise SetupError(f"--{name} {value}: a whole number from {least} to {_MOST:,}.")
