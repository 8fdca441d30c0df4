"""What is refused, and how it is said: values, limits of the system, things that can't be sent."""

from __future__ import annotations

import functools
import os
import resource
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from environments import EchoEnv, Scripted, play
from policies import categorical
from torch import nn

from torchrl_hts import HTSCollector, ResourceError
from torchrl_hts._planning.pickling import find_unpicklable, pickle_factories, pickle_policy
from torchrl_hts._processes import limits
from torchrl_hts._processes.fork_server import WorkerServer
from torchrl_hts._processes.limits import (
    available_cores,
    available_memory,
    check_descriptors,
    check_storage,
)
from torchrl_hts._rounds.schedule import Phase, Schedule
from torchrl_hts._rounds.shared_memory import Counter, Field, Layout, SharedMemory
from torchrl_hts._supervision.progress import ProgressWatch, at_work
from torchrl_hts.errors import InvalidValueError

BYTES = gym.spaces.Box(0, 255, (2,), np.uint8)
FLOATS = gym.spaces.Box(-1, 1, (2,), np.float32)
TREE = gym.spaces.Dict({"a": gym.spaces.Dict({"b": FLOATS})})


class TestValues:
    """What an environment returns: refused where writing it would change what it says."""

    @pytest.mark.parametrize(
        ("space", "observation"),
        [
            (FLOATS, np.array([0.5, 1.0])),  # float64
            (FLOATS, [0, 1]),
            (BYTES, np.array([3, 255])),  # int64
            (gym.spaces.Discrete(3), 2),
            (gym.spaces.Discrete(3), np.int32(2)),
            (FLOATS, np.array([np.inf, -np.inf], np.float32)),
        ],
    )
    def test_that_keep_their_meaning(
        self, space: gym.Space[Any], observation: Any, memory_fd: int
    ) -> None:
        written = play(Scripted(space, observation), memory_fd)
        for key in (("observation",), ("next", "observation")):
            assert (written[key][0, 0] == observation).all()

    @pytest.mark.parametrize(
        ("space", "observation", "said"),
        [
            (FLOATS, np.zeros(3, np.float32), r"'observation' of shape \(3,\); .* says \(2,\)"),
            (FLOATS, np.zeros(2, complex), "'observation' of data type complex128; .* float32"),
            (FLOATS, None, "data type object; .* says float32"),
            (BYTES, np.array([0.0, 1.0]), "data type float64; .* says uint8"),
            (BYTES, np.array([3, 256]), "int64 with values from 3 to 256; .* says uint8"),
            (FLOATS, np.array([0, np.nan], np.float32), r"NaN in 'observation', at \[\[1\]\]"),
            (TREE, {"a": {}}, r"without 'a\.b'"),
            (TREE, {"a": {"b": np.full(2, np.nan, np.float32)}}, r"NaN in 'a\.b'"),
        ],
    )
    def test_that_do_not(
        self, space: gym.Space[Any], observation: Any, said: str, memory_fd: int
    ) -> None:
        with pytest.raises(InvalidValueError, match=f"the environment returned .*{said}"):
            play(Scripted(space, observation), memory_fd)

    @pytest.mark.parametrize(
        "reward", [np.nan, None, "much", np.zeros(2), 10**400, np.ma.masked, np.array("x")]
    )
    def test_a_reward_is_a_number(self, reward: Any, memory_fd: int) -> None:
        env = Scripted(FLOATS, np.zeros(2, np.float32), reward)
        with pytest.raises(InvalidValueError, match=r"the reward .*; expected one number"):
            play(env, memory_fd)
        env.reward = np.ones(1)
        assert play(env, memory_fd)["next", "reward"].tolist() == [[[1.0]]]


class TestLimits:
    """Looked at before anything is started."""

    def test_too_few_descriptors(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            check_descriptors(4, 1)
            with pytest.raises(ResourceError, match=r"100 executors and 2 .*may have 200: .*-n \d"):
                check_descriptors(100, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    @pytest.mark.parametrize(
        ("files", "cores"),
        [
            ({}, 8),
            ({"cpu.max": "max 100000\n"}, 8),
            ({"cpu.max": "200000 100000\n"}, 2),
            ({"cpu.max": "250000 100000\n"}, 2.5),
            ({"cpu.max": "5000 100000\n"}, 0.05),
            ({"cpu.max": "1600000 100000\n"}, 8),
            ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
            ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ],
    )
    def test_cores_of_a_container(
        self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: float
    ) -> None:
        """A quota of processor time counts like so many cores; each of the 8 may be run on."""

        def read(path: str) -> str:
            try:
                return files[path.removeprefix("/sys/fs/cgroup/")]
            except KeyError:
                raise FileNotFoundError(path) from None

        monkeypatch.setattr(limits, "allowed_cores", lambda: 8)
        monkeypatch.setattr(limits, "read_system_file", read)
        assert available_cores() == cores

    def test_too_little_memory(self) -> None:
        available = available_memory()
        if available is None:
            pytest.skip("this system doesn't say what is available")
        check_storage(available // 2, None)
        with pytest.raises(ResourceError, match=r"need .*GiB, and the memory .* with storage_dir"):
            check_storage(available * 2, None)

    def test_too_little_room_in_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ResourceError, match=r"the free space of .* is .*iB: choose"):
            check_storage(1 << 60, str(tmp_path))

    def test_a_collector_says_so_before_it_allocates(self) -> None:
        with pytest.raises(ResourceError, match=r"the rounds need .*( is .*iB|bytes of storage)"):
            HTSCollector([EchoEnv], categorical(), frames_per_batch=1 << 40)

    def test_rounds_in_a_file(self, tmp_path: Path) -> None:
        """Allocated at once, and without a name."""
        fd = SharedMemory.create_fd(str(tmp_path))
        try:
            layout = Layout(1, 1024, 1, 1, (Field(("x",), (64,), "float32"),), ())
            memory = SharedMemory(fd, layout)
            assert os.fstat(fd).st_blocks * 512 >= layout.num_bytes
            memory.fields(1)["x",][:] = 3
            assert (SharedMemory(fd, layout).fields(1)["x",] == 3).all()
            assert list(tmp_path.iterdir()) == []
        finally:
            os.close(fd)

    @pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets another process's limit")
    def test_a_server_that_may_open_no_more(self) -> None:
        """It says so, and goes on: it isn't the end of the workers that it has."""
        server = WorkerServer(("worker_targets",))
        try:
            server.spawn("worker", "worker_targets:serve", ()).hang_up()
            limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (4, limits[1]))
            with pytest.raises(ResourceError, match=r"worker could not be started: .*ulimit -n"):
                server.spawn("worker", "worker_targets:serve", ())
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
            worker = server.spawn("worker", "worker_targets:serve", ())
            worker.hang_up()
            assert worker.exit_status(20) == 0
        finally:
            server.close()


class TestPickling:
    """The innermost part that can't be pickled is named."""

    def test_a_policy(self) -> None:
        policy = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
        policy[1][0].lock = threading.Lock()
        with pytest.raises(TypeError, match=r"It is policy\.1\.0\.lock, a _thread\.lock"):
            pickle_policy(policy)

    def test_a_closure(self) -> None:
        lock = threading.Lock()

        def make() -> Any:
            return lock

        with pytest.raises(
            TypeError, match=r"create_env_fn\[1\]: its variable 'lock', a _thread\.lock"
        ):
            pickle_factories([EchoEnv, make])

    def test_a_default_and_a_bound_method(self) -> None:
        holder = {"deep": [1, (threading.Lock(),)]}
        found = find_unpicklable(functools.partial(print, holder), "f")
        assert found is not None
        assert found[0] == "f.args[0]['deep'][1][0]"
        assert find_unpicklable(functools.partial(print, 1), "f") is None


class TestProgress:
    """Who owes something, by the words alone."""

    def test_at_work(self) -> None:
        schedule = Schedule(3, 1, 0)
        counters = np.zeros((4, len(Counter)), np.int64)  # 2 executors, 2 actors
        owner = (0, 0, 1)
        assert set(at_work(schedule, counters, owner)) == {"executor 0", "executor 1"}
        for env in range(3):
            schedule.offer(env)
        idle = at_work(schedule, counters, owner)
        assert set(idle) == {"actor 0", "actor 1"}
        counters[3, Counter.EVENTS] += 1  # progress of one is progress of those that wait
        later = at_work(schedule, counters, owner)
        assert all(later[name] != idle[name] for name in idle)

        schedule.take([0])
        counters[3, Counter.AT] = 1  # an actor has something in hand, and maybe hangs
        schedule.take([2])
        schedule.answer([2])
        working = at_work(schedule, counters, owner)
        assert set(working) == {"executor 1", "actor 1"}, "an idle actor is not to blame"
        counters[3, Counter.EVENTS] += 1
        after = at_work(schedule, counters, owner)
        assert after["actor 1"] != working["actor 1"]
        assert after["executor 1"] == working["executor 1"]
        schedule.answer([0])
        counters[3, Counter.AT] = 0
        assert set(at_work(schedule, counters, owner)) == {
            f"{kind} {i}" for i in (0, 1) for kind in ("actor", "executor")
        }

    def test_an_actor_owes_nothing_that_may_not_have_been_announced(self) -> None:
        schedule = Schedule(2, 5, 1, phase=[int(Phase.READY), int(Phase.ANSWERED)])
        counters = np.zeros((2, len(Counter)), np.int64)
        counters[0, Counter.AT] = 2  # in the midst of a step of environment 1
        assert set(at_work(schedule, counters, (0, 0))) == {"executor 0"}
        schedule.phase[1] = Phase.READY
        counters[0, Counter.AT] = 0
        assert set(at_work(schedule, counters, (0, 0))) == {"actor 0"}

    def test_nobody_owes_anything_in_a_round_that_is_not_open(self) -> None:
        schedule = Schedule(1, 1, 0)
        schedule.offer(0)
        schedule.take([0])
        schedule.answer([0])
        schedule.finish_step(0)
        assert schedule.phase[0] == Phase.IDLE
        assert at_work(schedule, np.zeros((2, len(Counter)), np.int64), (0,)) == {}

    def test_a_kind_without_a_time_out_may_take_any_time(self) -> None:
        watch = ProgressWatch({"actor": 1.0})
        for now in (0.0, 100.0):
            assert watch.overdue({"executor 0": 1}, now) is None
        assert watch.interval_s == 1 / 8
        assert ProgressWatch({}).interval_s is None

    def test_what_was_settled_counts_anew(self) -> None:
        watch = ProgressWatch({"actor": 1.0})
        watch.overdue({"actor 0": 1}, 0.0)
        watch.overdue({}, 0.5)
        assert watch.overdue({"actor 0": 1}, 1.5) is None
        assert watch.overdue({"actor 0": 1}, 2.5) == "actor 0"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"on_executor_failure": "ignore"}, ValueError, "on_executor_failure must be 'raise' or"),
        ({"max_restarts": 0}, ValueError, "max_restarts must be at least 1"),
        ({"restart_window_s": "long"}, TypeError, "restart_window_s must be a number of seconds"),
        ({"restart_window_s": -1}, ValueError, "restart_window_s must be more than 0"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be more than 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be more than 0"),
        ({"timeout_s": {"learner": 1}}, ValueError, "timeout_s has the key 'learner'"),
        ({"timeout_s": {"actor": True}}, TypeError, r"timeout_s\['actor'\] must be a number"),
        ({"storage_dir": 3}, TypeError, "storage_dir must be a path"),
        ({"storage_dir": "/no/such/place"}, ValueError, "storage_dir=.* is not a directory"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        HTSCollector([EchoEnv], categorical(), frames_per_batch=4, **arguments)
