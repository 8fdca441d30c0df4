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
from torchrl_hts._processes.linux import ON_LINUX
from torchrl_hts._rounds.shared_memory import Field, Layout, SharedMemory
from torchrl_hts.errors import InvalidValueError, WorkerId

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
            (FLOATS, None, "as a NoneType, None; its observation space says float32"),
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
        most = len(os.listdir("/dev/fd")) + 100  # tests before may have left some open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            check_descriptors(4, 1)
            with pytest.raises(
                ResourceError, match=rf"100 executors and 2 .*may have {most}: .*-n \d"
            ):
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
        with pytest.raises(ResourceError, match=r"the free space of .* is .*iB: hold them where"):
            check_storage(1 << 60, str(tmp_path))

    @pytest.mark.parametrize("told", [True, False])
    def test_a_timeline_that_is_too_long_is_named(
        self, monkeypatch: pytest.MonkeyPatch, told: bool
    ) -> None:
        """Where the system doesn't tell what is available, too."""
        if not told:
            monkeypatch.setattr(limits, "available_memory", lambda: None)
        with pytest.raises(ResourceError, match=r"the timeline needs .*: ask for fewer time"):
            HTSCollector([EchoEnv], categorical(), frames_per_batch=4, timeline_events=1 << 40)

    @pytest.mark.parametrize("frames", [1 << 40, 1 << 60])
    @pytest.mark.parametrize("told", [True, False])
    def test_a_collector_says_so_before_it_allocates(
        self, monkeypatch: pytest.MonkeyPatch, told: bool, frames: int
    ) -> None:
        """The advice is another where they are in a file already: without what Linux offers."""
        if not told:
            monkeypatch.setattr(limits, "available_memory", lambda: None)
        advice = "hold the rounds in a file" if ON_LINUX else "hold them where there is more room"
        with pytest.raises(ResourceError, match=rf"the rounds need .*iB.*: {advice}"):
            HTSCollector([EchoEnv], categorical(), frames_per_batch=frames)

    def test_a_file_that_may_not_grow_so_far(self, tmp_path: Path) -> None:
        """Told like too little room, with what the system said."""
        fd = SharedMemory.create_fd(str(tmp_path))
        try:
            layout = Layout(1, 1 << 57, 1, 1, (Field(("x",), (), "float32"),), ())
            with pytest.raises(
                ResourceError, match=r"to allocate .* failed .*: hold them where there is more room"
            ):
                SharedMemory(fd, layout)
        finally:
            os.close(fd)

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
            server.spawn(WorkerId("executor", 0), "worker_targets:serve", ()).hang_up()
            limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (4, limits[1]))
            with pytest.raises(
                ResourceError, match=r"executor 0 could not be started: .*ulimit -n"
            ):
                server.spawn(WorkerId("executor", 0), "worker_targets:serve", ())
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
            worker = server.spawn(WorkerId("executor", 0), "worker_targets:serve", ())
            worker.hang_up()
            assert worker.exit_status(20) == 0
        finally:
            server.close()

    def test_an_interpreter_that_ends_at_its_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        server = WorkerServer(("worker_targets",))
        with pytest.raises(ResourceError, match=r"server \(pid \d+\) ended .* have printed why"):
            server.spawn(WorkerId("executor", 0), "worker_targets:serve", ())
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
        ({"storage_dir": "/proc"}, ValueError, "storage_dir='/proc' is not a directory that can"),
        ({"storage_dir": __file__}, ValueError, "storage_dir=.* is not a directory"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        HTSCollector([EchoEnv], categorical(), frames_per_batch=4, **arguments)
