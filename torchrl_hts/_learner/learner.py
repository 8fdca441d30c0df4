"""The learner's side of the schedule: which round is lent, and which parameters each slot holds."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_hts._executor.messages import Start
from torchrl_hts._learner.packing import pack, to_bytes, to_tensor, unpack
from torchrl_hts._learner.weights import WeightSource
from torchrl_hts._rounds.event_rings import Activity, Record
from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts._rounds.slots import Slots, policy_tensors
from torchrl_hts._supervision.supervisor import Seeds, Supervisor
from torchrl_hts.errors.checks import check_integer

__all__ = ["LearnerSide"]

_ENDED = "this collector has been shut down; make a new one to go on"


@dataclass(frozen=True)
class _Beginning:
    """What a run starts from.

    Attributes:
        batches: the batches, packed, of the rounds that are full already.
        environments: the state of each unit after them; None for new episodes.
        why_lost: why there are new episodes although some were under way; else "".
    """

    batches: tuple[dict[str, Tensor], ...] = ()
    environments: list[bytes] | None = None
    why_lost: str = ""


class LearnerSide:
    """Lends the rounds of a run in order, and opens the next with the newest parameters.

    Args:
        supervisor: of workers that are ready.
        schedule: the schedule, over shared words.
        slots: the slots, over shared memory.
        weights: the newest parameters.
        seed: of environments and noise.
        record: takes down when it learned and waited; None: nobody asks.
        first_env: the number of environment 0 among the environments of all learners.
        units: how many environments each unit of the schedule has; (): one each.

    Attributes:
        round: the round that is lent next.
        lent: whether the learner holds the batch of the round before.
        waited_s: seconds that it has waited for rounds to be full.
        began: when the first round was started, in seconds of the monotonic clock; 0.0: not yet.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        schedule: Schedule,
        slots: Slots,
        weights: WeightSource,
        seed: int,
        record: Record | None = None,
        first_env: int = 0,
        units: Sequence[int] = (),
    ) -> None:
        self._first_env = first_env
        sizes = units or [1] * schedule.num_envs
        ends = accumulate(sizes)
        self._envs = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._supervisor = supervisor
        self._schedule = schedule
        self._slots = slots
        self._weights = weights
        self.seed = seed
        self.static_seed = False
        self.round = 0
        self.lent = False
        self.waited_s = 0.0
        self.began = 0.0
        self._record = record
        self._lent_at = 0  # in nanoseconds of the clock of records
        self._running = False
        self._beginning = _Beginning()
        # What the slots are to hold when the workers are set to work: the parameters by round, the
        # newest ones for a round that isn't there; None leaves the slots as they are.
        self._ring: dict[int, list[Tensor]] | None = {}

    @property
    def policy_version(self) -> int:
        """Index of the newest parameters that a round may act with."""
        return self.round - self.lent + self._schedule.lag

    def stage(self, weights: nn.Module | TensorDictBase | Mapping[str, Any] | None) -> None:
        """Choose the parameters of the rounds that open from now on; see `WeightSource.stage`."""
        self._weights.stage(weights)

    def next_round(self) -> tuple[int, TensorDict]:
        """Say that the update with the lent batch is done, and wait for the next round.

        Returns:
            The round and its slot, the learner's until the next call (I5).
        """
        self._refuse_ended()
        with self._ending_on_failure():
            if not self._running:
                self._run()
            if self.lent:
                # I2, I3: this slot is closed; its parameters become theta_{j+lag+1}.
                self._slots.write_parameters(
                    self._schedule.slot(self.round - 1), self._weights.for_next_round()
                )
                self.lent = False
                if self._record is not None:  # before anybody can act on it
                    now = time.perf_counter_ns()
                    self._record(Activity.LEARN, self._lent_at, now, self.round - 1)
                self._supervisor.open_round()
            asleep = time.perf_counter_ns()
            self._supervisor.wait_for_round(self.round)
            self._lent_at = time.perf_counter_ns()
            self.waited_s += (self._lent_at - asleep) / 1e9
            if self._record is not None:
                self._record(Activity.BATCH_WAIT, asleep, self._lent_at, self.round)
            round_ = self._schedule.lend()
        self.lent = True
        self.round = round_ + 1
        return round_, self._slots.batches[self._schedule.slot(round_)]

    def _refuse_ended(self) -> None:
        if self._supervisor.workers.is_closed():
            raise RuntimeError(_ENDED)

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """Shut down if a worker fails, or on Ctrl-C: the run can't go on."""
        try:
            yield
        except BaseException as error:
            was_closed = (
                self._supervisor.workers.is_closed()
            )  # by another thread, or a signal handler
            self._supervisor.workers.shutdown()
            if was_closed and isinstance(error, Exception):
                raise RuntimeError(_ENDED) from error
            raise

    def _run(self) -> None:
        """Set the workers to work, from the beginning that was loaded or with new episodes."""
        if self._ring is not None:
            newest = self._weights.for_next_round()
            for round_ in range(self.round, self.round + self._schedule.num_slots):
                self._slots.write_parameters(
                    self._schedule.slot(round_), self._ring.get(round_, newest)
                )
            self._ring = None
        begin, self._beginning = self._beginning, _Beginning()
        ahead = len(begin.batches)
        # Not `self`, which the supervisor must not hold.
        seed, static, first_env, envs = self.seed, self.static_seed, self._first_env, self._envs

        def seed_of(unit: int, round_: int, restarts: int = 0) -> int | tuple[int, ...]:
            numbers = [0 if static else first_env + env for env in envs[unit]]
            seeds = [environment_seed(seed, number, round_, restarts) for number in numbers]
            return seeds[0] if len(seeds) == 1 else tuple(seeds)

        seeds = [seed_of(unit, self.round + ahead) for unit in range(len(envs))]
        if not self.began:
            self.began = time.monotonic()
        self._running = True
        starts: Sequence[Start] = begin.environments or seeds
        self._supervisor.run(starts, Seeds(seed, seed_of), self.round, lent=self.lent, ahead=ahead)

    def begin_anew(self, seed: int | None = None, static_seed: bool = False) -> None:
        """Begin new episodes with the next round, from another seed if there is one.

        Raises:
            RuntimeError: if the workers have been shut down.
        """
        self._refuse_ended()
        if seed is not None:
            self.seed, self.static_seed = seed, static_seed
        self.rest()

    def rest(self) -> None:
        """Bring the workers to rest; what they have collected beyond the lent batch is dropped."""
        if self._running and not self._supervisor.workers.is_closed():
            with self._ending_on_failure():
                self._supervisor.stop()
        self._running = False
        self._beginning = _Beginning()

    def _finish_open_rounds(self) -> _Beginning:
        """Wait until all that is open is full, and return it with the environments after it.

        The round after those opens only when the learner comes back, so that every environment
        is at the same boundary.
        """
        if not self._running:
            return self._beginning
        if self._supervisor.workers.is_closed():
            return _Beginning(why_lost="the collector had been shut down")
        end = self.round
        while self._schedule.is_open(end):
            end += 1
        with self._ending_on_failure():
            self._supervisor.wait_for_round(end - 1)
            saved = self._supervisor.save()
        slots = [self._slots.fields[self._schedule.slot(r)] for r in range(self.round, end)]
        batches = tuple(pack(slot) for slot in slots)
        if isinstance(saved, str):
            return _Beginning(batches, None, saved)
        return _Beginning(batches, saved)

    def steps_ahead(self, env: int) -> TensorDictBase:
        """The steps of an environment that no batch has had; see `HTSCollector.steps_ahead`."""
        check_integer("env", env, least=0, most=self._envs[-1].stop - 1)
        unit = next(number for number, envs in enumerate(self._envs) if env in envs)
        last, step = self._schedule.position(unit)
        rows = []
        for round_ in range(self.round, last + self._schedule.is_open(last)):
            row = self._slots.batches[self._schedule.slot(round_)][env]
            rows.append(row[: step + 1] if round_ == last else row)
        if not rows:
            return self._slots.batches[0][env, :0].clone()
        return torch.cat(rows)

    def state_dict(self) -> dict[str, Any]:
        """All that the coming rounds depend on, as tensors and plain values.

        Waits for the rounds under way, at most ``lag`` of them.
        """
        begin = self._finish_open_rounds()
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
            "staged_parameters": self._weights.state_dict(),
            "collected": list(begin.batches),
            "environments": begin.environments and [to_tensor(s) for s in begin.environments],
            "why_environments_are_lost": begin.why_lost,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the state's round; the update with the batch before it counts as done.

        The state has been checked (see `check_state`).
        """
        names = [name for name, _ in policy_tensors(self._weights.policy)]
        batches = [unpack(batch, self._slots.fields[0]) for batch in state["collected"]]
        last = self._schedule.last_round
        if state["why_environments_are_lost"] and (last is None or state["round"] < last):
            warnings.warn(
                "the environments begin new episodes, with seeds that depend on the seed, the "
                "environment and the round alone: their states could not be saved "
                f"({state['why_environments_are_lost']})",
                stacklevel=3,
            )
        self.rest()
        self.round, self.lent = state["round"], False
        self.seed, self.static_seed = state["seed"], state["static_seed"]
        self._ring = {
            round_: [values[name] for name in names]
            for round_, values in state["behaviour_parameters"].items()
        }
        self._weights.load_state_dict(state["staged_parameters"])
        for round_, batch in enumerate(batches, self.round):
            for key, value in self._slots.fields[self._schedule.slot(round_)].items():
                value.copy_(batch[key])
        environments = state["environments"]
        self._beginning = _Beginning(
            tuple(state["collected"]),
            environments and [to_bytes(saved) for saved in environments],
            state["why_environments_are_lost"],
        )


def environment_seed(seed: int, env: int, round_: int, restarts: int = 0) -> int:
    """A 32-bit seed for an environment, from these numbers alone (I7).

    Args:
        seed: of the collector.
        env: index of the environment.
        round_: in which it is reset.
        restarts: how often its executor has been replaced.

    Example:
        >>> environment_seed(0, 0, 0) == environment_seed(0, 0, 0) != environment_seed(0, 1, 0)
        True
        >>> environment_seed(0, 0, 3) != environment_seed(0, 0, 3, restarts=1)
        True
    """
    numbers = [seed, env, round_, *([restarts] if restarts else [])]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
