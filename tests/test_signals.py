"""A signal handler may shut a collector down, or raise, between any two instructions of ours."""

from __future__ import annotations

import contextlib
import gc
import opcode
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from environments import EchoEnv
from policies import categorical
from processes import COLLECTORS_OWN, alive, open_descriptors, processes_below, wait_until

import torchrl_hts.servers
from torchrl_hts import HTSCollector
from torchrl_hts.servers import WITH_TORCH, ServerPool
from torchrl_hts.undivided import put_off, undivided

PACKAGE = str(Path(torchrl_hts.servers.__file__).parent)
MODULES = ("staff", "crew", "roster", "servers", "workers", "messages", "undivided", "exchange")
LOOKED_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
POINTS = 8


class Points:
    """Counts where the interpreter looks for signals in this package, and strikes at one of them.

    It does so after calls, where a function begins, and where a loop begins anew: not between the
    `__enter__` of a lock and the body that it guards, for instance.

    Args:
        at: number of the moment; none if negative.
        strike: what is called there.
    """

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.at, self.strike, self.seen = at, strike, 0
        self._files = {f"{PACKAGE}/{name}.py" for name in MODULES}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        last = ""

        def step(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if event == "opcode":
                if last.startswith(LOOKED_AFTER):
                    self.seen += 1
                    if self.seen == self.at + 1:
                        sys.settrace(None)
                        self.strike()
                last = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
            return step

        return step


def run_with_a_replacement(handler: Callable[[HTSCollector], None], at: int) -> int:
    """An executor dies and is replaced, and the collector is shut down: how many points there are.

    Args:
        handler: called by a signal handler at the point ``at``.
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
    points = Points(at, partial(signal.raise_signal, signal.SIGTERM))
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
    return points.seen


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerPool]:
    """Servers of this test alone, since one may be given up here; that with torch stays warm."""
    pool = ServerPool()
    monkeypatch.setattr(torchrl_hts.servers, "acquire_server", pool.acquire)
    monkeypatch.setattr(torchrl_hts.servers, "release_server", pool.release)
    torch_server = pool.acquire(WITH_TORCH)
    yield pool
    pool.release(torch_server)


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
@pytest.mark.filterwarnings("ignore:a worker is replaced")
@pytest.mark.parametrize("handler", [shut_down, shut_down_and_exit, interrupt, time_out])
def test_at_any_point_of_a_replacement(
    handler: Callable[[HTSCollector], None], pool: ServerPool
) -> None:
    """Nothing waits for itself, nothing is lost track of, and the next collector works."""
    count = run_with_a_replacement(handler, -1)
    assert count > 500
    for at in range(0, count, -(-count // POINTS)):
        before = open_descriptors(*COLLECTORS_OWN)
        try:
            run_with_a_replacement(handler, at)
        except (KeyboardInterrupt, SystemExit, TimeoutError, RuntimeError) as error:
            told = isinstance(error, RuntimeError)
            assert not told or "this collector has been shut down" in str(error)  # noqa: PT017
        gc.collect()
        # What a system call has just returned, an exception can keep from whoever would close it.
        left = open_descriptors(*COLLECTORS_OWN) - before
        assert len(left) <= (handler is not shut_down), at
        assert not {pid for server in pool._users for pid in processes_below(server.pid)}, at


def test_what_is_put_off_comes_after_the_outermost() -> None:
    done: list[str] = []
    with undivided():
        with undivided():
            assert put_off(lambda: done.append("late"))
        done.append("inner")
    assert done == ["inner", "late"]
    assert not put_off(lambda: done.append("never"))
    with contextlib.suppress(KeyError), undivided():
        put_off(lambda: done.append("after an exception too"))
        raise KeyError
    assert done[-1] == "after an exception too"
