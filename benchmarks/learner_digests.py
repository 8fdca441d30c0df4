"""Whether several learners give the bits of one, where they might not.

    python benchmarks/learner_digests.py
    python benchmarks/learner_digests.py --learners 1 2 --tasks continuous --updates 20
    python benchmarks/learner_digests.py --hosts --learners 2 4

A2C and PPO (epochs, minibatches, normalised advantages) with `World(shards=...)` and
`DelayedGradient`, on the tasks of `torchrl_hts.testing`: CartPole, CartPole with an LSTM, Pendulum
with a TanhNormal, whose entropy is estimated by samples, and Pong. Each is trained by 1, 2, 4 and 8
learners: quietly with one executor each, and with pauses on the odd ranks, two executors and two
actors. The learners are started by torchrun, once for each number. A row of the table has the first
digits of SHA-256 of the parameters and of all losses. The command ends with an error if a row has
two of them. With --hosts each learner has a host of its own (`_hosts.py`); packets among them take
5 ms each way and are lost with a probability of 0.5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import torch
from _hosts import Hosts, why_not
from _machine import commit, machine
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector, World, keep_servers
from torchrl_hts.bench.command_line import count
from torchrl_hts.testing import TASKS, digest

DEFAULT_TASKS = ["cartpole", "lstm", "continuous", "pong"]
NUM_ENVS, SHARDS = 16, 8
DELAY_S, LOSS = 0.005, 0.005  # among hosts


def total(losses: TensorDictBase) -> Tensor:
    """What is minimised."""
    return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]


def train(world: World, name: str, algorithm: str, varied: bool, updates: int) -> str:
    """The digest of what came of a run."""
    torch.manual_seed(0)
    task = TASKS[name]
    actor, critic = task.build(nn.Identity())
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module: nn.Module = A2CLoss(actor, critic)
    if algorithm == "ppo":
        loss_module = ClipPPOLoss(actor, critic, normalize_advantage=False)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    collector = HTSCollector(
        [task.make_env] * NUM_ENVS,
        actor,
        frames_per_batch=NUM_ENVS * task.sync_interval,
        total_frames=NUM_ENVS * task.sync_interval * updates,
        seed=0,
        num_executors=min(2, NUM_ENVS // world.size) if varied else 1,
        num_actors=2 if varied else 1,
        world=world,
    )
    delayed = DelayedGradient(loss_module, lag=collector.lag)
    seen: list[Tensor] = []

    def learn(parts: list[TensorDictBase]) -> None:
        losses = []
        for part in world.gradients(loss_module, parts):
            losses.append(total(loss_module(part)))
            losses[-1].backward()
        seen.append(world.mean(losses))
        nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    with collector, set_recurrent_mode(task.recurrent):
        for number, batch in enumerate(collector):
            if varied and world.rank % 2:
                time.sleep(0.05 * (number % 3))
            with delayed(batch):
                parts = world.parts(batch)
                for part in parts:
                    with torch.no_grad():
                        advantage(part)
                if algorithm == "a2c":
                    learn(parts)
                elif task.recurrent:  # whole trajectories, several times
                    for _ in range(2):
                        world.normalize(parts)
                        learn(parts)
                else:
                    for epoch in range(2):
                        for minibatch in world.minibatches(parts, 4, seed=0, epoch=epoch):
                            world.normalize(minibatch)
                            learn(minibatch)
    return digest([*loss_module.parameters(), torch.stack(seen)])


def learn_all(options: argparse.Namespace) -> None:
    """What each learner does; the first writes down what came of it."""
    found = {}
    with keep_servers(), World(shards=SHARDS) as world:
        for task in options.tasks:
            for algorithm in ("a2c", "ppo"):
                for varied in (False, True):
                    name = f"{algorithm} {task} {'varied' if varied else 'quiet'}"
                    found[name] = train(world, task, algorithm, varied, options.updates)
        if world.is_first:
            options.write_to.write_text(json.dumps(found))


def run_on_hosts(size: int, script: list[str]) -> None:
    """torchrun on so many hosts, with one learner each."""
    with Hosts(size, delay_s=DELAY_S, loss=LOSS) as hosts:
        each = [subprocess.Popen(hosts.torchrun(host, 1, *script)) for host in range(size)]
        codes = [process.wait() for process in each]
        if any(codes):
            sys.exit("a learner has failed")


def main() -> int:
    """Start the learners, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=count, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=DEFAULT_TASKS)
    parser.add_argument("--updates", type=count, default=10, help="of each run (default: 10)")
    parser.add_argument("--hosts", action="store_true", help="a host for each learner")
    parser.add_argument("--write-to", type=Path, help=argparse.SUPPRESS)  # of a learner
    options = parser.parse_args()
    if options.write_to is not None:
        learn_all(options)
        return 0
    if options.hosts and (reason := why_not()) is not None:
        parser.error(f"--hosts: {reason}")
    found: dict[int, dict[str, str]] = {}
    given = ["--tasks", *options.tasks, "--updates", str(options.updates)]
    with tempfile.TemporaryDirectory() as directory:
        for size in options.learners:
            file = Path(directory, str(size))
            script = [str(Path(__file__).resolve()), *given, "--write-to", str(file)]
            began = time.monotonic()
            if options.hosts:
                run_on_hosts(size, script)
            else:
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                subprocess.run([*launch, "--nproc-per-node", str(size), *script], check=True)
            found[size] = json.loads(file.read_text())
            print(f"{size} learners: {time.monotonic() - began:.0f} s", file=sys.stderr)
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, commit {commit()}\n")
    print("| run |", " | ".join(f"W = {size}" for size in found), "|")
    print("| --- |" + " --- |" * len(found))
    rows: dict[str, Any] = {}
    for name in next(iter(found.values())):
        digests = [found[size][name] for size in found]
        print(f"| {name} |", " | ".join(digests), "|")
        rows.setdefault(name.rpartition(" ")[0], set()).update(digests)
    return 1 if any(len(digests) > 1 for digests in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
