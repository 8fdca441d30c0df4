"""docs/explanation/schedule.md as whole histories, run beside a real `Schedule`.

`World` does with the slots what executors, actors and the learner do: it writes rows and parameters
where the schedule says. Beside that it keeps count by itself, from the method and not from the
schedule's words, of what may happen and of what every row must hold. Each assertion names the
invariant (docs/explanation/schedule.md) that it checks.

Parameters are a version and a value. The value is changed by a gradient that depends on every
number of the batch and on their order, so that two runs whose batches differ anywhere end apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from torchrl_hts._rounds.schedule import Schedule
from torchrl_hts.errors import ProtocolError

# ("offer", env), ("take", actor, envs), ("answer", envs), ("finish_step", env), ("lend",),
# ("release",), ("recover", envs)
Event = tuple[Any, ...]
Parameters = tuple[int, int]  # version and value
Transition = tuple[int, int, int, int]  # environment, its ordinal there, parameters taken with
Batch = tuple[tuple[Transition, ...], ...]  # [N, T]

PRIME = 2**61 - 1
OBSERVATION = "observation"  # half a transition: written, not answered yet


def gradient(batch: Batch) -> int:
    """A number that depends on every entry of a batch and on their order."""
    total = 0
    for row in batch:
        for transition in row:
            for number in transition:
                total = (total * 1_000_003 + number + 1) % PRIME
    return total


def opt(value: int, grad: int) -> int:
    """An optimizer's step."""
    return (value * 48_271 + grad) % PRIME


def expected_batch(num_envs: int, sync_interval: int, round_: int, value: int) -> Batch:
    """D_j: alpha steps of every environment in time order, all with theta_j (I1, I2)."""
    steps = range(round_ * sync_interval, (round_ + 1) * sync_interval)
    return tuple(tuple((env, step, round_, value) for step in steps) for env in range(num_envs))


def expected_values(num_envs: int, sync_interval: int, lag: int, rounds: int) -> list[int]:
    """theta_0, theta_1, ...: theta_{j+lag+1} = opt(theta_{j+lag}, grad L(theta_j; D_j))."""
    theta = [1] * (lag + 1)
    for j in range(rounds):
        batch = expected_batch(num_envs, sync_interval, j, theta[j])
        theta.append(opt(theta[j + lag], gradient(batch)))
    return theta


def words(schedule: Any) -> tuple[tuple[int, ...], ...]:
    """Everything that a schedule holds."""
    return tuple(schedule.steps), tuple(schedule.phase), tuple(schedule.learner)


def send(schedule: Schedule, event: Event) -> Any:
    """Let an event happen to the schedule alone."""
    kind = event[0]
    return getattr(schedule, kind)(*event[2 if kind == "take" else 1 :])


def assert_refused(schedule: Schedule, event: Event) -> None:
    """An illegal event raises and leaves every word as it was."""
    before = words(schedule)
    try:
        send(schedule, event)
    except ProtocolError:
        pass
    else:
        raise AssertionError(f"the illegal {event} was allowed")
    assert words(schedule) == before, f"the refused {event} has changed the state"


class World:
    """A schedule, the slots that it governs, and what the method says about both.

    Args:
        schedule: in its initial state.
        num_actors: how many actors `enabled` reckons with.
    """

    def __init__(self, schedule: Schedule, num_actors: int = 1) -> None:
        self.schedule = schedule
        self.num_actors = num_actors
        self.num_envs = schedule.num_envs
        self.sync_interval = schedule.sync_interval
        self.lag = schedule.lag
        # By the method's own count.
        self.done = [0] * self.num_envs  # transitions
        self.holder: list[Any] = ["executor"] * self.num_envs  # or ready, an actor, answered
        self.lent: int | None = None
        self.updates = 0
        self.newest = 1  # the value of theta_{updates + lag}
        self.trace: list[tuple[Transition, ...]] = [()] * self.num_envs
        self.failures = 0  # how often workers have failed
        # The storage.
        num_slots = self.lag + 1
        self.parameters: list[Parameters] = [(version, 1) for version in range(num_slots)]
        self.round_of = list(range(num_slots))  # whose rows a slot holds
        self.rows: list[Any] = [None] * (num_slots * self.num_envs * self.sync_interval)
        self.reading: list[Parameters | None] = [None] * self.num_envs
        self.batch: Batch | None = None

    def clone(self) -> World:
        """An independent copy."""
        copy = object.__new__(type(self))
        copy.__dict__.update(
            {k: v.copy() if type(v) is list else v for k, v in self.__dict__.items()}
        )
        schedule = object.__new__(type(self.schedule))
        schedule.__dict__.update(
            {k: v.copy() if type(v) is list else v for k, v in self.schedule.__dict__.items()}
        )
        copy.schedule = schedule
        return copy

    def key(self) -> Any:
        """All that the future and the past's result depend on."""
        return (
            words(self.schedule),
            tuple(self.holder),
            tuple(self.rows),
            tuple(self.parameters),
            tuple(self.reading),
            tuple(self.trace),
            (self.lent, self.updates, self.newest),
            self.failures,
        )

    def round(self, env: int) -> int:
        """The round that the environment's next transition belongs to."""
        return self.done[env] // self.sync_interval

    # What may happen.

    def opened(self, round_: int) -> bool:
        """I4: round r opens when update r - (lag + 1) is done, up to the last."""
        last = self.schedule.last_round
        return (last is None or round_ < last) and round_ - (self.lag + 1) < self.updates

    def legal(self, event: Event) -> bool:
        """Whether the method allows an event now."""
        kind, *args = event
        if kind == "offer":
            return self.holder[args[0]] == "executor" and self.opened(self.round(args[0]))
        if kind == "finish_step":
            return bool(self.holder[args[0]] == "answered")
        if kind == "lend":
            full = min(self.done) >= (self.updates + 1) * self.sync_interval
            return self.lent is None and full
        if kind == "release":
            return self.lent is not None
        if kind == "recover":
            return True
        envs = args[-1]
        if len(set(envs)) < len(envs):
            return False
        if kind == "take":
            return all(self.holder[env] == "ready" for env in envs)
        return all(type(self.holder[env]) is int for env in envs)

    def enabled(self) -> list[Event]:
        """What the workers may do next: a free actor takes envs of one round, and answers them."""
        n = range(self.num_envs)
        single: list[Event] = [("lend",), ("release",)]
        single += [(kind, env) for kind in ("offer", "finish_step") for env in n]
        events = [event for event in single if self.legal(event)]
        ready = defaultdict(list)
        for env in n:
            if self.holder[env] == "ready":
                ready[self.round(env)].append(env)
        for actor in range(self.num_actors):
            taken = tuple(env for env in n if self.holder[env] == actor)
            if taken:
                events.append(("answer", taken))
            else:
                for envs in ready.values():
                    for size in range(1, len(envs) + 1):
                        events += [("take", actor, some) for some in combinations(envs, size)]
        return events

    def rows_run(self) -> int:
        """Rows that actors have run of what they hold."""
        return 0

    def all_learned(self) -> bool:
        """Whether the last round has been learned from."""
        return self.updates == self.schedule.last_round

    # What happens.

    def apply(self, event: Event) -> None:
        """Let a legal event happen, with what the worker does to the slots before it."""
        assert self.legal(event)
        getattr(self, f"_{event[0]}")(*event[1:])
        self.check()

    def refuse(self, event: Event) -> None:
        """Check that an illegal event is refused."""
        assert not self.legal(event)
        assert_refused(self.schedule, event)

    def restart(self) -> None:
        """Everybody comes to rest, and goes on with the round that is to be lent next."""
        round_ = self.updates + (self.lent is not None)
        self.schedule.restart(round_, lent=self.lent is not None)
        self.done = [round_ * self.sync_interval] * self.num_envs
        self.holder = ["executor"] * self.num_envs
        self.reading = [None] * self.num_envs
        size = self.num_envs * self.sync_interval
        for slot, held in enumerate(self.round_of):
            if held != self.lent:
                self.rows[slot * size : (slot + 1) * size] = [None] * size
        self.trace = [row[: self.done[0]] for row in self.trace]
        self.check()

    def _place(self, env: int) -> tuple[int, int]:
        """Slot and index of the row that the schedule sends a writer of ``env`` to."""
        round_, step = self.schedule.position(env)
        assert (round_, step) == divmod(self.done[env], self.sync_interval), "I1: position"
        slot = self.schedule.slot(round_)
        assert self.round_of[slot] == round_, "I5: written before its round was opened"
        assert self.round_of[slot] != self.lent, "I5: written while lent"
        return slot, (slot * self.num_envs + env) * self.sync_interval + step

    def _offer(self, env: int) -> None:
        _, row = self._place(env)
        assert self.rows[row] is None, "I1: a transition was overwritten"
        self.rows[row] = OBSERVATION
        self.schedule.offer(env)
        self.holder[env] = "ready"

    def _take(self, actor: int, envs: tuple[int, ...]) -> None:
        self.schedule.take(envs)
        for env in envs:
            slot, _ = self._place(env)
            self.reading[env] = self.parameters[slot]
            self.holder[env] = actor

    def _answer(self, envs: tuple[int, ...]) -> None:
        for env in envs:
            slot, row = self._place(env)
            assert self.rows[row] == OBSERVATION, "I1: an action without its observation"
            parameters = self.parameters[slot]
            assert parameters == self.reading[env], "I2: parameters changed in a running round"
            assert parameters[0] == self.round(env), "I2: not this round's parameters"
            self.rows[row] = (env, self.done[env], *parameters)
            self.holder[env] = "answered"
        self.schedule.answer(envs)

    def _finish_step(self, env: int) -> None:
        _, row = self._place(env)
        self.trace[env] = (*self.trace[env], self.rows[row])
        finished = self.schedule.finish_step(env)
        self.done[env] += 1
        self.holder[env] = "executor"
        assert finished == (self.done[env] % self.sync_interval == 0), "I1: alpha steps a round"

    def _read(self, round_: int) -> Batch:
        slot, t = self.schedule.slot(round_), self.sync_interval
        rows = range(slot * self.num_envs, (slot + 1) * self.num_envs)
        return tuple(tuple(self.rows[row * t : (row + 1) * t]) for row in rows)

    def _lend(self) -> None:
        round_ = self.schedule.lend()
        assert round_ == self.updates, "I3: rounds are lent in order, one update each"
        version, value = self.parameters[self.schedule.slot(round_)]
        assert version == round_, "I2: the batch carries another version"
        batch = self._read(round_)
        wanted = self._expected(round_, value)
        assert batch == wanted, "I1, I2: exactly alpha transitions of every environment, in order"
        self.lent, self.batch = round_, batch

    def _expected(self, round_: int, value: int) -> Batch:
        return expected_batch(self.num_envs, self.sync_interval, round_, value)

    def _release(self) -> None:
        lent, self.lent = self.lent, None
        assert lent is not None
        assert self.batch is not None
        assert self._read(lent) == self.batch, "I5: a lent batch was overwritten"
        slot, size = self.schedule.slot(lent), self.num_envs * self.sync_interval
        self.newest = opt(self.newest, gradient(self.batch))
        # The new parameters are in the slot before the schedule hears of it.
        self.parameters[slot] = (lent + self.lag + 1, self.newest)
        self.rows[slot * size : (slot + 1) * size] = [None] * size
        self.round_of[slot] = lent + self.lag + 1
        assert self.schedule.release() == lent, "I3: another round was released"
        self.updates += 1

    def _recover(self, lost: tuple[int, ...]) -> None:
        """The executors of some environments have failed, and the actors that hold anything."""
        before = tuple(self.schedule.steps)
        self.schedule.recover(lost)
        assert tuple(self.schedule.steps) == before, "I1: what was finished stays"
        for env in range(self.num_envs):
            if env in lost and self.holder[env] != "executor":
                _, row = self._place(env)
                self.rows[row] = None  # a new observation comes
                self.holder[env] = "executor"
            elif type(self.holder[env]) is int:
                self.holder[env] = "ready"
            if self.holder[env] in ("executor", "ready"):
                self.reading[env] = None
        self.failures += 1

    def check(self) -> None:
        """What holds in every state."""
        schedule, t = self.schedule, self.sync_interval
        assert schedule.released == self.updates, "I3: updates"
        assert schedule.lent == self.updates + (self.lent is not None), "I3: batches lent"
        for env, done in enumerate(self.done):
            assert schedule.position(env) == divmod(done, t), "I1: position"
            assert done <= (self.updates + self.lag + 1) * t, "I3: more than lag rounds ahead"
            if self.holder[env] != "executor":
                slot = schedule.slot(self.round(env))
                assert self.round_of[slot] == self.round(env) != self.lent, "I5: two writers"
        for round_ in range(self.updates + self.lag + 3):
            assert schedule.is_open(round_) == self.opened(round_), "I4: open or not"
            full = all(done >= (round_ + 1) * t for done in self.done)
            assert schedule.is_full(round_) == full, "I1: full or not"
        assert self.enabled() or self.all_learned(), "I4: nobody can go on"


def arbitrary_events(num_envs: int, num_actors: int = 1) -> Iterator[Event]:
    """Every event that there is, legal or not."""
    yield from (("lend",), ("release",))
    for env in range(num_envs):
        yield from (("offer", env), ("finish_step", env))
    for size in range(1, num_envs + 1):
        for envs in combinations(range(num_envs), size):
            yield ("answer", envs)
            yield from (("take", actor, envs) for actor in range(num_actors))
