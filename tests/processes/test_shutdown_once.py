"""A signal handler may shut a collector down, or raise, between any two instructions of ours."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from environments import EchoEnv
from policies import categorical
from probe import servers_in_use
from processes import COLLECTORS_OWN, alive, open_descriptors, processes_below, wait_until

import torchrl_hts._processes.server_pool
from torchrl_hts import HTSCollector
from torchrl_hts._processes.server_pool import WITH_TORCH, ServerPool, ServerUser
from torchrl_hts._processes.shutdown_once import Ending, endings_wait

PACKAGE = Path(torchrl_hts.__file__).parent
MODULES = {
    "_planning": ("worker_counts",),
    "_processes": ("fork_server", "messages", "server_pool", "shutdown_once", "worker_process"),
    "_rounds": ("exchange",),
    "_supervision": ("channels", "listener", "supervisor", "workers"),
}
FILES = {str(PACKAGE / folder / f"{name}.py") for folder in MODULES for name in MODULES[folder]}
LOOKED_AFTER = ("CALL", "JUMP_BACKWARD")
POINTS = 8


class Points:
    """Counts where the interpreter looks for signals in this package, and strikes at one of them.

    It does so where a function begins, after calls, and where a loop begins anew: not between the
    `__enter__` of a lock and the body that it guards, for instance.

    Args:
        at: number of the moment; none if negative.
        strike: what is called there.
    """

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.at, self.strike, self.seen = at, strike, 0

    @property
    def struck(self) -> bool:
        return 0 <= self.at < self.seen

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it before the tracing begins
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _look(self) -> None:
        self.seen += 1
        if self.seen == self.at + 1:
            sys.settrace(None)
            self.strike()

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        self._look()
        if not hasattr(dis, "_parse_exception_table"):
            return None  # Python 3.10: at the beginning of functions only
        frame.f_trace_opcodes = True
        code, last = frame.f_code, 0
        table = dis._parse_exception_table(code)

        def handlers(offset: int) -> list[int]:
            return [entry.target for entry in table if entry.start <= offset < entry.end]

        def step(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if event == "opcode":
                looked = dis.opname[code.co_code[last]].startswith(LOOKED_AFTER)
                # What is raised there is raised by the last instruction, and here by the next.
                if looked and handlers(last) == handlers(frame.f_lasti):
                    self._look()
                last = frame.f_lasti
            return step

        return step


def run_with_a_replacement(handler: Callable[[HTSCollector], None], points: Points) -> None:
    """An executor dies and is replaced, and the collector is shut down.

    Args:
        handler: what a signal handler does that is called at one of the points.
    """

    def on_signal(signum: int, frame: object) -> None:
        handler(collector)

    collector = HTSCollector(
        [partial(EchoEnv, (10**9,))] * 2,
        categorical(),
        frames_per_batch=8,
        seed=0,
        num_executors=2,
        on_executor_failure="restart",
    )
    batches = iter(collector)
    next(batches)
    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        pid = collector.worker_pids()["executor 1"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
        with points.counted():
            for _ in range(4):
                next(batches)
            collector.shutdown()
    finally:
        signal.signal(signal.SIGTERM, before)
        collector.shutdown()


def points(at: int) -> Points:
    return Points(at, partial(signal.raise_signal, signal.SIGTERM))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerPool]:
    """Servers of this test alone, since one may be given up here; that with torch stays warm."""
    pool = ServerPool()
    monkeypatch.setattr(torchrl_hts._processes.server_pool, "acquire_server", pool.acquire)
    monkeypatch.setattr(torchrl_hts._processes.server_pool, "release_servers", pool.release)
    user = ServerUser()
    pool.acquire(WITH_TORCH, user)
    yield pool
    for server in servers_in_use(pool):
        server.close()


def shut_down(collector: HTSCollector) -> None:
    collector.shutdown()


def shut_down_and_exit(collector: HTSCollector) -> None:
    collector.shutdown()
    sys.exit("terminated")


def interrupt(collector: HTSCollector) -> None:
    raise KeyboardInterrupt


def time_out(collector: HTSCollector) -> None:
    raise TimeoutError("the user's own")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:a worker is replaced", "ignore:.* had not ended")
@pytest.mark.parametrize("handler", [shut_down, shut_down_and_exit, interrupt, time_out])
def test_at_any_point_of_a_replacement(
    handler: Callable[[HTSCollector], None], pool: ServerPool
) -> None:
    """Nothing waits for itself, nothing is lost track of, and the next collector works."""
    used = servers_in_use(pool)
    counting = points(-1)
    run_with_a_replacement(handler, counting)
    assert counting.seen > 1000
    for part in range(POINTS):
        before = open_descriptors(*COLLECTORS_OWN)
        # How many there are depends on the timing a little: a late one may not be reached.
        at = points(int(counting.seen * 0.9 * part / POINTS))
        try:
            run_with_a_replacement(handler, at)
        except (KeyboardInterrupt, SystemExit, TimeoutError, RuntimeError) as error:
            told = isinstance(error, RuntimeError)
            assert not told or "this collector has been shut down" in str(error)  # noqa: PT017
        assert at.struck
        gc.collect()
        # What a call has just returned, an exception can keep from whoever would close it.
        allowed = 0 if handler is shut_down else 1
        assert len(open_descriptors(*COLLECTORS_OWN) - before) <= allowed, at.at
        assert servers_in_use(pool) == used, at.at
        assert not {
            pid for server in servers_in_use(pool) for pid in processes_below(server.pid)
        }, at.at


class TestEnding:
    def test_where_endings_wait_it_comes_after_the_outermost(self) -> None:
        done: list[str] = []
        ending = Ending()

        @endings_wait
        def inner() -> None:
            ending(lambda: done.append("ended"))
            done.append("inner")

        @endings_wait
        def outer() -> None:
            inner()
            done.append("outer")
            raise KeyError

        with contextlib.suppress(KeyError):
            outer()
        assert done == ["inner", "outer", "ended"]

    def test_it_happens_once_however_often_it_is_asked_for(self) -> None:
        done: list[str] = []
        ending = Ending()

        def end() -> None:
            done.append("first")
            ending(lambda: done.append("as by a signal handler"))
            thread = threading.Thread(target=ending, args=(lambda: done.append("by a thread"),))
            thread.start()
            thread.join()  # does not wait either

        ending(end)
        ending(lambda: done.append("afterwards"))
        assert done == ["first"]

    def test_one_that_was_cut_short_is_taken_up_by_the_next(self) -> None:
        done: list[int] = []
        ending = Ending()

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ending(interrupted)
        ending(lambda: done.append(2))
        ending(lambda: done.append(3))
        assert done == [2]

    def test_one_that_fails_does_not_keep_those_that_were_put_off_with_it(self) -> None:
        done: list[int] = []

        def fail() -> None:
            raise KeyError

        @endings_wait
        def within() -> None:
            Ending()(fail)
            Ending()(lambda: done.append(2))

        for function in (within, endings_wait(list)):
            with pytest.raises(KeyError):
                function()
        endings_wait(list)()
        assert done == [2]

    def test_one_that_was_put_off_is_not_lost_before_it_is_begun(self) -> None:
        """An exception may come at each point between its being put off and its end."""
        for at in range(100):
            done: list[str] = []
            ending = Ending()

            @endings_wait
            def within(done: list[str] = done, ending: Ending = ending) -> None:
                ending(lambda: done.append("ended"))
                done.append("put off")

            point = Points(at, throw)
            with contextlib.suppress(KeyboardInterrupt), point.counted():
                within()
            endings_wait(list)()
            assert not done or (done[0] == "put off" and "ended" in done), at
            if not point.struck:
                break
        assert 3 < at < 100


def throw() -> None:
    raise KeyboardInterrupt
