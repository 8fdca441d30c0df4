"""How long a worker looks before it sleeps, on a clock that is set by hand, and over real pipes."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from torchrl_hts import watching
from torchrl_hts.exchange import Inbox
from torchrl_hts.schedule import Schedule
from torchrl_hts.watching import Watcher

US = 1_000


class Waits:
    """An inbox in which each take waits as long as it is told to; notes how long it may look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.next_ns = 0
        clock = SimpleNamespace(perf_counter_ns=lambda: self.now_ns)
        monkeypatch.setattr(watching, "time", clock)

    def take(self, look_ns: int = 0) -> array[int]:
        self.now_ns += self.next_ns
        self.look_ns = look_ns
        return array("H", [1])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def looks(waits: Waits, watcher: Watcher, after_us: int) -> bool:
    """Whether a watcher looks before it sleeps, after a wait of so many microseconds."""
    waits.next_ns = after_us * US
    watcher.take()
    watcher.take()
    return waits.look_ns > 0


def watcher_of(waits: Waits, num_workers: int, cores: int, *, learning: bool = False) -> Watcher:
    schedule = Schedule(2, 5, 1, learner=[3 + learning, 3])
    return Watcher(waits, schedule, num_workers, cores)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_workers", "cores", "learning", "expected"),
    [
        (2, 2, False, True),
        (2, 2, True, False),
        (2, 16, True, False),
        (3, 2, False, False),
        (17, 2, False, False),
        (3, 16, False, True),
    ],
)
def test_it_looks_where_everybody_has_a_core(
    waits: Waits, num_workers: int, cores: int, learning: bool, expected: bool
) -> None:
    watcher = watcher_of(waits, num_workers, cores, learning=learning)
    assert looks(waits, watcher, after_us=50) == expected


def test_it_stops_as_soon_as_the_learner_needs_the_core(waits: Waits) -> None:
    watcher = watcher_of(waits, 2, 2)
    assert looks(waits, watcher, after_us=50)
    watcher.schedule.learner[0] += 1
    assert not looks(waits, watcher, after_us=50)


def test_it_sleeps_at_once_where_waits_are_long(waits: Waits) -> None:
    """Nobody spins beside an environment of milliseconds, nor where nothing happens at all."""
    watcher = watcher_of(waits, 2, 8)
    assert looks(waits, watcher, after_us=50)
    assert not looks(waits, watcher, after_us=1_000)
    assert looks(waits, watcher, after_us=50)


def test_the_first_wait_is_asleep(waits: Waits) -> None:
    watcher_of(waits, 2, 8).take()
    assert waits.look_ns == 0


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox.create()
    yield made
    made.close()


FOREVER = 60 * 10**9


def test_looking_finds_what_is_there(inbox: Inbox) -> None:
    inbox.post([1, 2])
    assert inbox.take(FOREVER).tolist() == [1, 2]


def test_looking_finds_what_comes(inbox: Inbox) -> None:
    taken: list[list[int]] = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(FOREVER).tolist()))
    thread.start()
    inbox.post([3])
    thread.join(30)
    assert taken == [[3]]


def test_after_looking_it_sleeps_until_something_comes(inbox: Inbox) -> None:
    taken: list[list[int]] = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(1).tolist()))
    thread.start()
    assert not taken
    inbox.post([4])
    thread.join(30)
    assert taken == [[4]]


def test_looking_ends_with_the_last_writer(inbox: Inbox) -> None:
    Inbox(-1, inbox.write_fd).close()
    inbox.write_fd = -1
    with pytest.raises(EOFError, match="nobody is left"):
        inbox.take(FOREVER)
