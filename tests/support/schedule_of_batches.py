"""The slow reference of the schedule where units are batches of environments."""

from __future__ import annotations

from typing import Any

from schedule_reference import OBSERVATION, Batch, Event, World, expected_batch

from torchrl_hts._rounds.schedule import Schedule


class WorldOfBatches(World):
    """The same, where what the schedule moves are batches of environments that step as a whole.

    A row of a batch is run by itself: a pass of an actor may end in the middle of a batch.

    Args:
        schedule: in its initial state.
        sizes: how many environments each batch has.
        num_actors: how many actors `enabled` reckons with.
    """

    def __init__(self, schedule: Schedule, sizes: tuple[int, ...], num_actors: int = 1) -> None:
        super().__init__(schedule, num_actors)
        self.sizes = sizes

    def legal(self, event: Event) -> bool:
        if event[0] == "infer":
            return type(self.holder[event[1]]) is int and OBSERVATION in self._written(event[1])
        return super().legal(event)

    def enabled(self) -> list[Event]:
        """An actor runs the rows that it has taken one by one, and then answers their batch."""
        events = [event for event in super().enabled() if event[0] != "answer"]
        for unit in range(self.num_envs):
            if type(self.holder[unit]) is int:
                left = OBSERVATION in self._written(unit)
                events.append(("infer", unit) if left else ("answer", (unit,)))
        return events

    def rows_run(self) -> int:
        held = [unit for unit in range(self.num_envs) if type(self.holder[unit]) is int]
        return sum(row != OBSERVATION for unit in held for row in self._written(unit))

    def _written(self, unit: int) -> tuple[Any, ...]:
        written: tuple[Any, ...] = self.rows[self._place(unit)[1]]
        return written

    def _offer(self, env: int) -> None:
        super()._offer(env)
        self.rows[self._place(env)[1]] = (OBSERVATION,) * self.sizes[env]

    def _infer(self, unit: int) -> None:
        slot, row = self._place(unit)
        assert self.parameters[slot] == self.reading[unit], "I2: changed between two passes"
        assert self.parameters[slot][0] == self.round(unit), "I2: not this round's parameters"
        written = list(self.rows[row])
        at = written.index(OBSERVATION)
        env = sum(self.sizes[:unit]) + at
        written[at] = (env, self.done[unit], *self.parameters[slot])
        self.rows[row] = tuple(written)

    def _answer(self, envs: tuple[int, ...]) -> None:
        for unit in envs:
            assert OBSERVATION not in self._written(unit), "I1: answered before its last row"
            self.holder[unit] = "answered"
        self.schedule.answer(envs)

    def _recover(self, lost: tuple[int, ...]) -> None:
        """What an actor had run of a batch is run again by the next."""
        super()._recover(lost)
        for unit in range(self.num_envs):
            if self.holder[unit] == "ready":
                self.rows[self._place(unit)[1]] = (OBSERVATION,) * self.sizes[unit]

    def _read(self, round_: int) -> Batch:
        """Rows of all environments, ``[N, T]``."""
        units = super()._read(round_)
        return tuple(
            tuple(step[index] if step else step for step in unit)
            for unit, size in zip(units, self.sizes, strict=True)
            for index in range(size)
        )

    def _expected(self, round_: int, value: int) -> Batch:
        return expected_batch(sum(self.sizes), self.sync_interval, round_, value)
