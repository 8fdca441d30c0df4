"""The learner's side of the schedule: which round is lent, and which parameters each slot holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from torchrl_hts.crew import Crew
from torchrl_hts.schedule import Schedule
from torchrl_hts.slots import Slots, policy_tensors
from torchrl_hts.weights import WeightSource

__all__ = ["LearnerSide"]

_ENDED = "this collector has been shut down; make a new one to go on"


class LearnerSide:
    """Lends the rounds of a run in order, and opens the next with the newest parameters.

    Args:
        crew: the workers, calibrated.
        schedule: the schedule, over shared words.
        slots: the slots, over shared memory.
        weights: the newest parameters.
        seed: of environments and noise.

    Attributes:
        round: the round that is lent next.
        lent: whether the learner holds the batch of the round before.
        waited_s: seconds that it has waited for rounds to be full.
        began: when the first round was started, in seconds of the monotonic clock; 0.0: not yet.
    """

    def __init__(
        self, crew: Crew, schedule: Schedule, slots: Slots, weights: WeightSource, seed: int
    ) -> None:
        self._crew = crew
        self._schedule = schedule
        self._slots = slots
        self._weights = weights
        self.seed = seed
        self.static_seed = False
        self.round = 0
        self.lent = False
        self.waited_s = 0.0
        self.began = 0.0
        self._running = False
        # What the slots are to hold when the workers are set to work: the parameters by round, the
        # newest ones for a round that isn't there; None leaves the slots as they are.
        self._ring: dict[int, list[Tensor]] | None = {}

    @property
    def policy_version(self) -> int:
        """Index of the newest parameters that a round may act with."""
        return self.round - self.lent + self._schedule.lag

    def next_round(self) -> tuple[int, TensorDict]:
        """Say that the update with the lent batch is done, and wait for the next round.

        Returns:
            The round and its slot, the learner's until the next call (I5).
        """
        if self._crew.is_closed():
            raise RuntimeError(_ENDED)
        try:
            if not self._running:
                self._run()
            if self.lent:
                # I2, I3: this slot is closed; its parameters become theta_{j+lag+1}.
                self._slots.stage(self._schedule.slot(self.round - 1), self._weights.take())
                self.lent = False
                self._crew.release()
            asleep = time.monotonic()
            self._crew.wait_full(self.round)
            self.waited_s += time.monotonic() - asleep
            round_ = self._crew.port.lend()
        except BaseException as error:  # a worker has failed, or Ctrl-C: the run can't go on
            if self._crew.is_closed() and isinstance(error, Exception):  # by another thread
                raise RuntimeError(_ENDED) from error
            self._crew.shutdown(5.0)
            raise
        self.lent = True
        self.round = round_ + 1
        return round_, self._slots.batches[self._schedule.slot(round_)]

    def _run(self) -> None:
        """Set the workers to work on the present round, with reset environments."""
        if self._ring is not None:
            newest = self._weights.take()
            for round_ in range(self.round, self.round + self._schedule.num_slots):
                self._slots.stage(self._schedule.slot(round_), self._ring.get(round_, newest))
            self._ring = None
        envs = range(self._schedule.num_envs)
        seeds = [
            environment_seed(self.seed, 0 if self.static_seed else env, self.round) for env in envs
        ]
        if not self.began:
            self.began = time.monotonic()
        self._running = True
        self._crew.run(seeds, self.seed, self.round, self.lent)

    def rest(self) -> None:
        """Bring the workers to rest; what they have collected beyond the lent batch is dropped."""
        if self._running and not self._crew.is_closed():
            try:
                self._crew.stop()
            except BaseException:  # a worker has failed, or Ctrl-C
                self._crew.shutdown(5.0)
                raise
        self._running = False

    def state_dict(self) -> dict[str, Any]:
        """The round, the seed, and the parameters of the rounds under way, by name."""
        ring = dict(self._ring or {})
        if self._ring is None:
            for round_ in range(self.round, self.round + self._schedule.num_slots - self.lent):
                values = self._slots.parameters[self._schedule.slot(round_)]
                ring[round_] = [value.clone() for value in values]
        names = [name for name, _ in policy_tensors(self._weights.policy)]
        return {
            "round": self.round,
            "seed": self.seed,
            "static_seed": self.static_seed,
            "behaviour_parameters": {
                round_: dict(zip(names, values, strict=True)) for round_, values in ring.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the state's round; the update with the batch before it counts as done."""
        self.rest()
        self.round, self.lent = state["round"], False
        self.seed, self.static_seed = state["seed"], state["static_seed"]
        self._ring = {
            round_: list(values.values())
            for round_, values in state["behaviour_parameters"].items()
        }


def environment_seed(seed: int, env: int, first_round: int) -> int:
    """A 32-bit seed for an environment, from these numbers alone (I7).

    Example:
        >>> environment_seed(0, 0, 0) == environment_seed(0, 0, 0) != environment_seed(0, 1, 0)
        True
    """
    return int(np.random.SeedSequence([seed, env, first_round]).generate_state(1)[0])
