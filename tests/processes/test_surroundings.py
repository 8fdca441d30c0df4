"""Workers inherit from the main process what it has when their collector is made.

The servers that they are forked from are older in all of these tests (`warm_servers`).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collectors import start
from environments import EchoEnv
from policies import categorical
from probe import set_worker_limit
from processes import needs_linux
from tensordict.nn import composite_lp_aggregate, set_composite_lp_aggregate
from torch import nn

from torchrl_hts._evaluation.evaluator import Evaluator
from torchrl_hts._processes.fork_server import WorkerServer
from torchrl_hts._processes.messages import pickled, receive_object, send_object
from torchrl_hts._processes.server_pool import (
    TORCH_FREE,
    ServerUser,
    acquire_server,
    release_servers,
)
from torchrl_hts._processes.surroundings import Surroundings
from torchrl_hts.errors import WorkerError, WorkerId

pytestmark = pytest.mark.usefixtures("collectors_end")

NAMES = ("HTS_TEST_ADDED", "HTS_TEST_CHANGED", "HTS_TEST_REMOVED", "OMP_NUM_THREADS")


class OurWarning(UserWarning):
    """A category that workers don't know until somebody sends it."""


def surroundings() -> dict[str, Any]:
    """What this process has inherited, as JSON takes it."""
    umask = os.umask(0)
    os.umask(umask)
    with warnings.catch_warnings(record=True) as shown:  # keeps the filters
        for category in (UserWarning, OurWarning, RuntimeWarning):
            try:
                warnings.warn("said", category, stacklevel=1)
            except Warning as raised:
                shown.append(warnings.WarningMessage(raised, type(raised), "", 0))
                shown[-1].source = "raised"
    return {
        "environ": [os.environ.get(name) for name in NAMES],
        "to C": _getenv("HTS_TEST_ADDED"),
        "directory": os.getcwd(),
        "umask": umask,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "path": sys.path[-1],
        "argv": sys.argv,
        "warnings": [[w.category.__name__, w.source] for w in shown],
        "authkey": multiprocessing.current_process().authkey.hex(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "zone": time.tzname[0],
        "adds up log-probabilities": _adds_up(),
    }


def _adds_up() -> bool:
    """By TensorDict, or by what it will read where it is imported."""
    if "tensordict.nn" in sys.modules:
        return composite_lp_aggregate()
    return os.environ.get("COMPOSITE_LP_AGGREGATE") == "True"


def _getenv(name: str) -> str | None:
    """What libraries in C see."""
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    found = get(name.encode())
    return None if found is None else found.decode()


def tell(file: Path) -> None:
    """Write down what this process has inherited."""
    with file.open("a") as lines:
        lines.write(json.dumps([os.getpid(), surroundings()]) + "\n")


def told(file: Path) -> list[dict[str, Any]]:
    """What other processes have written down."""
    lines = map(json.loads, file.read_text().splitlines())
    return [found for pid, found in lines if pid != os.getpid()]


class TellingEnv(EchoEnv):
    """Tells where it is made."""

    def __init__(self, file: Path, *, fails: bool = False) -> None:
        super().__init__((10**9,))
        self.fails = fails
        tell(file)

    def step(self, action: Any) -> Any:
        if self.fails and self.t == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Telling(nn.Module):
    """Tells where it is run."""

    def __init__(self, file: Path, policy: nn.Module) -> None:
        super().__init__()
        self.file, self.policy = file, policy
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def forward(self, tensordict: Any) -> Any:
        tell(self.file)
        return self.policy(tensordict)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another working directory, and all else too, than when the servers were started."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    core = resource.getrlimit(resource.RLIMIT_CORE)
    umask = os.umask(0o037)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    resource.setrlimit(resource.RLIMIT_NOFILE, (1017, files[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed=3"])
    monkeypatch.setenv("HTS_TEST_ADDED", "1")
    monkeypatch.setenv("TZ", "XYZ-3")
    time.tzset()
    try:
        with warnings.catch_warnings(), set_composite_lp_aggregate(True):
            warnings.resetwarnings()
            warnings.simplefilter("always")
            warnings.filterwarnings("error", category=OurWarning)
            warnings.filterwarnings("ignore", "sa+id", category=RuntimeWarning)
            yield folder
    finally:
        os.umask(umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        resource.setrlimit(resource.RLIMIT_CORE, core)
        monkeypatch.undo()
        time.tzset()


def expected() -> dict[str, Any]:
    here = json.loads(json.dumps(surroundings()))
    here["environ"][NAMES.index("OMP_NUM_THREADS")] = "1"
    return here


def test_those_of_a_collector_made_beside_another(elsewhere: Path) -> None:
    """Environments, the probe's too, and the policy, in servers that another collector uses."""
    other = start([EchoEnv])
    file, of_policy = elsewhere / "told", elsewhere / "policy"
    collector = start([partial(TellingEnv, file)] * 2, Telling(of_policy, categorical()))
    assert told(file) == [expected()] * 3  # one was made by the probe
    assert told(of_policy)
    assert all(line == expected() for line in told(of_policy))
    assert expected()["warnings"] == [["UserWarning", None], ["OurWarning", "raised"]]
    collector.shutdown()
    other.shutdown()


class Precise(Telling):
    """Tells how exactly torch multiplies where it is run."""

    def forward(self, tensordict: Any) -> Any:
        with self.file.open("a") as lines:
            lines.write(f"{os.getpid()} {torch.get_float32_matmul_precision()}\n")
        return self.policy(tensordict)


def test_a_policy_multiplies_as_in_this_process(tmp_path: Path) -> None:
    other = start([EchoEnv])  # its server is older
    before, file = torch.get_float32_matmul_precision(), tmp_path / "told"
    torch.set_float32_matmul_precision("medium")
    try:
        start([EchoEnv], Precise(file, categorical())).shutdown()
        with Evaluator(EchoEnv, Precise(file, categorical()), num_episodes=1) as evaluator:
            evaluator.submit(0)
            evaluator.wait()
    finally:
        torch.set_float32_matmul_precision(before)
        other.shutdown()
    found = [line.split() for line in file.read_text().splitlines()]
    assert {precision for _, precision in found} == {"medium"}
    assert len({pid for pid, _ in found} - {str(os.getpid())}) == 2


class PreciseByBackend(Telling):
    """Tells how exactly oneDNN multiplies where it is run."""

    def forward(self, tensordict: Any) -> Any:
        found = importlib.import_module("torch").backends.mkldnn.matmul.fp32_precision
        with self.file.open("a") as lines:
            lines.write(f"{found}\n")
        return self.policy(tensordict)


def test_a_precision_that_is_set_by_backends(tmp_path: Path) -> None:
    other, before = start([EchoEnv]), torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        start([EchoEnv], PreciseByBackend(tmp_path / "told", categorical())).shutdown()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
        other.shutdown()
    assert {*(tmp_path / "told").read_text().split()} == {"bf16"}


def test_those_of_an_evaluator(elsewhere: Path) -> None:
    file = elsewhere / "told"
    with Evaluator(partial(TellingEnv, file), categorical(), num_episodes=2):
        assert told(file) == [expected()] * 2


def test_a_worker_that_is_replaced_gets_those_of_its_collector(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = elsewhere / "told"
    collector = start(
        [partial(TellingEnv, file, fails=True)], on_executor_failure="restart", num_executors=1
    )
    before = expected()
    monkeypatch.chdir("/")
    monkeypatch.setenv("HTS_TEST_CHANGED", "too late")
    os.umask(0o022)
    with pytest.warns(RuntimeWarning, match="was killed by SIGKILL"):
        next(iter(collector))
    assert len(told(file)) > 1
    assert all(line == before for line in told(file))


def test_a_variable_that_was_there_when_the_server_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTS_TEST_REMOVED", "1")
    monkeypatch.setenv("HTS_TEST_CHANGED", "1")
    server = WorkerServer((*TORCH_FREE, "test_surroundings"))
    try:
        monkeypatch.delenv("HTS_TEST_REMOVED")
        monkeypatch.setenv("HTS_TEST_CHANGED", "2")
        assert asked(server)["environ"] == [None, "2", None, "1"]
    finally:
        server.close()


def asked(server: WorkerServer) -> dict[str, Any]:
    inheritance = pickled((Surroundings.here(),))
    worker = server.spawn(WorkerId("executor", 0), "worker_targets:serve", (), inheritance)
    send_object(worker.control, ("call", surroundings))
    found: dict[str, Any] = receive_object(worker.control)
    worker.hang_up()
    worker.exit_status(20)
    worker.close()
    return found


def test_a_umask_that_can_only_be_read_by_setting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> str:
        raise FileNotFoundError(path)

    before = Surroundings.here().umask
    monkeypatch.setattr("torchrl_hts._processes.surroundings.read_system_file", missing)
    assert Surroundings.here().umask == before == Surroundings.here().umask


def test_a_hard_limit_that_may_not_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft one is raised as far as that goes."""
    found: list[tuple[int, int]] = []

    def set_limit(limit: int, wanted: tuple[int, int]) -> None:
        if wanted[1] > 100:
            raise ValueError("not allowed to raise maximum limit")
        found.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda limit: (50, 100))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    for soft, hard in ((200, 200), (70, 200), (20, 90)):
        set_worker_limit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [(100, 100), (70, 100), (20, 90)]


@needs_linux
def test_cores() -> None:
    """Those that the collector counts."""
    all_cores = os.sched_getaffinity(0)
    user = ServerUser()
    server = acquire_server(TORCH_FREE, user)
    os.sched_setaffinity(0, {min(all_cores)})
    try:
        assert asked(server)["cores"] == [min(all_cores)]
    finally:
        os.sched_setaffinity(0, all_cores)
        release_servers(user)


def test_a_module_of_a_folder_that_was_added(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "hts_test_added_module.py").write_text("from environments import EchoEnv\n")
    monkeypatch.syspath_prepend(tmp_path)

    def make_env() -> Any:
        return importlib.import_module("hts_test_added_module").EchoEnv()

    assert next(iter(start([make_env] * 2))).shape == (2, 4)


def test_modules_that_warn_as_a_factory_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main process has heard it, before its filters made errors of warnings."""
    (tmp_path / "hts_test_warns.py").write_text(
        "import warnings\nfrom environments import EchoEnv\nwarnings.warn('old')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="old"):
        make_env = importlib.import_module("hts_test_warns").EchoEnv
    monkeypatch.setattr(make_env, "__module__", "hts_test_warns")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = start([make_env] * 2)
    assert next(iter(collector)).shape == (2, 4)


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=r"has been removed.*os\.chdir\(\) before"):
        start([EchoEnv])
    with pytest.raises(FileNotFoundError, match=r"has been removed.*os\.chdir\(\) before"):
        Evaluator(EchoEnv, categorical())
    os.chdir(tmp_path)  # the advice
    assert next(iter(start([EchoEnv]))).shape == (1, 4)


def test_a_working_directory_that_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "going", tmp_path / "told"
    folder.mkdir()
    monkeypatch.chdir(folder)
    make_env = partial(TellingEnv, file, fails=True)
    collector = start([make_env], on_executor_failure="restart", num_executors=1)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(folder)
    said = r"'.*going', in which the collector was made, can't be entered any more"
    with pytest.warns(RuntimeWarning), pytest.raises(WorkerError, match=said):
        for _ in collector:
            pass
