# SPDX-License-Identifier: Apache-2.0
"""A resumed fit does what the interrupted one would have done next.

What :mod:`lightning_zero3.resuming.fit_position` has written down is made up for in the first pass of Lightning's
loops, whose methods are replaced on one Trainer until they have been called once.

Upstream symbols: ``_FitLoop.reset``, ``on_advance_start`` and ``_load_combined_loader_states``;
``_TrainingEpochLoop.reset``, ``on_run_start``, ``advance``, ``on_advance_end``, ``_on_before_fetch``,
``_on_after_fetch`` and ``_skip_next_val`` (Lightning 2.6.6). Detected by tests that compare with uninterrupted runs.
Expires when Lightning's resume is exact.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero3.resuming import changed_ranks, epoch_means, fit_position, loader_position, random_states
from lightning_zero3.resuming.fit_position import Place
from lightning_zero3.substitution import substituted

# In what Lightning saves next to DeepSpeed's own states; each rank's own, in its own file.
SAVED = "lightning_zero3_fit"
# What ``seed_everything`` sets.
_SEED = "PL_GLOBAL_SEED"
# Lightning's, which knows of no loader but those with a state.
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class FitWatch:
    """Keeps what a checkpoint of one fit needs, and sees that a resume goes on there.

    Args:
        trainer: The Trainer, set up for fit.
        step_ended: Called on all ranks alike between optimizer steps, where a checkpoint may be saved.
    """

    def __init__(self, trainer: Any, step_ended: Callable[[], None]) -> None:
        self._trainer = trainer
        self._step_ended = step_ended
        self._device = trainer.strategy.root_device
        self._replaced = ExitStack()
        # Where batches are drawn ahead: loaders and random states before the last was drawn.
        self._before_fetch: dict[str, Any] | None = None
        self._fetched_any = False
        # A resumed fit's next batch is its loader's first.
        self.begins = False
        # Whether a loader whose first batch can't be told from its start draws random numbers of this process.
        self._draws = False
        self._before_batch: dict[str, Any] | None = None
        # Random states before the validation that is running.
        self._before_validation: dict[str, Any] | None = None
        # Within what follows a batch's training, which Lightning's counters don't tell from its end.
        self._batch_is_trained = False
        loop = trainer.fit_loop.epoch_loop
        self._replace(loop, "_on_before_fetch", self._fetching)
        self._replace(loop, "_on_after_fetch", self._fetched)
        self._replace(loop, "on_advance_end", self._batch_ends)

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._replaced.enter_context(substituted(owner, name, partial(replacement, getattr(owner, name))))

    def close(self) -> None:
        """Give the loops back their own methods."""
        self._replaced.close()

    def _fetching(self, before_fetch: Callable[[], None]) -> None:
        fit_loop = self._trainer.fit_loop
        fetcher = fit_loop._data_fetcher
        random = random_states.collected(self._device)
        self._fetched_any = True
        begins, self.begins = self.begins and fetcher.fetched > 0, False
        if begins:
            # A generator makes its iterator and passes over batches by now, which the uninterrupted run did long ago.
            loader_position.begin(fetcher)
            random_states.restore(random, self._device)
        if fetcher.length is None:
            self._before_fetch = {"loaders": fit_loop._combined_loader._state_dicts(), "random": random}
        # Its first batch of an epoch is another matter.
        opaque = fetcher.length is None or bool(loader_position.generators_of(fetcher))
        self._before_batch = random if opaque and fetcher.fetched > 0 and not self._draws else None
        before_fetch()

    def _fetched(self, after_fetch: Callable[[], None]) -> None:
        after_fetch()
        if self._before_batch is not None:
            self._draws = random_states.differ(self._before_batch, random_states.collected(self._device))

    def _batch_ends(self, on_advance_end: Callable[[Any], None], data_fetcher: Any) -> None:
        if self._trainer.enable_validation:
            self._before_validation = random_states.collected(self._device)
        loop = self._trainer.fit_loop.epoch_loop
        stepped = not loop._should_accumulate()
        validations = loop.val_loop.batch_progress.total.completed
        self._batch_is_trained = True
        try:
            if stepped:
                self._step_ended()
            on_advance_end(data_fetcher)
        finally:
            self._batch_is_trained = False
        # A validation may be long.
        if loop.val_loop.batch_progress.total.completed > validations and stepped:
            self._step_ended()

    def amended(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint with what a resume needs.

        Args:
            checkpoint: What Lightning saves.
        """
        trainer = self._trainer
        place = fit_position.place_of(trainer)
        if self._batch_is_trained and place is Place.BATCH_DONE:
            place = Place.BATCH_TRAINED
        random = random_states.collected(self._device)
        if place is Place.BATCH_TRAINED and trainer.validating and self._before_validation is not None:
            random = self._before_validation  # the validation is run again, from its start
        loops = checkpoint["loops"]
        if fit_position.closed_early(trainer):
            loops = fit_position.reopened(loops)
        fetched = self._before_fetch if fit_position.prefetched(trainer) else None
        if fetched is not None and fetched["loaders"]:
            loops = {**loops, "fit_loop": {**loops["fit_loop"]}}
            loops["fit_loop"]["state_dict"] = {
                **loops["fit_loop"]["state_dict"],
                "combined_loader": fetched["loaders"],
            }
        state = {
            "place": place.value,
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "position": changed_ranks.position_of(trainer),
            "random": random,
            "loader_draws": self._draws,
            "seed": os.environ.get(_SEED),
            "random_before_fetch": None if fetched is None else fetched["random"],
            "results": epoch_means.saved_state(trainer),
        }
        return {**checkpoint, "loops": loops, SAVED: state}

    def resume(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Go on from a checkpoint; before Lightning loads the loops' state.

        Args:
            checkpoint: With what :meth:`amended` has added to it, or without as stock Lightning saves it.

        Returns:
            The checkpoint, with the loops' state for this number of ranks.
        """
        state: Mapping[str, Any] | None = checkpoint.get(SAVED)
        if state is None:
            return checkpoint
        trainer = self._trainer
        if changed_ranks.are_changed(state, trainer):
            within = Place(state["place"]) in fit_position.WITHIN_EPOCH
            state, loops = changed_ranks.carried_over(state, checkpoint["loops"], trainer, within_epoch=within)
            checkpoint = {**checkpoint, "loops": loops}
        if state["loader_draws"]:
            rank_zero_warn(
                "The training loader has no length or its __iter__ is a generator, and its data set draws random "
                "numbers in this process (num_workers=0). What the resumed run's first batch draws isn't what the "
                "uninterrupted run drew. Use torchdata's StatefulDataLoader, or draw from a generator seeded by epoch "
                "and sample."
            )
        if state["seed"] != os.environ.get(_SEED):
            rank_zero_warn(
                f"This checkpoint is of a run with seed_everything({state['seed']}), this run has "
                f"{os.environ.get(_SEED)}. The order of the DistributedSampler that Lightning puts in is made of it: "
                "call seed_everything with the same seed before fit."
            )
        self.begins = Place(state["place"]) in fit_position.WITHIN_EPOCH
        _FirstPass(trainer, state, self._replaced, lambda: self._fetched_any)
        return checkpoint


class _FirstPass:
    """The first pass of the loops after a resume.

    Args:
        trainer: The Trainer.
        state: From a checkpoint.
        replaced: Where the loops' own methods are kept.
        fetched: Whether a batch was asked for since.
    """

    def __init__(
        self, trainer: Any, state: Mapping[str, Any], replaced: ExitStack, fetched: Callable[[], bool]
    ) -> None:
        self._fetched = fetched
        self._trainer = trainer
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._state = state
        self._place = Place(state["place"])
        self._replaced = replaced
        # What ends with the epoch that goes on.
        self._loader_begins_anew: Callable[[], None] | None = None
        self._loader_states: list[Any] = []
        # Random states when a new epoch's iterators have been made.
        self._after_iterators: dict[str, Any] | None = None
        self._hooks_drew = False
        once = self._once
        once(self._fit_loop, "_load_combined_loader_states", self._load_loaders)
        once(self._fit_loop, "reset", self._reset)
        once(self._epoch_loop, "reset", self._reset_epoch)
        if self._place in fit_position.WITHIN_EPOCH:
            once(self._epoch_loop, "advance", self._advance)
            once(self._fit_loop, "on_advance_end", self._end_epoch)
        else:
            once(self._fit_loop, "on_advance_start", self._start_epoch)
            once(self._epoch_loop, "on_run_start", self._run_epoch)

    def _once(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        scope = ExitStack()
        original = getattr(owner, name)

        def first_call(*arguments: Any) -> Any:
            scope.close()
            return replacement(original, *arguments)

        scope.enter_context(substituted(owner, name, first_call))
        self._replaced.callback(scope.close)

    def _restore_random(self, which: str = "random") -> None:
        if self._state[which] is not None:
            random_states.restore(self._state[which], self._trainer.strategy.root_device)

    def _load_loaders(self, load: Callable[[], None]) -> None:
        self._loader_states = list(self._fit_loop._combined_loader_states_to_load)
        load()
        within = self._place in fit_position.WITHIN_EPOCH
        batch = self._epoch_loop.batch_progress.current
        through = batch.completed if self._place is Place.ELSEWHERE else batch.processed
        self._loader_begins_anew = loader_position.go_on(
            self._fit_loop._combined_loader,
            epoch=self._fit_loop.epoch_progress.current.processed,
            batch=through if within else 0,
        )
        self._restore_random("random_before_fetch" if within else "random")

    def _reset(self, reset: Callable[[], None]) -> None:
        self._after_iterators = random_states.collected(self._trainer.strategy.root_device)
        batch = self._epoch_loop.batch_progress
        if self._place is Place.BATCH_TRAINED and batch.current.completed < batch.current.processed:
            # Or Lightning passes over what is left of the batch, and of the epoch after its last one.
            batch.increment_completed()
        if self._place in (Place.EPOCH_ENDING, Place.EPOCH_DONE):
            # With max_steps Lightning would go through the epoch's end once more.
            self._fit_loop._restarting = False
            self._epoch_loop.restarting = False
        elif self._place is Place.EPOCH_STARTING:
            self._epoch_loop.restarting = False
        if self._place is Place.EPOCH_ENDING:
            epoch_means.restore_monitored(self._state["results"], self._trainer)
            self._epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        reset()

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)  # ours says more, where it is true
            reset()

    def _start_epoch(self, on_advance_start: Callable[[], None]) -> None:
        epoch_means.restore_monitored(self._state["results"], self._trainer)
        self._restore_random()
        on_advance_start()
        if self._state["random"] is None or self._after_iterators is None:
            return
        # Lightning has made the iterators already, before the hooks; the uninterrupted run makes them now.
        device = self._trainer.strategy.root_device
        self._hooks_drew = random_states.differ(self._state["random"], random_states.collected(device))
        if not self._hooks_drew:
            random_states.restore(self._after_iterators, device)

    def _run_epoch(self, on_run_start: Callable[[Any], None], data_fetcher: Any) -> None:
        if self._hooks_drew and self._fit_loop._combined_loader._state_dicts():
            rank_zero_warn(
                "A hook of an epoch's start draws random numbers, and the training loader has a state, which its first "
                "iterator has used up: this epoch's random numbers aren't the uninterrupted run's. Draw in "
                "on_train_batch_start, or from a generator of your own."
            )
        elif self._hooks_drew:
            iter(data_fetcher)  # with other random numbers than the first
        on_run_start(data_fetcher)

    def _end_epoch(self, on_advance_end: Callable[[], None]) -> None:
        if self._loader_begins_anew is not None:
            self._loader_begins_anew()
        if self._loader_states and self._fit_loop._data_fetcher.length is None and not self._fetched():
            # Lightning has drawn a batch ahead, for an epoch of which none was left.
            self._fit_loop._combined_loader._load_state_dicts(self._loader_states)
        on_advance_end()

    def _advance(self, advance: Callable[[Any], None], data_fetcher: Any) -> None:
        epoch_means.restore_monitored(self._state["results"], self._trainer)
        epoch_means.restore_epoch(self._state["results"], self._trainer)
        self._restore_random()
        # Or a plateau scheduler would not be asked at the epoch's end.
        self._fit_loop._restarting = False
        if self._place is Place.ELSEWHERE:
            advance(data_fetcher)
            return
        self._epoch_loop.val_loop.restarting = False
        if self._place is Place.BATCH_DONE:
            self._epoch_loop._restarting = False
            if self._epoch_loop._num_ready_batches_reached():
                raise StopIteration  # as a loader that has no more; the epoch's end comes next
            advance(data_fetcher)
            return
        # Nothing to train on: what follows a batch comes next.
        self._epoch_loop._skip_next_val = self._place is Place.BATCH_VALIDATED
