"""Ways to end a collector, meant or not: one clear error at most, and nothing left (I8)."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from collectors import ENDLESS, assert_others_ended_by_themselves, exit_statuses, start
from environments import ClosingEnv, GatedEnv, SlowlySavedEnv
from policies import marked
from probe import finished_steps, workers
from processes import (
    Script,
    alive,
    held_at,
    processes_below,
    segments_left,
    shared_memory_segments,
    wait_until,
    wait_until_gone,
)
from tensordict import TensorDictBase

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]


def test_every_environment_is_closed_though_one_cannot_be(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{index}") for index in range(3)]
    envs = [partial(ClosingEnv, path, fails=index < 2) for index, path in enumerate(paths)]
    with start(envs, num_executors=1) as collector:
        next(iter(collector))
    assert sorted(map(str, tmp_path.iterdir())) == paths


def test_environments_that_are_saved_in_turns_do_not_hang(tmp_path: Path) -> None:
    """All of them together may take longer than one that makes no progress."""
    envs = [partial(SlowlySavedEnv, 0.5)] * 6
    with start(envs, num_executors=1, timeout_s={"executor": 1.5}) as collector:
        next(iter(collector))
        assert len(collector.state_dict()["environments"]) == 6
        next(iter(collector))


class TestTheLoop:
    """What goes wrong, or just ends, in the user's own loop."""

    def test_an_exception_in_the_body_with_a_context(self) -> None:
        with pytest.raises(ZeroDivisionError), start([ENDLESS] * 2) as collector:  # noqa: PT012
            for _ in collector:
                1 / 0  # noqa: B018
        assert_others_ended_by_themselves(collector)

    def test_an_exception_in_the_body_without_a_context(self) -> None:
        """The collector lives on, and may be used again."""
        collector = start([ENDLESS] * 2)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                for _ in collector:
                    1 / 0  # noqa: B018
        assert collector.stats()["batches"] == 2
        collector.shutdown()
        assert_others_ended_by_themselves(collector)

    @pytest.mark.parametrize("argument", ["postproc", "pre_collect_hook", "post_collect_hook"])
    def test_an_exception_in_a_function_of_the_user(self, argument: str) -> None:
        def fail(*batch: TensorDictBase) -> None:
            raise ArithmeticError("postponed")

        collector = start([ENDLESS] * 2, **{argument: fail})
        with pytest.raises(ArithmeticError, match="postponed"):
            next(iter(collector))
        assert_others_ended_by_themselves(collector)

    def test_ctrl_c_while_the_learner_waits(self) -> None:
        main = threading.main_thread()
        if threading.current_thread() is not main:
            pytest.skip("signals reach the main thread only")
        collector = start([ENDLESS], frames_per_batch=10**6)  # a round that takes minutes
        steps = finished_steps(collector)

        def interrupt() -> None:
            wait_until(lambda: steps[0] > 10)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # Python's own
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                next(iter(collector))
            thread.join()
        finally:
            signal.signal(signal.SIGINT, handler)
        assert_others_ended_by_themselves(collector)
        with pytest.raises(RuntimeError, match="has been shut down; make a new one"):
            next(iter(collector))

    def test_ctrl_c_again_ends_the_wait_for_a_hung_environment(self, tmp_path: Path) -> None:
        gate = str(tmp_path / "gate")
        os.mkfifo(gate)
        collector = start([partial(GatedEnv, gate, at=2), ENDLESS], num_executors=2)
        steps = finished_steps(collector)
        collecting = threading.Thread(target=pytest.raises, args=(Exception, collector.next))
        collecting.start()
        wait_until(lambda: list(steps) == [2, 8])

        def interrupt() -> None:
            wait_until(workers(collector).is_closed)
            os.kill(os.getpid(), signal.SIGINT)

        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with held_at(gate), pytest.raises(KeyboardInterrupt):
                collector.shutdown(timeout=100)
        finally:
            signal.signal(signal.SIGINT, handler)
        interrupting.join()
        collecting.join()
        assert exit_statuses(collector)["executor 0"] == -signal.SIGKILL

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_copy_is_refused_and_ends_nothing(self, copied: Callable[[object], object]) -> None:
        with start([ENDLESS] * 2) as collector:
            batches = iter(collector)
            next(batches)
            with pytest.raises(TypeError, match=r"can't be copied or pickled.*state_dict\(\)$"):
                copied(collector)
            gc.collect()  # what a half-made copy held
            for _ in range(3):
                next(batches)
        assert_others_ended_by_themselves(collector)

    def test_shutdown_twice_and_before_any_batch(self) -> None:
        collector = start([ENDLESS] * 2)
        collector.shutdown()
        collector.shutdown()
        assert_others_ended_by_themselves(collector)
        with pytest.raises(RuntimeError, match="has been shut down; make a new one"):
            next(iter(collector))

    def test_a_timeout_that_is_none_ends_nothing(self) -> None:
        with start([ENDLESS] * 2) as collector:
            batches = iter(collector)
            for timeout in ("4", [3], -1, float("nan")):
                with pytest.raises((TypeError, ValueError), match=r"^timeout must be a"):
                    collector.shutdown(timeout)  # type: ignore[arg-type]
                next(batches)
        assert_others_ended_by_themselves(collector)

    def test_what_would_begin_anew_says_that_it_has_ended(self) -> None:
        collector = start([ENDLESS] * 2)
        collector.shutdown()
        for begin in (lambda: collector.set_seed(7), collector.reset):
            with pytest.raises(RuntimeError, match="has been shut down; make a new one"):
                begin()
        assert collector.seed == 0

    def test_shutdown_from_the_body(self) -> None:
        collector = start([ENDLESS] * 2)
        batches = iter(collector)
        batch = next(batches)
        copy = batch.clone()
        collector.shutdown()
        assert (batch == copy).all()
        with pytest.raises(RuntimeError, match="has been shut down; make a new one"):
            next(batches)

    @pytest.mark.parametrize("mode", ["raise", "restart"])
    def test_shutdown_from_another_thread_wakes_the_learner(self, mode: str) -> None:
        """Workers that end then are not replaced, and no server begins."""
        collector = start([ENDLESS] * 2, frames_per_batch=10**6, on_executor_failure=mode)
        steps = finished_steps(collector)
        before = processes_below(os.getpid())

        def shut_down() -> None:
            wait_until(lambda: steps[0] > 10)
            collector.shutdown()

        thread = threading.Thread(target=shut_down)
        thread.start()
        with pytest.raises(RuntimeError, match="shut down"):
            next(iter(collector))
        thread.join()
        assert_others_ended_by_themselves(collector)
        assert collector.statistics().executor_restarts == 0
        assert processes_below(os.getpid()) <= before

    @pytest.mark.parametrize("finished", [True, False])
    def test_what_remains_of_use_after_the_end(self, finished: bool) -> None:
        policy = marked()
        collector = start([ENDLESS] * 2, policy, total_frames=16)
        batches = iter(collector)
        for _ in batches if finished else [next(batches)]:
            policy.module.mark.data += 1
        collector.shutdown()
        state = collector.state_dict()
        assert collector.statistics().rounds == (2 if finished else 1)
        with nullcontext() if finished else pytest.warns(UserWarning, match="had been shut down"):
            collector.load_state_dict(state)
        collector.update_policy_weights_()
        if not finished:
            with pytest.raises(RuntimeError, match="has been shut down; make a new one"):
                next(iter(collector))
        assert list(collector) == [] if finished else True

    def test_a_dropped_collector_ends(self) -> None:
        collector = start([ENDLESS] * 2)
        batches = iter(collector)
        next(batches)
        remaining, gone = workers(collector), weakref.ref(collector)
        del collector, batches
        gc.collect()
        assert gone() is None
        assert remaining.is_closed()
        wait_until_gone(worker.pid for worker in remaining.processes)
        assert {worker.exit_status(0) for worker in remaining.processes} == {0}


# One interpreter imports torch and then forks: each child is a script with an end of its own.
SCRIPT = """
import json, multiprocessing, os, signal, sys
from contextlib import nullcontext
from functools import partial
from environments import EchoEnv
from policies import categorical
from probe import server_pids
from torchrl_hts import HTSCollector

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
names = sys.argv[1:]
for name in names:
    if os.fork() == 0:
        os.setsid()
        os.dup2(os.open(f"{__file__}.{name}", os.O_CREAT | os.O_WRONLY), 2)
        break
else:
    for _ in names:
        pid, status = os.wait()
        print(json.dumps([pid, os.waitstatus_to_exitcode(status)]), flush=True)
    sys.exit()

main = os.getpid()

def say(*collectors):
    pids = {
        pid
        for collector in collectors
        for pid in [
            *collector.worker_pids().values(),
            *server_pids(collector),
        ]
    }
    print(json.dumps([name, main, sorted(pids)]), flush=True)

make = partial(HTSCollector, [EchoEnv] * 2, categorical(), num_executors=2)
if name == "leaves":
    dropped = make(frames_per_batch=8)
    for _ in dropped:
        break
    batches = iter(make(frames_per_batch=8))
    next(batches)
    other = make(frames_per_batch=8)
    say(dropped, other)
    for _ in other:
        raise ArithmeticError("the loss went up")
elif name == "nested":
    def work():  # a daemon of multiprocessing, which ends without running any exit handler
        collector = make(frames_per_batch=8)
        next(iter(collector))
        say(collector)
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)
else:
    collector = make(frames_per_batch=2 * 10**6)  # a round that takes minutes
    say(collector)
    next(iter(collector))
"""
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")


def test_the_end_of_a_script(tmp_path: Path) -> None:
    """No process and no shared memory is left, however the main process ends.

    The signals go to its whole process group, as from a terminal: the workers don't take Ctrl-C
    for theirs.
    """
    path, segments = tmp_path / "script.py", shared_memory_segments()
    with Script(path, SCRIPT, *SIGNALS, "leaves", "nested") as script:
        names, workers = {}, set()
        statuses: dict[str, int] = {}
        while len(statuses) < 5:
            match script.receive():
                case [name, main, pids]:
                    names[main] = name
                    workers |= {*pids}
                    assert len(pids) == (8 if name == "leaves" else 5), "two servers, and workers"
                    if name in SIGNALS:
                        assert all(map(alive, pids))
                        os.killpg(main, getattr(signal, name))
                case [main, status]:
                    statuses[names[main]] = status
        wait_until_gone(workers)
        script.wait()
    assert not segments_left(segments)
    assert statuses["SIGTERM"] == -signal.SIGTERM
    assert statuses["SIGKILL"] == -signal.SIGKILL
    assert statuses["SIGINT"] in (-signal.SIGINT, 128 + signal.SIGINT)
    assert statuses["leaves"] == 1
    assert statuses["nested"] == 0
    said = {name: Path(f"{path}.{name}").read_text().rstrip() for name in statuses}
    assert said["SIGTERM"] == said["SIGKILL"] == said["nested"] == ""
    assert said["SIGINT"].endswith("KeyboardInterrupt")
    assert said["leaves"].endswith("ArithmeticError: the loss went up")
    for name in ("SIGINT", "leaves"):
        assert said[name].count("Traceback") == 1, said[name]
