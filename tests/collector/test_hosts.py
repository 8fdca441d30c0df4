"""Collectors in programs of every kind.

Scripts, threads, forks and pools of processes, pytest-xdist, and each start method of
multiprocessing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from environments import EchoEnv
from policies import categorical
from probe import workers
from processes import Script, alive, needs_linux, script_environment, wait_until_gone
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_hts import HTSCollector

pytestmark = pytest.mark.timeout(180)

SECONDS_TO_END = 5.0


@pytest.mark.usefixtures("nothing_left")
class TestOneProgram:
    """Several in one program, and in its threads and forks."""

    @staticmethod
    def make(seed: int = 0, policy: nn.Module | None = None) -> HTSCollector:
        envs = [partial(EchoEnv, (5,)), partial(EchoEnv, (3, 4))]
        policy = policy or categorical()
        return HTSCollector(envs, policy, frames_per_batch=8, num_executors=2, seed=seed)

    @staticmethod
    def take(batches: Iterator[TensorDictBase], count: int) -> list[Tensor]:
        return [next(batches)["observation"] for _ in range(count)]

    def test_two_at_once(self) -> None:
        expected = []
        for seed in (0, 1):
            with self.make(seed) as collector:
                expected.append(torch.stack(self.take(iter(collector), 4)))
        with self.make(0) as one, self.make(1) as other:
            both = [iter(one), iter(other)]
            taken = [self.take(batches, 1)[0] for _ in range(4) for batches in both]
            one.shutdown()
            assert len(self.take(both[1], 1)) == 1
        assert torch.equal(torch.stack(taken[0::2]), expected[0])
        assert torch.equal(torch.stack(taken[1::2]), expected[1])

    def test_in_a_thread(self) -> None:
        with self.make() as collector:
            expected = self.take(iter(collector), 3)
        found: list[list[Tensor]] = []

        def learn(policy: nn.Module) -> None:
            with self.make(0, policy) as collector:
                found.append(self.take(iter(collector), 3))

        # Made here: torch's generator, which they are made with, is one for all threads.
        policies = [categorical() for _ in range(2)]
        threads = [threading.Thread(target=learn, args=(policy,)) for policy in policies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        for observations in found:
            assert torch.equal(torch.stack(observations), torch.stack(expected))

    def test_a_fork_of_the_users_process(self) -> None:
        """It doesn't keep workers alive, nor shut them down, whatever it does with its copy."""
        collector = self.make()
        batches = iter(collector)
        self.take(batches, 1)
        (go_read, go_write), (end_read, end_write) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                collector.shutdown()
                os.write(go_write, b"x")
                os.close(end_write)
                os.read(end_read, 1)  # until the test is over
            finally:
                os._exit(0)
        os.read(go_read, 1)
        self.take(batches, 5)
        collector.shutdown()
        assert alive(child)
        assert {worker.exit_status(0) for worker in workers(collector).processes} == {0}
        os.close(end_write)
        assert os.waitpid(child, 0) == (child, 0)
        for fd in (go_read, go_write, end_read):
            os.close(fd)


SCRIPT = """
import json, os, signal
import gymnasium as gym
import torch
import torchrl_hts.envs
from environments import EchoEnv
from policies import categorical
from probe import server_pids
from torchrl_hts import HTSCollector, WorkerError

print(json.dumps("begun"), flush=True)
REWARD = 3.0

class Own(EchoEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, REWARD, *rest

def make_env():
    return Own() if torchrl_hts.envs else None

def has_torch(pid):
    with open(f"/proc/{pid}/maps") as maps:
        return "libtorch" in maps.read()

def make():
    envs = [make_env, Own, lambda: Own(lengths=(3,))]
    return HTSCollector(envs, categorical(), frames_per_batch=12, num_executors=3)

with make() as collector:
    rewards = next(iter(collector))["next", "reward"].unique().tolist()
    with_torch = [name for name, pid in collector.worker_pids().items() if has_torch(pid)]
print(json.dumps([rewards, with_torch]), flush=True)

for preloads_torch in (False, True):
    collector = make()
    batches = iter(collector)
    next(batches)
    pids = collector.worker_pids()
    (server,) = [pid for pid in server_pids(collector) if has_torch(pid) == preloads_torch]
    os.kill(server, signal.SIGKILL)
    try:
        while True:  # until the signal has done its work
            next(batches)
    except WorkerError as error:
        print(json.dumps([str(error), error.worker, server, [*pids.values()]]), flush=True)
"""


@needs_linux  # to be told at once that a server was killed
def test_a_script_with_classes_of_its_own_and_no_main_guard(tmp_path: Path) -> None:
    """It is run once, its factories come by value, and its executors never import torch.

    And when one of its servers is killed, the collector says so.
    """
    with Script(tmp_path / "script.py", SCRIPT) as script:
        assert script.receive() == "begun"
        assert script.receive() == [[3.0], ["actor 0"]]
        for kind in ("executor", "actor"):
            message, worker, server, pids = script.receive()
            said = rf"{kind} \d .*was killed: the worker server \(pid {server}\) ended .*-9\)"
            assert re.match(said, message), message
            assert worker.startswith(kind)
            wait_until_gone(pids)
        status, errors = script.wait()
        assert (status, errors) == (0, "")


POOL_SCRIPT = """
import json, multiprocessing
from concurrent.futures import ProcessPoolExecutor
from environments import EchoEnv
from policies import categorical
from tensordict.nn import TensorDictSequential
from torchrl_hts import HTSCollector, WorkerError

class Policy(TensorDictSequential):
    pass

class Own(EchoEnv):
    def step(self, action):
        raise ArithmeticError("its own")

def first(make_env):
    with HTSCollector([make_env] * 2, Policy(categorical()), frames_per_batch=8) as collector:
        return list(next(iter(collector)).shape)

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(json.dumps(pool.submit(first, EchoEnv).result()), flush=True)
        try:
            pool.submit(first, Own).result()
        except WorkerError as error:
            print(json.dumps([error.worker, error.failure.name, str(error)]), flush=True)
"""


def test_collectors_in_a_pool_of_spawned_processes(tmp_path: Path) -> None:
    """What the script defines comes by value there too, and a failure comes back as itself."""
    with Script(tmp_path / "script.py", POOL_SCRIPT) as script:
        assert script.receive() == [2, 4]
        worker, failure, message = script.receive()
        assert (worker.partition(" ")[0], failure) == ("executor", "RAISED")
        assert "ArithmeticError: its own" in message
        status, errors = script.wait()
        assert (status, errors) == (0, "")


INNER = """
import json, os
from pathlib import Path
import pytest
from environments import EchoEnv
from policies import categorical
from probe import server_pids
from torchrl_hts import HTSCollector

LEFT = []

@pytest.mark.parametrize("number", range(4))
def test_collects(number, worker_id):
    collector = HTSCollector([EchoEnv] * 2, categorical(), frames_per_batch=8, seed=3)
    pids = [*collector.worker_pids().values(), *server_pids(collector)]
    batch = next(iter(collector))
    LEFT.append(collector)  # not shut down
    found = [worker_id, pids, batch["observation"].tolist()]
    Path(__file__).with_name(f"found-{number}").write_text(json.dumps(found))
    assert number != 3, "one fails"
"""


def test_pytest_xdist(tmp_path: Path) -> None:
    """In two worker processes of pytest at a time, which end by ``os._exit``."""
    (tmp_path / "test_inner.py").write_text(INNER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "test_inner.py"],
        cwd=tmp_path,
        env={key: v for key, v in script_environment().items() if not key.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=270,
    )
    ended = time.monotonic()
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("found-*"))]
    assert {worker for worker, _, _ in found} == {"gw0", "gw1"}
    assert all(observations == found[0][2] for _, _, observations in found)
    wait_until_gone({pid for _, pids, _ in found for pid in pids}, SECONDS_TO_END)
    assert time.monotonic() - ended < SECONDS_TO_END


NESTED = """
import json, multiprocessing
from environments import EchoEnv
from policies import categorical
from probe import server_pids
from torchrl_hts import HTSCollector

class Mine(EchoEnv):
    pass

def work(connection):
    collector = HTSCollector([Mine] * 2, categorical(), frames_per_batch=8, seed=3)
    pids = [*collector.worker_pids().values(), *server_pids(collector)]
    batch = next(iter(collector))
    connection.send([pids, batch["observation"].tolist()])  # and ends without a shutdown

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,))
        process.start()
        theirs.close()
        found = ours.recv()
        process.join()
        print(json.dumps([process.exitcode, *found]), flush=True)
"""


@pytest.mark.timeout(900)  # three imports of torch in turn, on a machine that may be busy
def test_start_methods_of_multiprocessing(tmp_path: Path) -> None:
    """In processes that the user has forked, spawned, or had forked by a server."""
    script = tmp_path / "script.py"
    script.write_text(NESTED)
    done = subprocess.run(
        [sys.executable, script],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    ended = time.monotonic()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [exitcode for exitcode, _, _ in found] == [0, 0, 0], done.stderr
    assert all(observations == found[0][2] for _, _, observations in found)
    wait_until_gone({pid for _, pids, _ in found for pid in pids}, SECONDS_TO_END)
    assert time.monotonic() - ended < SECONDS_TO_END
