# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel peers see the same batches, data-parallel ranks different ones: Lightning's hooks about that.

Peers hold slices of the same layers and add up what each makes of its batch; with different batches the sum means
nothing, and nothing fails. So Lightning's samplers and workers count data-parallel ranks instead of ranks, and the
first batch of each loader is compared: a sampler or an iterable data set of the user's that shards by the global rank
is found before anything is computed from it. What follows the first batch isn't looked at, nor is a ``training_step``
that takes the iterator itself (``dataloader_iter``).
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.listing import shortened
from lightning_zero3.topology import Topology
from lightning_zero3.trainer_mixin import TrainerMixin

# Tensors of a batch, and groups of ranks, that a message names.
_NAMED = 8


class PeerBatchesError(RuntimeError):
    """Tensor-parallel peers have different batches."""


class PeerBatchesStrategy(TrainerMixin):
    """Mixin over a Trainer's ``DeepSpeedStrategy``: data for tensor parallelism; without it, Lightning's own."""

    # Loaders whose first batch has been compared in this fit: the stage's word and the loader's index.
    _compared: frozenset[tuple[str, int]] = frozenset()

    if TYPE_CHECKING:

        @property
        def parallel_layout(self) -> Topology: ...  # noqa: D102  (EngineSetup's)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by the shard that they read, where ``seed_everything(..., workers=True)`` asks for it.

        Lightning does so by the global rank, after this hook and only where nothing is set, so peers' workers would
        augment the same samples differently.

        Args:
            dataloader: A loader with the sampler that it is used with.
        """
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", False) is None:
            shard = self.distributed_sampler_kwargs["rank"]
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=shard)  # type: ignore[attr-defined]
        return super().process_dataloader(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As Lightning's; the first batch of each loader is compared over ranks as the model will see it.

        Args:
            batch: A batch.
            device: As Lightning's.
            dataloader_idx: Its loader's index.

        Raises:
            PeerBatchesError: Tensor-parallel peers have different ones.
        """
        batch = super().batch_to_device(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        prefix = trainer.state.stage.dataloader_prefix if trainer.state.stage is not None else None
        if prefix is not None and (prefix, dataloader_idx) not in self._compared:
            self._compared |= {(prefix, dataloader_idx)}
            if self.parallel_layout.tensor_parallel_size > 1:
                # With overfit_batches Lightning gives all ranks the same.
                warn = trainer.training and not trainer.overfit_batches  # type: ignore[attr-defined]
                compare(batch, self.parallel_layout, f"{prefix} batch of loader {dataloader_idx}", warn)
        return batch

    def teardown(self) -> None:
        """As Lightning's; the next fit has other loaders."""
        self._compared = frozenset()
        super().teardown()


def fingerprint(batch: Any) -> tuple[str, str]:
    """What tells one batch from another: of each tensor, in order, dtype, shape and bits.

    Args:
        batch: Tensors in dicts, lists, tuples and dataclasses; anything else in there is passed over.

    Returns:
        The first tensors' dtypes and shapes in words, and a hash of all.

    >>> words, first = fingerprint({"ids": torch.zeros(2, 3), "rest": (torch.ones(1, dtype=torch.bool), "text")})
    >>> words
    'float32 (2, 3), bool (1,)'
    >>> first == fingerprint([torch.zeros(2, 3), torch.ones(1, dtype=torch.bool)])[1]
    True
    >>> first == fingerprint([torch.zeros(2, 3), torch.zeros(1, dtype=torch.bool)])[1]
    False
    """
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    apply_to_collection(batch, torch.Tensor, note, allow_frozen=True)
    words, bits = [], hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        # Sparse and nested tensors have no bits of their own that are alike wherever the values are.
        plain = tensor.layout is torch.strided and not tensor.is_nested
        words.append(f"{dtype} {tuple(tensor.shape)}" if plain else f"{dtype} {tensor.layout}")
        bits.update(words[-1].encode())
        if plain:
            bits.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return shortened(words, _NAMED) or "no tensors", bits.hexdigest()


def compare_first_inputs(model: torch.nn.Module, layout: Topology) -> None:
    """Compare what a module is first called with, where there are tensor-parallel peers.

    Args:
        model: The root module.
        layout: The run's layout.
    """
    if layout.tensor_parallel_size == 1:
        return

    def look(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hook.remove()
        compare((args, kwargs), layout, "inputs of the model")

    hook = model.register_forward_pre_hook(look, prepend=True, with_kwargs=True)


def compare(batch: Any, layout: Topology, what: str, warn: bool = False) -> None:
    """Compare a batch over all ranks; a collective, after which all ranks know and none waits for another.

    Args:
        batch: This rank's.
        layout: The run's layout.
        what: What the message calls it, after "the first".
        warn: Whether data-parallel ranks that all have the same batch are worth a warning.

    Raises:
        PeerBatchesError: Tensor-parallel peers have different ones.
    """
    seen: list[Any] = [None] * layout.world_size
    torch.distributed.all_gather_object(seen, fingerprint(batch))
    groups = sorted({layout.tensor_parallel_ranks(rank) for rank in range(layout.world_size)})
    differ = [group for group in groups if len({seen[rank] for rank in group}) > 1]
    if differ:
        named = "; ".join(_difference(group, seen) for group in differ[:_NAMED])
        raise PeerBatchesError(
            f"The first {what} isn't the same on tensor-parallel peers, which share each "
            f"layer: {named}{'; …' if len(differ) > _NAMED else ''}. {_remedy(layout)}"
        )
    if warn and len(groups) > 1 and len({seen[group[0]] for group in groups}) == 1:
        rank_zero_warn(
            f"All {len(groups)} data-parallel ranks have the same first {what}. Only tensor-parallel peers "
            f"should. {_remedy(layout)}"
        )


def _difference(group: tuple[int, ...], seen: list[Any]) -> str:
    ranks = ", ".join(map(str, group))
    if len({words for words, _ in (seen[rank] for rank in group)}) > 1:
        return f"ranks {ranks} have " + " | ".join(f"{seen[rank][0]} (rank {rank})" for rank in group)
    return f"ranks {ranks} have different values in {seen[group[0]][0]}"


def _remedy(layout: Topology) -> str:
    size, replicas = layout.tensor_parallel_size, layout.data_parallel_size
    return (
        f"Shard by num_replicas={replicas}, rank=trainer.global_rank // {size}, in samplers "
        "(DistributedSampler(data, num_replicas=..., rank=...)) as in iterable data sets, and seed what draws random "
        "numbers (shuffling, augmentation) alike on peers. Lightning's own sampler does so: it is added where you give "
        "none, without stock_semantics=True."
    )
