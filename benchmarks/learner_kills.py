"""What becomes of a run of several learners when something happens to it.

    python benchmarks/learner_kills.py
    python benchmarks/learner_kills.py --task pong --kills 5
    python benchmarks/learner_kills.py --cut
    python benchmarks/learner_kills.py --crash --learners 4

A recipe learns under ``torchrun --max-restarts 3`` with `--shards`. It is left alone once. Then a
rank, of which and when is drawn from a seed, gets SIGKILL, so many times. Then torchrun gets SIGINT
and SIGTERM, and one rank gets SIGTERM. One can write no more files, as on a full disk. And a
learning rate makes the training diverge. A run that was stopped is resumed. Each row says how long
it took from then to the end of torchrun, and its exit code. It says whether the final policy has
the bits of the run that was left alone, and what was left: processes that the run has started, and
shared memory. The command ends with an error if a policy has other bits, or anything was left.

With --cut each learner has a host (`_hosts.py`, as root), under ``torchrun --nnodes 1:LEARNERS``,
and the last host is cut off. The others are to go on, from the newest checkpoint. With --crash all
processes of the last host are killed instead; in a second run it then comes back.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from _hosts import Hosts, why_not
from _machine import commit, machine
from _recipes import RECIPES, environment

from torchrl_hts.bench.command_line import count
from torchrl_hts.testing import digest

TOTAL = {"cartpole": 10_240, "pong": 4_000}  # steps
TASKS = {
    "cartpole": "ppo_cartpole.py --num-envs 8 --minibatch-size 64 --total-frames 10240 "
    "--log-interval 1280 --checkpoint-interval 1280 --eval-interval 0",
    "pong": "a2c_atari.py --env-id ALE/Pong-v5 --num-envs 8 --total-frames 4000 "
    "--log-interval 400 --checkpoint-interval 400 --eval-interval 0",
}
NO_MORE_BYTES = 4_096  # in a file
PATIENCE_S = 900.0
GRACE_S = 30.0  # which torchrun has to end its learners
SHARED = Path("/dev/shm")


class Launch:
    """torchrun with a recipe, in a session of its own.

    Args:
        learners: how many.
        recipe: and its flags.
        directory: of the run.
        hosts: with one learner each, where there are any.
    """

    def __init__(
        self, learners: int, recipe: str, directory: Path, hosts: Hosts | None = None
    ) -> None:
        self._mark = f"LEARNER_KILLS={uuid.uuid4().hex}"
        self._shared = set(os.listdir(SHARED))
        name, _, value = self._mark.partition("=")
        script = [str(RECIPES / recipe.split()[0]), *shlex.split(recipe)[1:]]
        if "--resume" not in script:
            script += ["--output-dir", str(directory)]
        script = ["--max-restarts", "3", *script]
        if hosts is None:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            self._commands = [[*command, "--nproc-per-node", str(learners), *script]]
        else:
            hosts_of = range(learners)
            self._commands = [hosts.torchrun(host, 1, *script, fewest=1) for host in hosts_of]
        numbers = range(len(self._commands))
        self._logs = [directory.with_suffix(f".{number}.log") for number in numbers]
        self._env = {**environment(), name: value}
        self._processes = [self._begin(number) for number in numbers]
        self._checkpoints = directory / "checkpoints"
        atexit.register(self.end)  # Ctrl-C doesn't reach other sessions

    def _begin(self, number: int) -> subprocess.Popen[bytes]:
        with self._logs[number].open("a") as log:
            return subprocess.Popen(
                self._commands[number],
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    def come_back(self, host: int) -> None:
        """Start torchrun on a host once more, where it has ended."""
        self._processes[host].wait()
        self._processes[host] = self._begin(host)

    def newest(self) -> tuple[int, int]:
        """The step of the newest checkpoint, and how many learners have written it."""
        newest = max(self._checkpoints.glob("step-*.pt"))
        others = len([*self._checkpoints.glob(f"{newest.stem}.part-*-of-*")])
        return int(newest.stem[5:]), 1 + others

    def wait_for_checkpoint(self, step: int = 1) -> None:
        """Return when the run has one of this step, or a later one."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(int(path.stem[5:]) >= step for path in self._checkpoints.glob("step-*.pt")):
            if time.monotonic() > deadline or self._processes[0].poll() is not None:
                raise RuntimeError(f"the run has not begun: {self._logs[0].read_text()[-2000:]}")
            time.sleep(0.05)

    def send(self, number: int, rank: int | None = None) -> None:
        """A signal to a rank, or to torchrun."""
        pid = self._processes[0].pid if rank is None else self._rank(rank)
        os.kill(pid, number)

    def stop_writing(self, rank: int) -> None:
        """Let a rank write no more, whatever room there is."""
        limit = (NO_MORE_BYTES, NO_MORE_BYTES)
        resource.prlimit(self._rank(rank), resource.RLIMIT_FSIZE, limit)

    def wait(self) -> tuple[float, int]:
        """Seconds from now to torchrun's end, and its exit code; the first host's of several."""
        began = time.monotonic()
        code = self._processes[0].wait(PATIENCE_S)
        return time.monotonic() - began, code

    def end(self) -> None:
        """End what has not ended."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:  # waits for a host that is cut off
                process.kill()
                process.wait()

    def left(self) -> str:
        """What is still there, a moment after the end."""
        deadline = time.monotonic() + 5
        while True:
            processes = len(self._started())
            shared = {n for n in set(os.listdir(SHARED)) - self._shared if n.startswith("torch_")}
            if not (processes or shared) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        found = [f"{processes} processes"] * bool(processes)
        return ", ".join(found + [f"{len(shared)} segments"] * bool(shared)) or "nothing"

    def _rank(self, rank: int) -> int:
        """The process that is a rank; workers have its environment too."""
        parents = {
            pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in self._started(f"RANK={rank}")
        }
        return next(p for p, parent in parents.items() if parent == self._processes[0].pid)

    def _started(self, also: str | None = None) -> list[int]:
        """Those that the launch has started, whoever is their parent now."""
        found = []
        wanted = {each.encode() for each in (self._mark, also) if each is not None}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted <= set(path.read_bytes().split(b"\0")):
                    found.append(int(path.parent.name))
        return found


class Moment(NamedTuple):
    """When something happens to a run.

    Attributes:
        step: there is a checkpoint of this step, or a later one,
        after_s: and so many seconds have passed since.
    """

    step: int
    after_s: float


class Table:
    """Runs what its rows are about, and prints them.

    Args:
        learners: how many.
        recipe: and its flags.
        parent: where runs lie.
    """

    def __init__(self, learners: int, recipe: str, parent: Path) -> None:
        self._learners, self._parent = learners, parent
        self._recipe = f"{recipe} --shards {learners}"
        self._expected: str | None = None
        self._number = 0
        self.wrong = 0  # rows that should not be as they are

    def start(self, more: str = "", hosts: Hosts | None = None) -> tuple[Launch, Path]:
        """A run of its own."""
        self._number += 1
        directory = self._parent / f"run{self._number}"
        recipe = f"{self._recipe} {more}"
        return Launch(self._learners, recipe, directory, hosts), directory

    def row(self, what: str, took_s: float, code: int, directory: Path, left: str) -> None:
        """Print one; the first is of what others are compared with.

        Raises:
            SystemExit: if the first has no policy.
        """
        newest = directory / "policy.pt"
        found = digest(torch.load(newest).values()) if newest.exists() else None
        if self._expected is None and found is None:
            sys.exit(f"error: {what}, a run left no policy to compare with; exit code {code}")
        self._expected = self._expected or found
        same = "none" if found is None else "same" if found == self._expected else "other"
        self.wrong += same == "other" or left != "nothing"
        print(f"| {what} | {took_s:.0f} | {code} | {same} | {left} |", flush=True)

    def happens(self, what: str, do: Callable[[Launch], object], moment: Moment) -> Path:
        """Something to a run, at a moment."""
        launch, directory = self.start()
        launch.wait_for_checkpoint(moment.step)
        time.sleep(moment.after_s)
        do(launch)
        took_s, code = launch.wait()
        when = f"{moment.after_s:.2f} s after a checkpoint from step {moment.step:,} on"
        self.row(f"{what}, {when}", took_s, code, directory, launch.left())
        return directory

    def resume(self, directory: Path) -> None:
        """What was stopped."""
        launch = Launch(
            self._learners, f"{self._recipe.split()[0]} --resume {directory}", directory
        )
        self.row("its resumption", *launch.wait(), directory, launch.left())


def alone(table: Table) -> None:
    """A run that nothing happens to."""
    launch, directory = table.start()
    launch.wait_for_checkpoint()
    table.row("left alone", *launch.wait(), directory, launch.left())


def kill(table: Table, options: argparse.Namespace) -> None:
    """All that happens on one machine."""
    drawn = random.Random(options.seed)
    alone(table)

    def moment() -> tuple[int, Moment]:
        step = round(drawn.uniform(0, 0.7) * TOTAL[options.task])
        return drawn.randrange(options.learners), Moment(step, drawn.uniform(0, 1))

    for _ in range(options.kills):
        rank, when = moment()
        table.happens(f"SIGKILL to rank {rank}", partial(_send, signal.SIGKILL, rank), when)
    for number in (signal.SIGINT, signal.SIGTERM):
        stopped = table.happens(
            f"{number.name} to torchrun", partial(_send, number, None), moment()[1]
        )
        table.resume(stopped)
    rank, when = moment()
    table.happens(f"SIGTERM to rank {rank}", partial(_send, signal.SIGTERM, rank), when)
    rank, when = moment()
    table.happens(f"a full disk on rank {rank}", lambda launch: launch.stop_writing(rank), when)
    launch, directory = table.start("--learning-rate 1e30")
    table.row("a training that diverges", *launch.wait(), directory, launch.left())


def _send(number: int, rank: int | None, launch: Launch) -> None:
    launch.send(number, rank)


def lose_host(table: Table, options: argparse.Namespace) -> None:
    """A host that goes; and one that comes back, where that can be."""
    alone(table)
    host_goes(table, options, returns=False)
    if options.crash:
        host_goes(table, options, returns=True)


def host_goes(table: Table, options: argparse.Namespace, returns: bool) -> None:
    """The last one."""
    last = options.learners - 1
    what = f"the last of {options.learners} hosts {'ends' if options.crash else 'is cut off'}"
    with Hosts(options.learners) as hosts:
        launch, directory = table.start(hosts=hosts)
        launch.wait_for_checkpoint(TOTAL[options.task] // 4)
        (hosts.crash if options.crash else hosts.cut)(last)
        if returns:
            launch.wait_for_checkpoint(launch.newest()[0] + 1)
            what += f" and comes back while {launch.newest()[1]} learn"
            launch.come_back(last)
        took_s, code = launch.wait()
        what += f"; {launch.newest()[1]} learn in the end"
        launch.end()
        table.row(what, took_s, code, directory, launch.left())


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="cartpole")
    parser.add_argument("--learners", type=count, default=2)
    parser.add_argument("--kills", type=int, default=10, help="of a rank (default: 10)")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--cut", action="store_true", help="cut a host off, and nothing else")
    hosts.add_argument("--crash", action="store_true", help="end a host, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    options = parser.parse_args()
    loses_host = options.cut or options.crash
    if loses_host and (reason := why_not()) is not None:
        parser.error(f"hosts: {reason}")
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, commit {commit()}\n")
    print("| what | s to the end | exit code | policy | left |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as parent:
        table = Table(options.learners, TASKS[options.task], Path(parent))
        (lose_host if loses_host else kill)(table, options)
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
