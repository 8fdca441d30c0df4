"""How long a worker looks before it sleeps, on a clock that is set by hand, and over real pipes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from probe import Looks

from torchrl_hts._rounds.exchange import Inbox
from torchrl_hts._rounds.inbox_reader import Clock, InboxReader
from torchrl_hts._rounds.schedule import Schedule

US = 1_000


class Waits:
    """An inbox in which each read waits as long as it is told to; notes how long it may look."""

    def __init__(self) -> None:
        self.now_ns = self.cpu_ns = 0
        self.next_ns = self.used_ns = 0
        self.ready = False
        self.clock = Clock(lambda: self.now_ns, lambda: self.cpu_ns)

    def is_ready(self) -> bool:
        return self.ready

    def read(self, look_ns: int = 0) -> array[int]:
        self.now_ns += self.next_ns
        self.cpu_ns += self.used_ns
        self.look_ns = look_ns
        return array("H", [1])


@pytest.fixture
def waits() -> Waits:
    return Waits()


def looks(waits: Waits, reader: InboxReader, after_us: int) -> bool:
    """Whether a reader looks before it sleeps, after a wait of so many microseconds."""
    waits.next_ns = after_us * US
    reader.read()
    reader.read()
    return waits.look_ns > 0


def reader_of(waits: Waits, *, a_core_each: bool = True, learning: bool = False) -> InboxReader:
    schedule = Schedule(2, 5, 1, learner=[3 + learning, 3])
    inbox: Any = waits
    return InboxReader(inbox, schedule, a_core_each=a_core_each, clock=waits.clock)


@pytest.mark.parametrize("a_core_each", [False, True])
@pytest.mark.parametrize("learning", [False, True])
def test_it_looks_where_nobody_else_needs_the_core(
    waits: Waits, a_core_each: bool, learning: bool
) -> None:
    reader = reader_of(waits, a_core_each=a_core_each, learning=learning)
    assert looks(waits, reader, after_us=50) == (a_core_each and not learning)


def test_it_stops_as_soon_as_the_learner_needs_the_core(waits: Waits) -> None:
    reader = reader_of(waits)
    assert looks(waits, reader, after_us=50)
    reader.schedule.learner[0] += 1
    assert not looks(waits, reader, after_us=50)


def test_it_sleeps_at_once_where_waits_are_long(waits: Waits) -> None:
    """Nobody spins beside an environment of milliseconds, nor where nothing happens at all."""
    reader = reader_of(waits)
    assert looks(waits, reader, after_us=50)
    assert not looks(waits, reader, after_us=1_000)
    assert looks(waits, reader, after_us=50)


def test_the_first_wait_is_asleep(waits: Waits) -> None:
    reader_of(waits).read()
    assert waits.look_ns == 0


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox.create()
    yield made
    made.close()


FOREVER = 60 * 10**9


@pytest.fixture
def noted(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(inbox, monkeypatch)


def test_looking_ends_with_what_is_there(inbox: Inbox, noted: Looks) -> None:
    inbox.post([1, 2])
    assert inbox.read(FOREVER).tolist() == [1, 2]
    assert noted.count == 1


def test_looking_ends_with_what_comes(inbox: Inbox, noted: Looks) -> None:
    noted.at[5] = lambda: inbox.post([3])
    assert inbox.read(FOREVER).tolist() == [3]
    assert noted.count == 5


def test_after_looking_it_sleeps(inbox: Inbox, noted: Looks) -> None:
    """What comes only then is found all the same."""
    noted.before_sleep = lambda: inbox.post([4])
    assert inbox.read(1).tolist() == [4]
    assert noted.count >= 1


def test_who_is_not_to_look_doesnt(inbox: Inbox, noted: Looks) -> None:
    inbox.post([1])
    inbox.read()
    assert noted.count == 0


def test_looking_ends_with_the_last_writer(inbox: Inbox, noted: Looks) -> None:
    def leave() -> None:
        Inbox(-1, inbox.write_fd).close()
        inbox.write_fd = -1

    noted.at[3] = leave
    with pytest.raises(EOFError, match="nobody is left"):
        inbox.read(FOREVER)
    assert noted.count == 3


def test_looking_is_no_work(waits: Waits) -> None:
    """Its processor time is counted apart."""
    waits.used_ns = 7
    reader = reader_of(waits)
    for _ in range(3):
        reader.read()
    assert reader.looking_ns == 3 * 7


def test_what_is_there_already_is_taken_at_once(waits: Waits) -> None:
    """There was no wait, so the next one is expected to be short as well."""
    reader = reader_of(waits)
    waits.ready, waits.used_ns = True, 7
    reader.read()
    assert (waits.look_ns, reader.looking_ns) == (0, 0)
    waits.ready = False
    reader.read()
    assert waits.look_ns > 0
