"""How many steps per second several learners make, and what the theory predicts for up to 64.

    python benchmarks/learner_scaling.py --output-dir runs/learner_scaling

Each learner has 16 environments that sleep, for 10 ms on average, and takes A2C's gradients of
rounds of 20 steps, or --alpha. Measured are 1, 2 and 4 learners, with all-reduce and with 4 shards,
for so many rounds, in turns. As root each learner has a host of its own (`_hosts.py`); else they
share this one. Predicted is by `torchrl_hts.theory.timetable`, from times of one learner:
exponential steps with the mean that its executors took, its update, and the exchange as it was
timed by itself. For more learners than were measured the exchange is `theory.exchange_time` with
0.1 ms and 1 Gbit/s. The column large is the exchange of 1.7 million values, as the Nature CNN has,
timed likewise. The last are microseconds of processor time for a step, by kind of process, and rows
of an actor's pass.
With ``--in-threads`` the environments of a learner are in threads of one executor. How long that is
busy doesn't tell how long steps take, so predictions take the mean of what is slept.
Writes learner_scaling.json after each run, so that a command that was stopped, or of which a run
has failed, goes on where it was. And learner_scaling.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import _recipes  # noqa: F401  so that the package of this checkout is found
import numpy as np
import torch
from _environments import OBSERVATION_SIZE, SLEEP_MEAN_S, SleepEnv
from _hosts import Hosts, why_not
from _machine import essentials
from _measurements import Measurements, Record, has_failed, keep_others_out
from _processor_time import used_s
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector, World, keep_servers
from torchrl_hts.bench.command_line import count, make_directory
from torchrl_hts.bench.measuring import default_policy
from torchrl_hts.envs import make_in_thread
from torchrl_hts.theory import exchange_time, timetable

ENVS, LAG = 16, 1  # of each learner
WARM_UP = 3  # rounds
EXCHANGES = 20
LARGE = 1_300, 1_300  # 1.69 million values, as the Nature CNN has
LATENCY_S, BYTES_PER_SECOND = 1e-4, 125e6  # where nothing was measured
KINDS = ("executor", "actor", "learner")
COLOURS = {"all-reduce": "#2471a3", "shards": "#c0392b"}


def networks() -> tuple[A2CLoss, TensorDictModuleBase, GAE]:
    """The loss, the policy in it, and what computes advantages for it."""
    torch.manual_seed(0)
    actor = default_policy(SleepEnv(0))
    critic = ValueOperator(
        nn.Sequential(nn.Linear(OBSERVATION_SIZE, 64), nn.Tanh(), nn.Linear(64, 1)),
        in_keys=["observation"],
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    return A2CLoss(actor, critic), actor, advantage


def time_exchange(world: World, module: nn.Module, batch: TensorDictBase) -> float:
    """Median seconds to add up gradients of all parameters, once all learners have theirs."""
    parameters = list(module.parameters())
    found = []
    for _ in range(EXCHANGES):
        world.gather(None)
        began = time.perf_counter()
        for _ in world.gradients(module, [batch] * world.parts_per_rank):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def factories(number: int, in_threads: bool) -> list[Any]:
    """What makes so many environments that sleep."""
    makes = [partial(SleepEnv, env) for env in range(number)]
    return [partial(make_in_thread, make) for make in makes] if in_threads else makes


def learn(options: argparse.Namespace) -> None:
    """What each learner does; the first writes down what it has measured."""
    with keep_servers(), World(shards=options.shards or None, threads=1) as world:
        loss_module, actor, advantage = networks()
        optimizer = torch.optim.RMSprop(loss_module.parameters(), lr=1e-4)
        delayed = DelayedGradient(actor, lag=LAG)
        frames = ENVS * world.size * options.alpha
        updates_s: list[float] = []

        def update(batch: Any) -> None:
            spent_s = 0.0
            with delayed(batch):
                for part in world.gradients(loss_module, batch):
                    began = time.perf_counter()
                    with torch.no_grad():
                        advantage(part)
                    losses = loss_module(part)
                    loss = losses["loss_objective"] + losses["loss_critic"]
                    (loss + losses["loss_entropy"]).backward()
                    spent_s += time.perf_counter() - began
                began = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
            updates_s.append(spent_s + time.perf_counter() - began)

        with HTSCollector(
            factories(ENVS * world.size, options.in_threads),
            actor,
            frames_per_batch=frames,
            total_frames=frames * (options.rounds + WARM_UP + 1),
            num_executors=1 if options.in_threads else ENVS,
            lag=LAG,
            seed=0,
            world=world,
        ) as collector:
            for number, batch in enumerate(collector):
                if number == WARM_UP:
                    began, before = time.perf_counter(), used_s(collector.worker_pids())
                if number == WARM_UP + options.rounds:
                    break
                update(batch)
                collector.update_policy_weights_()
            took_s, now = time.perf_counter() - began, used_s(collector.worker_pids())
            seen = collector.statistics()
        counted, alpha = frames * options.rounds, options.alpha
        busy_s = seen.executor_busy_share * seen.elapsed_s / (WARM_UP + options.rounds + 1)
        found = {
            "steps_per_second": counted / took_s,
            "step_s": SLEEP_MEAN_S if options.in_threads else busy_s / alpha,
            "update_s": statistics.mean(updates_s[WARM_UP:]),
            "rows": seen.mean_actor_batch_size,
            **{f"{k}_s": (now[k] - before[k]) * world.size / counted for k in KINDS},
            "exchange_s": time_exchange(world, loss_module, batch),
            "large_exchange_s": time_exchange(world, nn.Linear(*LARGE, bias=False), batch),
            "num_values": sum(p.numel() for p in loss_module.parameters()),
        }
        every = world.gather(found)
        if world.is_first:
            for name in ("update_s", "step_s", "rows", *(f"{kind}_s" for kind in KINDS)):
                found[name] = statistics.mean(one[name] for one in every)
            options.write_to.write_text(json.dumps(found))


def measure(size: int, shards: int, options: argparse.Namespace, on_hosts: bool) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "found.json")
        script = [str(Path(__file__).resolve()), *["--in-threads"] * options.in_threads]
        script += ["--shards", str(shards), "--rounds", str(options.rounds)]
        script += ["--alpha", str(options.alpha)]
        script += ["--output-dir", directory, "--write-to", str(file)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        with Hosts(size) if on_hosts else nullcontext() as hosts:
            commands = [[*torchrun, "--nproc-per-node", str(size), *script]]
            if hosts is not None:
                commands = [hosts.torchrun(host, 1, *script) for host in range(size)]
            running = [subprocess.Popen(command) for command in commands]
            codes = [process.wait() for process in running]
        if any(codes):
            return {"error": "a learner has failed"}
        found: dict[str, float] = json.loads(file.read_text())
        return found


def measure_missing(
    measurements: Measurements, wanted: list[tuple[str, int]], options: argparse.Namespace
) -> None:
    """Each kind and number of learners, in turns."""
    on_hosts = why_not() is None
    for turn, (kind, size) in product(range(options.turns), wanted):
        key = {"kind": kind, "learners": size, "turn": turn}
        if not measurements.has(key):
            print(f"[{turn + 1}/{options.turns}] {kind}, {size} learners", file=sys.stderr)
            shards = options.shards if kind == "shards" else 0
            measurements.add(key, measure(size, shards, options, on_hosts))


def medians_of(
    records: list[Record], wanted: list[tuple[str, int]]
) -> dict[tuple[str, int], dict[str, float]]:
    """Of all runs of a kind and number of learners, by what they have measured.

    Raises:
        SystemExit: if one of them has failed.
    """
    runs = {
        each: [one for one in records if (one["kind"], one["learners"]) == each] for each in wanted
    }
    if failed := sum(has_failed(one) for own in runs.values() for one in own):
        sys.exit(f"error: {failed} runs failed; the same command tries them again")
    return {
        each: {
            name: statistics.median(one[name] for one in own)
            for name in own[0]
            if name not in ("kind", "learners", "turn")
        }
        for each, own in runs.items()
    }


def predict(size: int, one: dict[str, float], exchange_s: float, alpha: int) -> float:
    """Steps per second of so many learners, from what one of them takes."""
    times = np.random.default_rng(0).exponential(one["step_s"], (400, ENVS * size, alpha))
    found = timetable(
        times, lag=LAG, learner_time=one["update_s"], learners=size, exchange_time=exchange_s
    )
    return found.steps_per_second(alpha)


def draw(
    rows: list[dict[str, Any]], ones: dict[str, dict[str, float]], alpha: int, file: Path
) -> None:
    """Steps per second over those of so many single learners: measured, and predicted to 64."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [1, 2, 4, 8, 16, 32, 64]
    for kind, one in ones.items():
        own = [row for row in rows if row["kind"] == kind]
        base = next(row["steps_per_second"] for row in own if row["learners"] == 1)
        shares = [row["steps_per_second"] / (base * row["learners"]) for row in own]
        colour = COLOURS[kind]
        axes.plot([row["learners"] for row in own], shares, "o", color=colour, label=kind)
        predicted = []
        for size in sizes:
            exchange_s = exchange_time(
                int(one["num_values"]),
                size,
                latency_s=LATENCY_S,
                bytes_per_second=BYTES_PER_SECOND,
            )
            predicted.append(predict(size, one, exchange_s, alpha) / size)
        label = f"{kind}, predicted"
        axes.plot(sizes, np.array(predicted) / predicted[0], "-", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("learners, 16 environments each")
    axes.set_ylabel("steps/s over those of as many alone")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """Measure, predict, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--learners", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=count, default=60, help="of each run (default: 60)")
    parser.add_argument("--alpha", type=count, default=20, help="steps of a round (default: 20)")
    parser.add_argument("--turns", type=count, default=3, help="of all runs (default: 3)")
    parser.add_argument("--shards", type=int, default=4, help="0: all-reduce alone (default: 4)")
    parser.add_argument("--in-threads", action="store_true", help="of make_in_thread")
    parser.add_argument("--write-to", type=Path, help=argparse.SUPPRESS)  # of a learner
    options = parser.parse_args()
    if options.write_to is not None:
        learn(options)
        return
    if 1 not in options.learners:
        parser.error("--learners must have 1 among them: all is told as shares of what one makes")
    make_directory(options.output_dir)
    keep_others_out(options.output_dir)
    kinds = ["all-reduce", *["shards"] * bool(options.shards)]
    wanted = [(kind, size) for kind in kinds for size in options.learners]
    conditions = {
        **essentials(),
        "rounds": options.rounds,
        "alpha": options.alpha,
        "shards": options.shards,
    }
    conditions |= {"on_hosts": why_not() is None, "mean_s": SLEEP_MEAN_S}
    conditions |= {"in_threads": options.in_threads}
    measurements = Measurements(options.output_dir / "learner_scaling.json", conditions)
    measure_missing(measurements, wanted, options)
    medians = medians_of(measurements.records, wanted)
    rows = []
    for (kind, size), found in medians.items():
        one = medians[kind, 1]
        predicted = predict(size, one, found["exchange_s"] if size > 1 else 0.0, options.alpha)
        rows.append({"kind": kind, "learners": size, **found, "predicted": predicted})
    here = essentials()
    print(f"{here['cpu']}, {here['cores']} cores, commit {here['commit']}, medians of turns\n")
    titles = "| | learners | steps/s | share | predicted | update, ms | exchange, ms | large, ms |"
    titles += "".join(f" {kind}, us |" for kind in KINDS) + " rows |"
    print(titles)
    print("| --- " * (titles.count("|") - 1) + "|")
    for row in rows:
        base = medians[row["kind"], 1]["steps_per_second"] * row["learners"]
        print(
            f"| {row['kind']} | {row['learners']} | {row['steps_per_second']:,.0f} | "
            f"{row['steps_per_second'] / base:.2f} | {row['predicted']:,.0f} | "
            f"{1e3 * row['update_s']:.1f} | {1e3 * row['exchange_s']:.1f} | "
            f"{1e3 * row['large_exchange_s']:.1f} | "
            + "".join(f"{1e6 * row[f'{kind}_s']:.0f} | " for kind in KINDS)
            + f"{row['rows']:.1f} |"
        )
    ones = {kind: medians[kind, 1] for kind in kinds}
    draw(rows, ones, options.alpha, options.output_dir / "learner_scaling.svg")


if __name__ == "__main__":
    main()
