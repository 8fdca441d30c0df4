"""Training tasks whose digests are compared over a grid of workers and delays."""

from __future__ import annotations

import torchrl_hts._processes.versions  # noqa: F401  (before torchrl)

# isort: split

import argparse
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    ConvNet,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts._processes.server_pool import keep_servers
from torchrl_hts._world.digest import digest
from torchrl_hts.bench.command_line import count
from torchrl_hts.collector import HTSCollector
from torchrl_hts.delayed_gradient import DelayedGradient
from torchrl_hts.delayed_gradient.running_norm import RunningNorm
from torchrl_hts.envs.drawing import DrawingEnv
from torchrl_hts.errors import HTSError
from torchrl_hts.errors.checks import check_integer

__all__ = ["TASKS", "RandomDelay", "Task", "digest", "train"]

_MAX_DELAY_S = 0.003


class RandomDelay(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before each step for a time that no seed determines.

    Args:
        env: any environment of gymnasium.
    """

    def step(self, action: Any) -> Any:
        """Sleep, then step."""
        time.sleep(random.SystemRandom().uniform(0, _MAX_DELAY_S))
        return super().step(action)


class _SlowIdentity(nn.Module):
    """Sleeps in a forward pass without gradients, so in actors and not in the learner."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            time.sleep(random.SystemRandom().uniform(0, _MAX_DELAY_S))
        return x


@dataclass(frozen=True)
class Task:
    """An environment and a model to train on it.

    Attributes:
        make_env: makes the environment.
        build: makes (policy, critic) from a module to put in front of the network.
        sync_interval: alpha.
        recurrent: whether the loss is to see whole rows.
        draws_globally: whether its environments draw from generators that a process has one of.
            Those of a batch share them, so that its bits are others than those of single ones.
    """

    make_env: Callable[[], gym.Env[Any, Any]]
    build: Callable[[nn.Module], tuple[nn.Module, nn.Module]]
    sync_interval: int = 8
    recurrent: bool = False
    draws_globally: bool = False


def _categorical(net: nn.Module, **kwargs: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        net,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        **kwargs,
    )


def _value(num_inputs: int) -> ValueOperator:
    return ValueOperator(MLP(num_inputs, 1, num_cells=[32]), in_keys=["observation"])


def _cartpole(front: nn.Module) -> tuple[nn.Module, nn.Module]:
    net = nn.Sequential(front, MLP(4, 2, num_cells=[64, 64]))
    return _categorical(TensorDictModule(net, ["observation"], ["logits"])), _value(4)


def _pendulum(front: nn.Module) -> tuple[nn.Module, nn.Module]:
    norm = RunningNorm(3)
    net = nn.Sequential(front, norm, MLP(3, 2, num_cells=[32, 32]), NormalParamExtractor())
    policy = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )
    critic = nn.Sequential(norm, MLP(3, 1, num_cells=[32]))
    return policy, ValueOperator(critic, in_keys=["observation"])


def _cartpole_lstm(front: nn.Module) -> tuple[nn.Module, nn.Module]:
    net = TensorDictSequential(
        TensorDictModule(nn.Sequential(front, nn.Linear(4, 16)), ["observation"], ["embedding"]),
        LSTMModule(input_size=16, hidden_size=16, in_key="embedding", out_key="features"),
        TensorDictModule(nn.Linear(16, 2), ["features"], ["logits"]),
    )
    return _categorical(net), _value(4)


class _Scale(nn.Module):
    """Pixels to [0, 1]."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.float() / 255


def _pixels(
    front: nn.Module, *, planes: int, cells: int, actions: int
) -> tuple[nn.Module, nn.Module]:
    # TorchRL's ConvNet takes any number of leading axes, such as a batch's [N, T].
    conv = ConvNet(
        in_features=planes, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1]
    )
    trunk = nn.Sequential(front, _Scale(), conv, nn.Linear(64 * cells, 512), nn.ReLU())
    model = ActorValueOperator(
        TensorDictModule(trunk, ["observation"], ["features"]),
        _categorical(TensorDictModule(nn.Linear(512, actions), ["features"], ["logits"])),
        ValueOperator(nn.Linear(512, 1), in_keys=["features"]),
    )
    return model.get_policy_operator(), model.get_value_operator()


def _make_pong() -> gym.Env[Any, Any]:
    from torchrl_hts.envs import make_atari

    return make_atari("ALE/Pong-v5")


def _make_football(engine: Literal["gfootball", "envpool"]) -> gym.Env[Any, Any]:
    from torchrl_hts.envs import make_football

    return make_football("academy_empty_goal_close", engine=engine)


_pong = partial(_pixels, planes=4, cells=7 * 7, actions=6)
_football = partial(_pixels, planes=16, cells=5 * 8, actions=19)

TASKS: dict[str, Task] = {
    "cartpole": Task(partial(gym.make, "CartPole-v1"), _cartpole),
    "continuous": Task(partial(gym.make, "Pendulum-v1"), _pendulum),
    "lstm": Task(partial(gym.make, "CartPole-v1"), _cartpole_lstm, recurrent=True),
    "draws": Task(DrawingEnv, _cartpole, draws_globally=True),
    "draws-torch": Task(partial(DrawingEnv, "made"), _cartpole, draws_globally=True),
    "pong": Task(_make_pong, _pong, sync_interval=4),
    "gfootball": Task(partial(_make_football, "gfootball"), _football, sync_interval=12),
    "envpool": Task(partial(_make_football, "envpool"), _football, sync_interval=12),
}
# What needs no extra, and by default what needs no engine of football.
_EVERYWHERE = ["cartpole", "continuous", "lstm", "draws", "draws-torch"]
# What the others need: a module, and how it is installed.
_NEEDS = {
    "pong": ("ale_py", "pip install 'torchrl_hts[atari]'"),
    "gfootball": ("gfootball_engine", "make football"),
    "envpool": ("envpool", "pip install 'torchrl_hts[envpool]'"),
}


def _delayed(make_env: Callable[[], gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    return RandomDelay(make_env())


def _factories(
    task: Task, num_envs: int, together: int, *, delays: bool
) -> list[Callable[[], gym.Env[Any, Any]] | Callable[[], gym.vector.SyncVectorEnv]]:
    make_env = partial(_delayed, task.make_env) if delays else task.make_env
    if together == 1:
        return [make_env] * num_envs
    return [partial(gym.vector.SyncVectorEnv, [make_env] * together)] * (num_envs // together)


def train(
    task: Task,
    *,
    num_actors: int,
    num_executors: int,
    delays: bool,
    seed: int = 0,
    lag: int = 1,
    rounds: int = 4,
    num_envs: int = 8,
    together: int = 1,
    device: str = "cpu",
    policy_device: str = "cpu",
) -> list[str]:
    """Train with A2C and return the digests of every batch and of the final parameters.

    Args:
        task: what to train.
        num_actors: see `HTSCollector`.
        num_executors: see `HTSCollector`.
        delays: sleep at random in executors, actors and the learner.
        seed: of environments, noise and the initial parameters.
        lag: see `HTSCollector`.
        rounds: batches to train on.
        num_envs: number of environments.
        together: how many of them step as one batch, a divisor of their number.
        device: where it learns.
        policy_device: where the actors run the policy.

    Raises:
        TypeError, ValueError: if ``together`` doesn't divide ``num_envs``, or `HTSCollector`
            refuses an argument.
    """
    num_envs = check_integer("num_envs", num_envs)
    together = check_integer("together", together)
    if num_envs % together:
        raise ValueError(
            f"together must divide num_envs, got {together} and {num_envs}: give a divisor"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy, critic = task.build(_SlowIdentity() if delays else nn.Identity())
        policy, critic = policy.to(device), critic.to(device)
        norms = [layer for layer in policy.modules() if isinstance(layer, RunningNorm)]
        loss_module = A2CLoss(policy, critic)
        advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        optimizer = torch.optim.RMSprop(loss_module.parameters(), lr=1e-3)
        delayed = DelayedGradient(loss_module, lag=lag)
        frames = num_envs * task.sync_interval
        digests = []
        with HTSCollector(
            _factories(task, num_envs, together, delays=delays),
            policy,
            frames_per_batch=frames,
            total_frames=rounds * frames,
            num_actors=num_actors,
            num_executors=num_executors,
            lag=lag,
            seed=seed,
            storing_device=device,
            policy_device=policy_device,
        ) as collector:
            for batch in collector:
                digests.append(digest(batch))
                with delayed(batch), set_recurrent_mode(task.recurrent):
                    advantage(batch)
                    losses = loss_module(batch if task.recurrent else batch.reshape(-1))
                    sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
                    nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                for norm in norms:
                    norm.update(batch)
                if delays:
                    time.sleep(random.SystemRandom().uniform(0, 10 * _MAX_DELAY_S))
        return [*digests, digest(loss_module.parameters())]


def _determinism(args: argparse.Namespace) -> int:
    grid = list(itertools.product(args.batch, args.actors, args.executors, (False, True)))
    settings = {
        "rounds": args.rounds,
        "lag": args.lag,
        "num_envs": args.num_envs,
        "device": args.device,
        "policy_device": args.policy_device,
    }
    failures = 0
    with keep_servers():
        for name in args.tasks:
            task = TASKS[name]
            references: dict[int, list[str]] = {}  # by the size of batches, if that matters
            if task.draws_globally and len({*args.batch}) > 1:
                print(f"{name:11} draws from what a batch shares: each size has bits of its own")
            for together, actors, executors, delays in grid:
                began = time.monotonic()
                found = train(
                    task,
                    num_actors=actors,
                    num_executors=executors,
                    together=together,
                    delays=delays,
                    **settings,
                )
                reference = references.setdefault(together if task.draws_globally else 1, found)
                equal = found == reference
                failures += not equal
                print(
                    f"{name:11} batches of {together}  actors {actors}  executors {executors}  "
                    f"delays {'yes' if delays else 'no ':3}  batches {found[0]} .. {found[-2]}  "
                    f"parameters {found[-1]}  {'equal' if equal else 'DIFFERENT'}  "
                    f"({time.monotonic() - began:.1f} s)",
                    flush=True,
                )
            other = train(
                task,
                together=grid[0][0],
                num_actors=grid[0][1],
                num_executors=grid[0][2],
                delays=False,
                seed=1,
                **settings,
            )
            differs = set(other).isdisjoint(itertools.chain(*references.values()))
            failures += not differs
            print(f"{name:11} another seed: {'all differ' if differs else 'SOME ARE EQUAL'}")
    print("FAILED" if failures else f"all {len(args.tasks) * len(grid)} runs equal by their bits")
    return 1 if failures else 0


_DESCRIPTION = "Checks that users can run on their own machine, environments and policies."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a check from the command line; returns the exit status.

    0: all is well; 1: bits differ; 2: the check could not be run.
    """
    parser = argparse.ArgumentParser(prog="python -m torchrl_hts.testing", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="CHECK")
    check = commands.add_parser("determinism", help="compare batches and parameters by their bits")
    check.add_argument("--tasks", nargs="+", choices=TASKS)
    check.add_argument("--actors", nargs="+", type=count, default=[1, 2, 4])
    check.add_argument("--executors", nargs="+", type=count, default=[1, 2, 8])
    check.add_argument("--num-envs", type=count, default=8)
    check.add_argument(
        "--batch", nargs="+", type=count, default=[1], help="environments that step as one (1)"
    )
    check.add_argument("--device", default="cpu", help="where it learns, such as cuda")
    check.add_argument("--policy-device", default="cpu", help="where actors run the policy")
    check.add_argument("--rounds", type=count, default=4, help="batches to train on")
    check.add_argument("--lag", type=int, choices=range(17), default=1, metavar="LAG")
    check.set_defaults(run=_determinism)
    torch.set_num_threads(1)
    args = parser.parse_args(argv)
    if odd := [k for k in args.batch if args.num_envs % k]:
        check.error(f"--batch {odd[0]} does not divide --num-envs {args.num_envs}: give a divisor")
    lacking = {task: what for task, what in _NEEDS.items() if find_spec(what[0]) is None}
    if args.tasks is None:
        args.tasks = [task for task in (*_EVERYWHERE, "pong") if task not in lacking]
        if "pong" in lacking:
            print("left out: pong, which needs {}: {}".format(*lacking["pong"]))
    for task in args.tasks:
        if task in lacking:
            check.error("--tasks {} needs {}: {}".format(task, *lacking[task]))
    if {args.device, args.policy_device} != {"cpu"}:  # gradients are else summed up in any order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (HTSError, ImportError, RuntimeError, AssertionError, TypeError, ValueError) as error:
        print(f"error: the check could not be run: {error}", file=sys.stderr)
        return 2
    return status
