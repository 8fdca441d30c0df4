"""Failures while a collector runs: one clear error, and nothing left (I8)."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from collectors import ENDLESS, assert_others_ended_by_themselves, exit_statuses, start
from environments import FaultyEnv, GatedEnv, SimulatorEnv
from policies import categorical
from probe import finished_steps, process_of, workers
from processes import (
    Script,
    alive,
    group_of,
    held_at,
    needs_linux,
    wait_until,
    wait_until_gone,
)
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs import GymWrapper

import torchrl_hts._processes.server_pool
from torchrl_hts import HTSCollector, WorkerError
from torchrl_hts._processes.fork_server import WorkerServer
from torchrl_hts._processes.server_pool import TORCH_FREE, ServerUser, acquire_server

pytestmark = [pytest.mark.usefixtures("collectors_end"), pytest.mark.timeout(120)]


class TestEnvironments:
    """An environment fails: the error names it and its executor, with its own traceback."""

    @pytest.mark.parametrize("num_executors", [1, 3])
    @pytest.mark.parametrize(
        ("fault", "where", "said"),
        [
            ("raise", "round 0, step 2", "ValueError: the ball left the universe"),
            ("reset", "round 0, step 0", "RuntimeError: cannot reset"),
            ("shape", "round 0, step 2", r"'observation' of shape \(2,\); .* says \(4,\)"),
            ("quit", "round 0, step 2", "SystemExit: the engine gave up"),
            ("interrupt", "round 0, step 2", "KeyboardInterrupt: as by the engine"),
        ],
    )
    def test_that_raises(self, fault: str, where: str, said: str, num_executors: int) -> None:
        envs = [ENDLESS, partial(FaultyEnv, fault), ENDLESS]
        collector = start(envs, num_executors=num_executors)
        expected = rf"(?s)environment 1 failed in {where}, .*{said}"
        with pytest.raises(WorkerError, match=expected) as e:
            next(iter(collector))
        executor = f"executor {1 if num_executors == 3 else 0}"
        assert (e.value.worker, e.value.env_indices) == (executor, (1,))
        assert executor in str(e.value)
        told = "InvalidValueError: " if fault == "shape" else "Traceback"  # our own error says all
        assert e.value.remote_traceback.startswith(told)
        assert_others_ended_by_themselves(collector)

    @pytest.mark.parametrize("num_executors", [1, 3])
    def test_that_cant_be_made(self, num_executors: int) -> None:
        with pytest.raises(WorkerError, match="environment 1 failed while it was made") as e:
            start([ENDLESS, partial(FaultyEnv, "init"), ENDLESS], num_executors=num_executors)
        assert e.value.env_indices == (1,)
        assert e.value.remote_traceback.endswith("RuntimeError: no engine here\n")

    @pytest.mark.parametrize(("num_executors", "envs"), [(1, (0, 1, 2)), (3, (1,))])
    def test_that_ends_its_process(self, num_executors: int, envs: tuple[int, ...]) -> None:
        collector = start(
            [ENDLESS, partial(FaultyEnv, "exit"), ENDLESS], num_executors=num_executors
        )
        with pytest.raises(WorkerError, match="ended with exit code 7") as e:
            next(iter(collector))
        assert e.value.env_indices == envs
        assert e.value.stepped == (1,)
        assert ", ".join(map(str, envs)) in str(e.value)
        assert_others_ended_by_themselves(collector, e.value.worker)

    def test_of_torchrl(self) -> None:
        def wrapped(fault: str) -> GymWrapper:
            return GymWrapper(FaultyEnv(fault), categorical_action_encoding=True)

        envs = [partial(wrapped, "none"), partial(wrapped, "raise")]
        collector = start(envs, num_executors=2)
        with pytest.raises(WorkerError, match=r"(?s)environment 1 failed .*left the universe") as e:
            next(iter(collector))
        assert (e.value.worker, e.value.env_indices) == ("executor 1", (1,))
        assert_others_ended_by_themselves(collector)

    def test_that_stops_answering_is_killed_at_the_timeout(self, tmp_path: Path) -> None:
        gate = str(tmp_path / "gate")
        os.mkfifo(gate)
        collector = start([partial(GatedEnv, gate, at=2), ENDLESS], num_executors=2)
        thread = threading.Thread(target=pytest.raises, args=(Exception, collector.next))
        thread.start()
        steps = finished_steps(collector)
        wait_until(lambda: list(steps) == [2, 8])
        with held_at(gate):
            collector.shutdown(timeout=0.2)
            thread.join()
        expected = {"executor 0": -signal.SIGKILL, "executor 1": 0, "actor 0": 0}
        assert exit_statuses(collector) == expected

    @needs_linux
    def test_with_processes_of_its_own_is_missed_too(self) -> None:
        """They hold copies of the executor's descriptors: no end of file tells of its end."""
        collector = start([partial(FaultyEnv, "fork and die"), ENDLESS], num_executors=2)
        try:
            with pytest.raises(WorkerError, match=r"executor 0 .* was killed by SIGKILL"):
                next(iter(collector))
        finally:
            executor = collector.worker_pids()["executor 0"]
            collector.shutdown()
        wait_until(lambda: not group_of(executor))  # what it has left behind ends after it


KILLED_WITH_SIMULATORS = """
import os, signal, sys
from functools import partial
from environments import SimulatorEnv
from policies import categorical
from torchrl_hts import HTSCollector

make_env = partial(SimulatorEnv, sys.argv[1])
collector = HTSCollector([make_env] * 2, categorical(), frames_per_batch=8, num_executors=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


class MadeAfterAnother(FaultyEnv):
    """Can't be made, which it finds out when a simulator is there."""

    def __init__(self, folder: str) -> None:
        wait_until(lambda: any(Path(folder).iterdir()))
        super().__init__("init")


class TestSimulators:
    """Processes that environments have started end with the collector, whatever happens."""

    def pids(self, folder: Path) -> set[int]:
        pids = {int(path.name) for path in folder.iterdir()}
        assert len(pids) == 2
        assert all(map(alive, pids))
        return pids

    def test_of_an_executor_that_is_killed(self, tmp_path: Path) -> None:
        collector = start([partial(SimulatorEnv, str(tmp_path))] * 2, num_executors=2)
        pids = self.pids(tmp_path)
        os.kill(collector.worker_pids()["executor 1"], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"executor 1 .*was killed by SIGKILL"):
            for _ in collector:
                pass
        wait_until_gone(pids)

    def test_that_take_long_to_close(self, tmp_path: Path) -> None:
        collector = start([partial(SimulatorEnv, str(tmp_path), 60.0)] * 2, num_executors=1)
        pids = self.pids(tmp_path)
        with pytest.warns(RuntimeWarning, match=r"executor 0 had not ended 0\.2 s after"):
            collector.shutdown(timeout=0.2)
        wait_until_gone(pids)

    def test_that_are_given_the_time_to_close(self, tmp_path: Path) -> None:
        collector = start([partial(SimulatorEnv, str(tmp_path), 0.5)], num_executors=1)
        with pytest.warns(RuntimeWarning, match=r"give shutdown\(timeout=\.\.\.\) more"):
            collector.shutdown(timeout=0.01)
        collector = start([partial(SimulatorEnv, str(tmp_path), 0.5)], num_executors=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector.shutdown(timeout=30)
        wait_until_gone(int(path.name) for path in tmp_path.iterdir())

    def test_that_take_long_to_close_while_others_are_made(self, tmp_path: Path) -> None:
        slow = partial(SimulatorEnv, str(tmp_path), 60.0)
        with pytest.raises(WorkerError, match=r"(?s)environment 1 failed .*no engine here"):
            start([slow, partial(MadeAfterAnother, str(tmp_path))], num_executors=2)
        (simulator,) = tmp_path.iterdir()
        # A second, on a machine that may be busy; closed in order it would take sixty.
        assert time.time() - simulator.stat().st_mtime < 45
        wait_until_gone([int(simulator.name)])

    @needs_linux  # to be told at once that a server was killed
    @pytest.mark.parametrize("mode", ["raise", "restart"])
    def test_of_a_server_that_is_killed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
    ) -> None:
        """It takes its workers along, and can't see to what they have started any more."""
        server = WorkerServer(TORCH_FREE)  # not the one that other tests share

        def acquire(preload: tuple[str, ...], user: ServerUser) -> WorkerServer:
            own = preload == TORCH_FREE and not server.has_ended()
            return server if own else acquire_server(preload, user)

        monkeypatch.setattr(torchrl_hts._processes.server_pool, "acquire_server", acquire)
        make_env = partial(SimulatorEnv, str(tmp_path))
        collector = start([make_env] * 2, num_executors=2, on_executor_failure=mode)
        pids = self.pids(tmp_path)
        batches = iter(collector)
        next(batches)
        os.kill(server.pid, signal.SIGKILL)
        process_of(server).wait()
        said = "executor . .*was killed: the worker server"
        if mode == "raise":
            with pytest.raises(WorkerError, match=said):
                list(zip(range(5), batches, strict=False))
        else:
            with pytest.warns(RuntimeWarning, match=said):
                list(zip(range(5), batches, strict=False))
            assert collector.statistics().executor_restarts == 2
        collector.shutdown()
        wait_until_gone(pids)

    def test_of_a_main_process_that_is_killed(self, tmp_path: Path) -> None:
        folder = tmp_path / "pids"
        folder.mkdir()
        with Script(tmp_path / "script.py", KILLED_WITH_SIMULATORS, str(folder)) as script:
            status, errors = script.wait()
        assert status == -signal.SIGKILL, errors
        pids = {int(path.name) for path in folder.iterdir()}
        assert len(pids) == 2
        wait_until_gone(pids)


class TestKilled:
    """A worker is killed by somebody else."""

    def test_a_server_that_ends_while_it_is_asked_for_a_worker(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is another one."""
        server = WorkerServer(TORCH_FREE)
        process_of(server).kill()
        process_of(server).wait()
        ended = iter([False])  # as far as is known when it is first asked

        def acquire(preload: tuple[str, ...], user: ServerUser) -> WorkerServer:
            first = preload == TORCH_FREE and not server.has_ended()
            return server if first else acquire_server(preload, user)

        monkeypatch.setattr(server, "has_ended", lambda: next(ended, True))
        monkeypatch.setattr(torchrl_hts._processes.server_pool, "acquire_server", acquire)
        collector = start([ENDLESS] * 2, num_executors=2)
        assert next(iter(collector)).shape == (2, 4)
        collector.shutdown()

    @pytest.mark.parametrize("name", ["executor 0", "executor 1", "actor 0"])
    def test_between_two_batches(self, name: str) -> None:
        collector = start([ENDLESS] * 3, num_executors=2, num_actors=2)
        batches = iter(collector)
        next(batches)
        steps = finished_steps(collector)
        wait_until(lambda: list(steps) == [8] * 3)
        self.kill(collector, name)
        next(batches)  # round 1 was full already
        # Without an executor the next round can't be filled. The other actor fills rounds alone:
        # the end of the first is noticed where the learner waits for one.
        rounds = 1 if name.startswith("executor") else 1000
        with pytest.raises(WorkerError, match=f"{name} .*was killed by SIGKILL") as e:
            list(itertools.islice(batches, rounds))
        assert e.value.worker == name
        if name.startswith("executor"):
            assert e.value.env_indices == ((0, 1) if name == "executor 0" else (2,))
        else:  # what either actor has taken just then: the two are not told apart
            assert set(e.value.env_indices) <= {0, 1, 2}
        assert_others_ended_by_themselves(collector, name)
        with pytest.raises(RuntimeError, match="has been shut down; make a new one"):
            next(iter(collector))

    @pytest.mark.parametrize("name", ["executor 0", "executor 1", "actor 0"])
    def test_while_the_learner_waits(self, name: str, tmp_path: Path) -> None:
        gate = str(tmp_path / "gate")
        os.mkfifo(gate)
        envs = [partial(GatedEnv, gate, at=2), ENDLESS]
        collector = start(envs, num_executors=2)
        raised: list[WorkerError] = []

        def learn() -> None:
            with pytest.raises(WorkerError) as e:
                next(iter(collector))
            raised.append(e.value)

        learner = threading.Thread(target=learn)
        learner.start()
        steps = finished_steps(collector)
        wait_until(lambda: list(steps) == [2, 8])  # the other has finished rounds 0 and 1
        with held_at(gate):
            self.kill(collector, name)
            wait_until(workers(collector).is_closed)
        learner.join()
        assert raised[0].worker == name
        assert_others_ended_by_themselves(collector, name)

    @pytest.mark.parametrize("name", ["executor 0", "actor 0"])
    def test_before_the_environments_are_reset_again(self, name: str) -> None:
        collector = start([ENDLESS] * 2, num_executors=2)
        next(iter(collector))
        self.kill(collector, name)
        with pytest.raises(WorkerError, match=f"{name} .*was killed by SIGKILL"):
            collector.set_seed(3)
        assert_others_ended_by_themselves(collector, name)

    def test_before_the_first_batch(self) -> None:
        collector = start([ENDLESS] * 2, num_executors=2)
        self.kill(collector, "executor 1")
        with pytest.raises(WorkerError, match=r"executor 1 .*was killed by SIGKILL"):
            next(iter(collector))

    @staticmethod
    def kill(collector: HTSCollector, name: str) -> None:
        pid = collector.worker_pids()[name]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))


class Spoilt(nn.Module):
    """Does something bad as soon as its parameter is not zero."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.switch = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        action = torch.ones(observation.shape[:-1], dtype=torch.int64)
        extra = observation[..., :2].clone()
        if self.switch > 0.5:
            if self.fault == "raise":
                raise KeyError("no such neuron")
            if self.fault == "NaN":
                extra[..., 1] = torch.nan
            if self.fault == "shape":
                extra = extra[..., :1]
            if self.fault == "dtype":
                extra = extra.bfloat16()
            if self.fault == "rows":
                action, extra = action.repeat(2), extra.repeat(2, 1)
            if self.fault == "exit":
                os._exit(9)
        return action, extra


class TestPolicies:
    """The policy goes bad after some updates."""

    @pytest.mark.parametrize("num_actors", [1, 2])
    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ("raise", "KeyError: 'no such neuron'"),
            ("NaN", r"NaN in 'extra' for environment\(s\) \[[0-2, ]+\].*check the learning rate"),
            ("shape", r"'extra' of shape \(1,\) per row.*at start-up it was \(2,\)"),
            ("dtype", r"'extra' as torch.bfloat16; at start-up, on the CPU, it was float64"),
            ("rows", "Error"),
        ],
    )
    def test_that_fails(self, fault: str, said: str, num_actors: int) -> None:
        module = Spoilt(fault)
        policy = TensorDictModule(module, ["observation"], ["action", "extra"])
        collector = start([ENDLESS] * 3, policy, num_actors=num_actors, lag=1)
        versions = []
        expected = r"(?s)the policy failed in round 3, for environment\(s\) [0-2, ]+, in actor"
        with pytest.raises(WorkerError, match=f"{expected}.*{said}") as e:  # noqa: PT012
            for batch in collector:
                versions.append(batch["policy_version"][0, 0].item())
                module.switch.data.fill_(len(versions) >= 2)
        assert versions in ([0, 1], [0, 1, 2])  # round 3 is the first that update 1 has spoilt
        assert e.value.worker.startswith("actor")
        assert e.value.env_indices
        assert set(e.value.env_indices) <= {0, 1, 2}
        told = "Traceback" if fault == "raise" else "PolicyError: "
        assert e.value.remote_traceback.startswith(told)
        assert_others_ended_by_themselves(collector)

    def test_whose_parameters_become_nan(self) -> None:
        policy = categorical()
        collector = start([ENDLESS] * 2, policy)
        with pytest.raises(WorkerError, match="the policy returned NaN in 'logits'"):  # noqa: PT012
            for _ in collector:
                for parameter in policy.parameters():
                    parameter.data.fill_(torch.nan)
        assert_others_ended_by_themselves(collector)

    def test_that_ends_the_actor(self) -> None:
        module = Spoilt("exit")
        policy = TensorDictModule(module, ["observation"], ["action", "extra"])
        collector = start([ENDLESS] * 2, policy)
        with pytest.raises(WorkerError, match=r"actor 0 \(pid \d+\) ended with exit code 9"):  # noqa: PT012
            for _ in collector:
                module.switch.data.fill_(1)
        assert_others_ended_by_themselves(collector, "actor 0")
