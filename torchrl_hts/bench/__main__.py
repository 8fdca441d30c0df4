"""What to expect of the collector with an environment and a policy of yours.

    python -m torchrl_hts.bench --env-id CartPole-v1
    python -m torchrl_hts.bench --env-id my_module:make_env --policy my_module:make_policy
    python -m torchrl_hts.bench --env-id my_module:make_batch --num-envs 2 4 16

measures the parts alone, forecasts steps per second for a grid of settings (``forecast.py``), names
one of them, and tries it out. What it recommends comes first, then the tables. The function makes
an environment of gymnasium, or of TorchRL, for which --policy is needed. Where it makes a batch, a
VectorEnv or an EnvBase with batch_size=[k], --num-envs counts batches. It takes half a minute on
idle cores.
"""

from __future__ import annotations

import torchrl_hts._processes.versions  # noqa: F401  (before torchrl)

# isort: split

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_hts._planning.arguments import check_factories, make_policy
from torchrl_hts._planning.probe import EnvironmentTimes
from torchrl_hts._processes.limits import available_cores
from torchrl_hts._processes.server_pool import keep_servers
from torchrl_hts._rounds.exchange import MAX_ENVS
from torchrl_hts.bench.command_line import count, positive
from torchrl_hts.bench.forecast import Costs, Forecast, Setting, forecast, recommend
from torchrl_hts.bench.measuring import (
    MakeEnv,
    default_policy,
    measure_environment,
    measure_learning,
    measure_passes,
    run_trial,
)
from torchrl_hts.bench.other_load import cores_used_by_others
from torchrl_hts.bench.report import (
    Row,
    Tried,
    batches_text,
    costs_text,
    described,
    forecasts_text,
    is_busy,
    recommendation,
    warnings_text,
)
from torchrl_hts.collector.rounds import MAX_ROWS
from torchrl_hts.errors import HTSError
from torchrl_hts.theory import rollout_time

__all__ = ["main"]

_LOOK_S = 0.5  # how long to look at what other programs use, before and after
_TRIED_ENVS, _TRIED_STEPS = 8, 20  # of the trial that shows the collector's own share


class _UserError(Exception):
    """Something that the user gave can't be used; the message says what and why."""


def find_environment(name: str) -> MakeEnv:
    """The factory that ``--env-id`` names.

    Args:
        name: an id of gymnasium; ``ALE/...`` is a game with the preprocessing of
            `torchrl_hts.envs.make_atari`; or ``module:function``.
    """
    make_env: MakeEnv
    if ":" in name and name.partition(":")[2].isidentifier():
        make_env = _find(name, "--env-id")
    elif name.startswith("ALE/"):
        from torchrl_hts.envs import make_atari

        make_env = partial(make_atari, name)
    else:
        make_env = partial(gym.make, name)
    try:
        env: Any = make_env()
    except (Exception, SystemExit) as error:
        raise _UserError(
            f"--env-id {name!r} can't be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(env, gym.Env | gym.vector.VectorEnv | EnvBase):
        raise _UserError(
            f"--env-id {name!r} made a {type(env).__module__}.{type(env).__qualname__}; only "
            "environments of gymnasium and TorchRL, and batches of them, can be measured here"
        )
    if not getattr(env, "is_closed", False):  # as batches of TorchRL are until they are used
        env.close()
    try:
        factories = check_factories(make_env, None)
    except TypeError as error:
        raise _UserError(f"--env-id {name!r}: {error}") from error
    if len(factories) > 1:
        print(
            f"{name} makes a batch of {len(factories)} environments, which the collector takes "
            "apart: what is measured, and counted by --num-envs, is the first of them alone",
            file=sys.stderr,
        )
    return factories[0]


def batch_of(make_env: MakeEnv) -> int:
    """How many environments a factory makes."""
    env = make_env()
    try:
        if isinstance(env, EnvBase):
            return int(env.batch_size.numel())
        return int(env.num_envs) if isinstance(env, gym.vector.VectorEnv) else 1
    finally:
        env.close()


def find_policy(name: str | None, make_env: MakeEnv) -> TensorDictModuleBase:
    """The policy that ``--policy`` names, a ``module:function`` without arguments; or a default."""
    if name is not None:
        function = _find(name, "--policy")
        try:
            return make_policy(None, function)
        except (Exception, SystemExit) as error:
            raise _UserError(
                f"--policy {name!r} gave no policy: {type(error).__name__}: {error}"
            ) from error
    env = make_env()
    try:
        return default_policy(env)
    except TypeError as error:
        raise _UserError(str(error)) from error
    finally:
        env.close()


def _find(name: str, option: str) -> Any:
    module, _, function = name.partition(":")
    if not module or not function:
        raise _UserError(f"{option} {name!r}: expected module:function, such as my_envs:make_env")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise _UserError(f"{option} {name!r} can't be found: {error}") from error
    if not callable(found):
        raise _UserError(
            f"{option} {name!r} is {found!r}, which can't be called: name a function that makes it"
        )
    return found


def progress(number: int, what: str) -> None:
    """Say on standard error what is done now."""
    print(f"[{number}/5] {what}", file=sys.stderr, flush=True)


def measure_alone(
    make_env: MakeEnv,
    policy: TensorDictModuleBase,
    *,
    batch: int,
    rows: Sequence[int],
    epochs: int,
    seconds: float,
) -> tuple[EnvironmentTimes, Costs]:
    """Measure all parts, each alone: the collector's own share is 0."""
    what = "environment" if batch == 1 else f"batch of {batch} environments"
    progress(1, f"stepping the {what} at random for {seconds:g} s")
    try:
        times = measure_environment(make_env, seconds)
    except (Exception, SystemExit) as error:
        raise _UserError(
            f"the environment failed while it was stepped at random: {type(error).__name__}: "
            f"{error}"
        ) from error
    rows = [batch * count for count in rows]
    progress(2, f"running the policy on {', '.join(map(str, rows))} rows")
    passes = measure_passes(make_env, policy, rows, seconds).of_batches(batch)
    progress(3, "learning: the policy forward and back")
    learner_s = epochs * batch * measure_learning(make_env, policy, seconds / 2)
    return times, Costs(
        step_times=times.with_resets(),
        step_cpu_share=times.cpu_share,
        executor_cpu_s=0.0,
        passes=passes,
        actor_cpu_s=0.0,
        learner_step_s=learner_s,
        cores=ceil(available_cores()),
        batch=batch,
        overlaps=times.overlaps,
    )


def with_own_share(
    alone: Costs, make_env: MakeEnv, policy: TensorDictModuleBase, most: int, seconds: float
) -> Costs:
    """The costs with what the collector adds to them, by a trial of it.

    Args:
        alone: the costs of the parts.
        most: environments, or batches of them, that there may be.
    """
    tried = Setting(num_envs=min(_TRIED_ENVS, most), sync_interval=_TRIED_STEPS)
    progress(4, f"the collector's own share: {described(tried, alone.batch)}")
    trial = _try_out(make_env, policy, alone, tried, seconds)
    env_cpu_s = alone.mean_step_s * alone.step_cpu_share
    return replace(
        alone,
        executor_cpu_s=max(0.0, alone.batch * trial.executor_cpu_s - env_cpu_s),
        actor_cpu_s=max(0.0, trial.actor_cpu_s - alone.pass_time(trial.rows / alone.batch)),
    )


def _try_out(
    make_env: MakeEnv, policy: TensorDictModuleBase, costs: Costs, setting: Setting, seconds: float
) -> Any:
    return run_trial(
        make_env,
        policy,
        seconds,
        num_envs=setting.num_envs,
        frames_per_batch=setting.num_envs * costs.batch * setting.sync_interval,
        lag=setting.lag,
        num_actors=setting.num_actors,
        num_executors=costs.team(setting.num_envs).executors,
    )


def forecasts(costs: Costs, options: argparse.Namespace) -> list[Row]:
    """What to expect of each setting."""
    rows = []
    for n in options.num_envs:
        executors = costs.team(n).executors
        for actors in options.actors or sorted({1, 2, costs.team(n).actors}):
            for alpha in options.alpha:
                steps = -(-n // executors) * alpha  # of each executor in a round
                rows.append(
                    Row(
                        [forecast(costs, Setting(n, alpha, lag, actors)) for lag in options.lag],
                        forecast(costs, Setting(n, alpha, 1, actors), barrier="round"),
                        steps / rollout_time(executors * steps, executors, steps),
                    )
                )
    return rows


def try_recommended(
    best: Forecast, costs: Costs, make_env: MakeEnv, policy: TensorDictModuleBase, seconds: float
) -> Tried:
    """Run the collector with the setting that is recommended, without a learner."""
    progress(5, f"trying it out for {seconds:g} s")
    free = forecast(replace(costs, learner_step_s=0.0), best.setting)
    trial = _try_out(make_env, policy, costs, best.setting, seconds)
    return Tried(trial.steps_per_second, free.steps_per_second)


def report(make_env: MakeEnv, policy: TensorDictModuleBase, options: argparse.Namespace) -> str:
    """Measure, forecast, try out; and say what came of it, the recommendation first."""
    most, batch = max(options.num_envs), batch_of(make_env)
    if most * batch > MAX_ROWS:
        raise _UserError(
            f"--num-envs {most} batches of {batch} are {most * batch} environments; a collector "
            f"has at most {MAX_ROWS}: at most --num-envs {MAX_ROWS // batch}"
        )
    sizes = sorted({2**power for power in range(most.bit_length())} | {most})
    looks = [cores_used_by_others(_LOOK_S)]  # before servers are started, which import much
    times, alone = measure_alone(
        make_env, policy, batch=batch, rows=sizes, epochs=options.epochs, seconds=options.seconds
    )
    with keep_servers():
        costs = with_own_share(alone, make_env, policy, most, options.seconds)
        rows = forecasts(costs, options)
        best = recommend([each for row in rows for each in row.each])
        tried = None
        if not options.no_check:
            tried = try_recommended(best, costs, make_env, policy, options.seconds)
    looks.append(cores_used_by_others(_LOOK_S))
    others = max((look for look in looks if look is not None), default=None)
    executors, cores = costs.team(best.setting.num_envs).executors, available_cores()
    return "\n\n".join(
        [
            recommendation(best, executors, tried, costs.batch),
            *warnings_text(others, cores, tried),
            *batches_text(costs, busy=is_busy(others, cores)),
            costs_text(times, costs),
            forecasts_text(rows, costs.cores, costs.batch),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and forecast from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_hts.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--env-id", required=True, help="an id of gymnasium, or module:function that makes one"
    )
    parser.add_argument(
        "--policy",
        help="module:function that makes the policy; by default a Nature CNN or a small MLP",
    )
    parser.add_argument(
        "--num-envs", type=count, nargs="+", default=[4, 16, 64],
        help="environments, or batches of them (4 16 64)",
    )  # fmt: skip
    parser.add_argument("--alpha", type=count, nargs="+", default=[5, 20, 128])
    parser.add_argument(
        "--lag", type=int, nargs="+", choices=range(17), default=[0, 1, 2], metavar="LAG"
    )
    parser.add_argument(
        "--actors", type=count, nargs="+", help="(1, 2, and what the collector chooses itself)"
    )
    parser.add_argument(
        "--epochs", type=count, default=1, help="how often the learner goes through a batch (1)"
    )
    parser.add_argument("--seconds", type=positive, default=2.0, help="of each measurement (2)")
    parser.add_argument("--no-check", action="store_true", help="don't try the setting out")
    options = parser.parse_args(argv)
    for flag, counts in (("--num-envs", options.num_envs), ("--actors", options.actors or [1])):
        if max(counts) > MAX_ENVS:
            parser.error(f"{flag} must be at most {MAX_ENVS}, got {max(counts)}")
    torch.set_num_threads(1)
    try:
        make_env = find_environment(options.env_id)
        policy = find_policy(options.policy, make_env)
        print(report(make_env, policy, options))
    except (_UserError, HTSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
