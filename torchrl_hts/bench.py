"""What to expect of the collector with an environment and a policy of yours, in half a minute.

    python -m torchrl_hts.bench --env-id CartPole-v1
    python -m torchrl_hts.bench --env-id my_module:make_env --policy my_module:make_policy

measures the parts alone, forecasts steps per second for a grid of settings (``forecast.py``), names
one of them, and tries it out.
"""

from __future__ import annotations

import torchrl_hts.versions  # noqa: F401  (before torchrl)

# isort: split

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_hts.arguments import make_policy
from torchrl_hts.command_line import count, positive
from torchrl_hts.costs import (
    default_policy,
    measure_environment,
    measure_learning,
    measure_passes,
    run_trial,
)
from torchrl_hts.errors import HTSError
from torchrl_hts.exchange import MAX_ENVS
from torchrl_hts.forecast import Costs, Forecast, Setting, forecast, recommend
from torchrl_hts.limits import available_cores
from torchrl_hts.probing import EnvironmentTimes
from torchrl_hts.servers import keep_servers
from torchrl_hts.theory import rollout_time

__all__ = ["main"]

MakeEnv = Callable[[], gym.Env[Any, Any]]

_BAR = 40  # width of the longest bar of a histogram
_TRIAL = Setting(num_envs=8, sync_interval=20)


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
        env = make_env()
    except Exception as error:
        raise _UserError(
            f"--env-id {name!r} can't be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(env, gym.Env):
        raise _UserError(
            f"--env-id {name!r} made a {type(env).__module__}.{type(env).__qualname__}; only "
            "gymnasium environments can be measured here"
        )
    env.close()
    return make_env


def find_policy(name: str | None, make_env: MakeEnv) -> TensorDictModuleBase:
    """The policy that ``--policy`` names, a ``module:function`` without arguments; or a default."""
    if name is not None:
        function = _find(name, "--policy")
        try:
            return make_policy(None, function)
        except Exception as error:
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
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise _UserError(f"{option} {name!r} can't be found: {error}") from error


def measure(
    make_env: MakeEnv,
    policy: TensorDictModuleBase,
    *,
    rows: Sequence[int],
    epochs: int,
    seconds: float,
) -> tuple[EnvironmentTimes, Costs]:
    """Measure all parts, and say so on standard error."""

    def progress(number: int, what: str) -> None:
        print(f"[{number}/4] {what}", file=sys.stderr, flush=True)

    progress(1, f"stepping the environment at random for {seconds:g} s")
    times = measure_environment(make_env, seconds)
    progress(2, f"running the policy on {', '.join(map(str, rows))} rows")
    passes = measure_passes(make_env, policy, rows, seconds)
    progress(3, "learning: the policy forward and back")
    learner_s = epochs * measure_learning(make_env, policy, seconds / 2)
    alone = Costs(
        step_times=times.with_resets(),
        step_cpu_share=times.cpu_share,
        executor_cpu_s=0.0,
        passes=passes,
        actor_cpu_s=0.0,
        learner_step_s=learner_s,
        cores=ceil(available_cores()),
    )
    progress(4, f"the collector's own share: {_describe(_TRIAL)}")
    trial = _try_out(make_env, policy, alone, _TRIAL, seconds)
    env_cpu_s = alone.mean_step_s * alone.step_cpu_share
    costs = Costs(
        **{
            **vars(alone),
            "executor_cpu_s": max(0.0, trial.executor_cpu_s - env_cpu_s),
            "actor_cpu_s": max(0.0, trial.actor_cpu_s - alone.pass_time(trial.rows)),
        }
    )
    return times, costs


def _try_out(
    make_env: MakeEnv, policy: TensorDictModuleBase, costs: Costs, setting: Setting, seconds: float
) -> Any:
    return run_trial(
        make_env,
        policy,
        seconds,
        num_envs=setting.num_envs,
        frames_per_batch=setting.num_envs * setting.sync_interval,
        lag=setting.lag,
        num_actors=setting.num_actors,
        num_executors=costs.team(setting.num_envs).executors,
    )


def print_costs(times: EnvironmentTimes, costs: Costs) -> None:
    """What was measured."""
    steps = times.steps
    marks = [*np.quantile(steps, (0.05, 0.5, 0.95, 0.99)), steps.max()]
    print(
        f"\nstep      {_time(steps.mean())} on average, standard deviation {_time(steps.std())}; "
        f"{times.cpu_share:.0%} of a core\n"
        f"          5 %, 50 %, 95 %, 99 %, most: {', '.join(map(_time, marks))}"
    )
    exponents, counts = np.unique(np.floor(np.log2(steps * 1e6)), return_counts=True)
    for exponent, number in zip(exponents.astype(int), counts.tolist(), strict=True):
        bar = "#" * -(-_BAR * number // counts.max())
        print(f"          {_time(2.0**exponent / 1e6):>8} and more {number:>8,} {bar}")
    if len(times.resets):
        print(
            f"reset     {_time(times.resets.mean())} on average, {len(times.resets):,} times in "
            f"{len(steps):,} steps"
        )
    else:
        print(f"reset     none: no episode ended in {len(steps):,} steps")
    passes = zip(costs.passes.rows, costs.passes.times, strict=True)
    print("policy    " + ", ".join(f"{rows} rows {_time(taken)}" for rows, taken in passes))
    print(f"learner   {_time(costs.learner_step_s)} for each step")
    print(
        f"collector {_time(costs.executor_cpu_s)} of an executor for each step, "
        f"{_time(costs.actor_cpu_s)} of an actor for each pass, besides the above"
    )


def print_forecasts(costs: Costs, settings: argparse.Namespace) -> list[Forecast]:
    """A table of what to expect; returns it."""
    lags = settings.lag
    heads = [f"lag {lag}" for lag in lags]
    print(
        f"\nSteps per second to expect on {costs.cores} cores while the learner learns, limited by "
        "(s)chedule, (i)nference,\n(l)earner or (c)ores; and the theory: the share of the speed of "
        "executors that never wait that the\nschedule and the learner alone allow.\n"
    )
    line = f"{'envs':>5}{'actors':>7}{'alpha':>6}"
    print(line + "".join(f"{head:>19}" for head in heads) + f"{'lag 1, barrier':>19}{'Claim 1':>9}")
    found = []
    for n in settings.num_envs:
        for actors in settings.actors or sorted({1, 2, costs.team(n).actors}):
            for alpha in settings.alpha:
                own = [forecast(costs, Setting(n, alpha, lag, actors)) for lag in lags]
                barrier = forecast(costs, Setting(n, alpha, 1, actors), barrier="round")
                found += own
                executors = costs.team(n).executors
                steps = -(-n // executors) * alpha  # of each executor in a round
                claim = steps / rollout_time(executors * steps, executors, steps)
                cells = "".join(_cell(each) for each in [*own, barrier])
                print(f"{n:>5}{actors:>7}{alpha:>6}{cells}{claim:>9.2f}")
    print(
        "\nlag 1, barrier: as in the paper, all wait for the slowest at the end of each round. "
        "Claim 1: the paper's\nformula for that, if step times were exponential and the learner "
        "free."
    )
    return found


def _cell(each: Forecast) -> str:
    return f"{each.steps_per_second:>9,.0f} ({each.limit[0]}) {each.schedule_share:>5.2f}"


def print_recommendation(
    best: Forecast, costs: Costs, make_env: MakeEnv, policy: TensorDictModuleBase, seconds: float
) -> None:
    """Name a setting, and try it out."""
    setting = best.setting
    print(
        f"\nRecommended: {_describe(setting)}\n\n"
        f"    HTSCollector([make_env] * {setting.num_envs}, policy,\n"
        f"                 frames_per_batch={setting.num_envs} * {setting.sync_interval}, "
        f"lag={setting.lag}, num_actors={setting.num_actors},\n"
        f"                 num_executors={costs.team(setting.num_envs).executors})\n\n"
        f"{best.steps_per_second:,.0f} steps/s are expected. It is the least of those within 5 % "
        "of the fastest: the fewest actors and\nenvironments, the shortest rounds; take the alpha "
        "that your algorithm wants."
    )
    if seconds:
        print(f"[trying it out for {seconds:g} s]", file=sys.stderr, flush=True)
        free = forecast(Costs(**{**vars(costs), "learner_step_s": 0.0}), setting)
        trial = _try_out(make_env, policy, costs, setting, seconds)
        print(
            f"Without a learner: {trial.steps_per_second:,.0f} steps/s measured, "
            f"{free.steps_per_second:,.0f} expected."
        )


def _describe(setting: Setting) -> str:
    return (
        f"{setting.num_envs} environments, alpha {setting.sync_interval}, lag {setting.lag}, "
        f"{setting.num_actors} actor{'s' if setting.num_actors > 1 else ''}"
    )


def _time(seconds: float) -> str:
    """A time with its unit.

    Example:
        >>> _time(0.0123), _time(0.0000456), _time(2)
        ('12.3 ms', '45.6 us', '2 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


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
    parser.add_argument("--num-envs", type=count, nargs="+", default=[4, 16, 64])
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
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > available_cores() / 2:
        print(
            f"note: other programs keep this machine busy (load average {os.getloadavg()[0]:.1f} "
            f"on {available_cores():g} cores): what is measured and what comes true will differ",
            file=sys.stderr,
        )
    most = max(options.num_envs)
    rows = sorted({2**power for power in range(most.bit_length())} | {most})
    try:
        make_env = find_environment(options.env_id)
        policy = find_policy(options.policy, make_env)
        with keep_servers():
            times, costs = measure(
                make_env, policy, rows=rows, epochs=options.epochs, seconds=options.seconds
            )
            print_costs(times, costs)
            best = recommend(print_forecasts(costs, options))
            seconds = 0.0 if options.no_check else options.seconds
            print_recommendation(best, costs, make_env, policy, seconds)
    except (_UserError, HTSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
