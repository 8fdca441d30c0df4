"""Steps per second of HTSCollector and of TorchRL's own collectors, in one run.

    python benchmarks/throughput.py --json runs/throughput.json
    python benchmarks/throughput.py --workloads pong5 --contenders hts,multi-async --seconds 30

Workloads, with 16 environments each:

    sleep     an environment that only sleeps, exponential with a mean of 10 ms; alpha 20
    costless  an environment that costs nothing; alpha 20
    pong5     Pong, collect and train with A2C, unroll of 5 steps
    pong20    the same, unroll of 20 steps
    startup   16 executors of Pong: time until ready, private memory, CPU time while idle

Contenders take turns, repetition by repetition, so that a machine that is busy for a while is busy
for all of them; the table shows medians. Each measurement is a process of its own, because
ParallelEnv and the multi-process collectors set the thread count of the process they are made in
and leave it there. Starting up and the first batches are not counted.

All contenders run the same network, loss, update and gymnasium-side preprocessing, on batches of
the same number of steps. The update is that of recipes/a2c_atari.py, which runs the shared trunk
once; with the suffix -stock (multi-async-stock, hts-stock, ...) it is what TorchRL's A2CLoss and
GAE do by themselves with a shared trunk. The multi-process collectors of TorchRL get a worker per
environment where environments sleep, and elsewhere a worker per core with the environments shared
out among them.
"""

# ruff: noqa: E402  the recipes are put on the path before they are imported

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "recipes"), str(HERE)]

import torch
from _environments import OBSERVATION_SIZE, CostlessEnv, SleepEnv
from support.atari import NatureCNN, encode
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_hts import DelayedGradient, HTSCollector
from torchrl_hts.envs import make_atari

NUM_ENVS = 16
SLEEP_MEAN_S = 0.01
ALPHA = {"sleep": 20, "costless": 20, "pong5": 5, "pong20": 20}
WORKLOADS = [*ALPHA, "startup"]
CONTENDERS = [
    "hts",
    "hts-lag0",
    "hts-lag2",
    "serial",
    "parallel",
    "multi-sync",
    "multi-async",
    "async-batched",
]
DEFAULT_CONTENDERS = [name for name in CONTENDERS if name not in ("hts-lag0", "hts-lag2")]
STOCK = "-stock"  # suffix of a contender whose update is TorchRL's own
CONTENDERS += [name + STOCK for name in CONTENDERS if name != "async-batched"]
CORES = len(os.sched_getaffinity(0))


def make_factories(workload: str) -> list[Callable[[], Any]]:
    """One factory per environment, of plain gymnasium environments."""
    if workload == "sleep":
        return [partial(SleepEnv, index, SLEEP_MEAN_S) for index in range(NUM_ENVS)]
    return [CostlessEnv if workload == "costless" else make_atari] * NUM_ENVS


def wrap(factory: Callable[[], Any]) -> EnvBase:
    """The same environment for TorchRL's collectors."""
    return GymWrapper(factory(), categorical_action_encoding=True)


def serial(factories: list[Callable[[], Any]]) -> EnvBase:
    """Several of them in one process."""
    return SerialEnv(len(factories), [partial(wrap, factory) for factory in factories])


def make_actor(logits: TensorDictModuleBase) -> ProbabilisticActor:
    """Samples an action from what a module gives as its logits."""
    return ProbabilisticActor(
        logits,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


class Model:
    """Trunk, heads and policy; the policy is all that collectors see."""

    def __init__(self, workload: str) -> None:
        torch.manual_seed(0)
        if workload.startswith("pong"):
            trunk, width, num_actions = NatureCNN(4), 512, 6
        else:
            width, num_actions = 64, 4
            trunk = nn.Sequential(
                nn.Linear(OBSERVATION_SIZE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
            )
        self.trunk = TensorDictModule(trunk, in_keys=["observation"], out_keys=["hidden"])
        self.logits = TensorDictModule(nn.Linear(width, num_actions), ["hidden"], ["logits"])
        self.actor_head = make_actor(self.logits)
        self.critic_head = ValueOperator(nn.Linear(width, 1), in_keys=["hidden"])
        self.policy = TensorDictSequential(self.trunk, self.actor_head).select_out_keys(
            "action", "action_log_prob"
        )


def make_policy(workload: str) -> TensorDictSequential:
    """The policy alone, for collectors that make it in another process."""
    return Model(workload).policy


def make_collector(workload: str, contender: str, model: Model) -> Any:
    """A collector that yields batches of ``16 * alpha`` steps without end."""
    factories = make_factories(workload)
    sizes = {"frames_per_batch": NUM_ENVS * ALPHA[workload], "total_frames": -1}
    if contender.startswith("hts"):
        return HTSCollector(
            factories,
            model.policy,
            **sizes,
            num_executors=NUM_ENVS if workload == "sleep" else None,
            lag={"hts": 1, "hts-lag0": 0, "hts-lag2": 2}[contender],
            seed=0,
        )
    if contender == "serial":
        return Collector(serial(factories), model.policy, **sizes)
    if contender == "parallel":
        env = ParallelEnv(NUM_ENVS, [partial(wrap, factory) for factory in factories])
        return Collector(env, model.policy, **sizes)
    if contender == "async-batched":
        return AsyncBatchedCollector(
            [partial(wrap, factory) for factory in factories],
            policy_factory=partial(make_policy, workload),
            env_backend="multiprocessing",
            transport="auto",
            **sizes,
        )
    num_workers = NUM_ENVS if workload == "sleep" else min(CORES, NUM_ENVS)
    shares = [partial(serial, factories[worker::num_workers]) for worker in range(num_workers)]
    collector_class = {"multi-sync": MultiSyncCollector, "multi-async": MultiAsyncCollector}
    extra = {"cat_results": 0} if contender == "multi-sync" else {}
    return collector_class[contender](shares, model.policy, **sizes, **extra)


def make_update(
    model: Model, lag: int | None, *, stock: bool = False
) -> Callable[[TensorDictBase], None]:
    """One A2C update with a batch; delayed by ``lag`` rounds unless that is None.

    ``stock`` leaves it to GAE and A2CLoss to run the shared trunk, as often as they do.
    """
    actor, critic = model.actor_head, model.critic_head
    if stock:
        actor = make_actor(TensorDictSequential(model.trunk, model.logits))
        critic = TensorDictSequential(model.trunk, critic)
    advantage = GAE(gamma=0.99, lmbda=1.0, value_network=critic)
    loss_module = A2CLoss(
        actor,
        critic,
        entropy_coeff=0.01,
        critic_coeff=0.5,
        loss_critic_type="l2",
    )
    trained = nn.ModuleList([model.trunk, loss_module])
    optimizer = torch.optim.RMSprop(trained.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)

    def update(batch: TensorDictBase) -> None:
        if not stock:
            encode(model.trunk, batch)
        with torch.no_grad():
            advantage(batch)
        losses = loss_module(batch.reshape(-1))
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    if lag is None:
        return update
    delayed = DelayedGradient(trained, lag=lag)

    def delayed_update(batch: TensorDictBase) -> None:
        with delayed(batch):
            update(batch)

    return delayed_update


def measure(workload: str, contender: str, seconds: float, warm_up: int) -> dict[str, Any]:
    """Steps per second of one contender, from the end of the warm-up batches on."""
    torch.set_num_threads(1)
    stock, contender = contender.endswith(STOCK), contender.removesuffix(STOCK)
    model = Model(workload)
    collector = make_collector(workload, contender, model)
    torch.set_num_threads(1)  # whatever making the collector set
    is_hts = contender.startswith("hts")
    learning = workload.startswith("pong")
    lag = collector.lag if is_hts else None
    update = make_update(model, lag, stock=stock) if learning else None
    batches: Iterator[TensorDictBase] = iter(collector)

    def one_batch() -> int:
        batch = next(batches)
        if update is not None:
            update(batch)
            collector.update_policy_weights_()
        return batch.numel()

    try:
        for _ in range(warm_up):
            one_batch()
        frames, num_batches, began = 0, 0, time.perf_counter()
        elapsed_s = 0.0
        while elapsed_s < seconds:
            frames += one_batch()
            num_batches += 1
            elapsed_s = time.perf_counter() - began
        result = {
            "frames": frames,
            "batches": num_batches,
            "elapsed_s": elapsed_s,
            "steps_per_second": frames / elapsed_s,
        }
        if is_hts:
            counted = collector.statistics()
            result["learner_waiting_share"] = counted.learner_waiting_share
            result["mean_actor_batch_size"] = counted.mean_actor_batch_size
        return result
    finally:
        collector.shutdown()


def measure_parts(workload: str, seconds: float) -> dict[str, Any]:
    """Seconds per step of emulator, inference and learning, each alone on one thread."""
    torch.set_num_threads(1)
    model = Model(workload)
    alpha = ALPHA[workload]

    def per_call(function: Callable[[], Any]) -> float:
        for _ in range(3):
            function()
        times = []
        began = time.perf_counter()
        while time.perf_counter() - began < seconds / 3:
            called = time.perf_counter()
            function()
            times.append(time.perf_counter() - called)
        return statistics.median(times)

    env = make_atari()
    env.reset(seed=0)
    env.action_space.seed(0)

    def hundred_steps() -> None:
        for _ in range(100):
            _, _, terminated, truncated, _ = env.step(int(env.action_space.sample()))
            if terminated or truncated:
                env.reset()

    collector = Collector(
        serial(make_factories(workload)),
        model.policy,
        frames_per_batch=NUM_ENVS * alpha,
        total_frames=-1,
    )
    batch = next(iter(collector))
    collector.shutdown()
    torch.set_num_threads(1)  # shutdown gives the process its default number of threads back
    observations = batch[:, 0].select("observation")
    update = make_update(model, lag=None)

    def infer() -> None:
        with torch.inference_mode():
            model.policy(observations.clone(False))

    parts = {
        "emulator_s": per_call(hundred_steps) / 100,
        "inference_s": per_call(infer) / NUM_ENVS,
        "learning_s": per_call(lambda: update(batch.clone(False))) / (NUM_ENVS * alpha),
    }
    return {**parts, "cores": CORES, "bound_steps_per_second": CORES / sum(parts.values())}


def run_alone(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Runs a measurement in a process of its own; its last line is the result."""
    environment = dict(os.environ)
    paths = [str(HERE.parent), str(HERE.parent / "recipes"), str(HERE)]
    if inherited := environment.get("PYTHONPATH"):
        paths.append(inherited)
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {limit_s:.0f} s"}
    finally:  # workers that are left behind must not slow down the next contender
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        reasons = errors.strip().splitlines()
        return {"error": reasons[-1] if reasons else f"exit status {process.returncode}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": CORES,
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrl": __import__("torchrl").__version__,
        "gymnasium": __import__("gymnasium").__version__,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def ideal(workload: str, parts: dict[str, Any] | None) -> tuple[str, float] | None:
    """The figure that a workload's speeds are shown as a share of, and what it is called."""
    if workload == "sleep":
        return "of the ideal", NUM_ENVS / SLEEP_MEAN_S
    if parts is not None and "error" not in parts:
        return "of the CPU bound", parts["bound_steps_per_second"]
    return None


def print_table(
    workload: str, results: dict[str, list[dict[str, Any]]], parts: dict[str, Any] | None
) -> None:
    """Medians of one workload, fastest first."""
    print(f"\n{workload}: {NUM_ENVS} environments, alpha {ALPHA[workload]}")
    bound = ideal(workload, parts)
    if parts is not None and "error" not in parts:
        print(
            f"  alone, ms per step: emulator {parts['emulator_s'] * 1e3:.2f}, inference "
            f"{parts['inference_s'] * 1e3:.2f}, learning {parts['learning_s'] * 1e3:.2f}; "
            f"{CORES} cores can do {parts['bound_steps_per_second']:,.0f} steps/s"
        )
    speeds = {}
    for contender, runs in results.items():
        if measured := [run["steps_per_second"] for run in runs if "error" not in run]:
            speeds[contender] = measured
        for error in {run["error"] for run in runs if "error" in run}:
            print(f"  {contender}: {error}")
    others = [statistics.median(s) for name, s in speeds.items() if not name.startswith("hts")]
    header = f"  {'contender':<18}{'steps/s':>10}{'least':>10}{'most':>10}"
    print(header + (f"{bound[0]:>18}" if bound else "") + (f"{'of best TorchRL':>17}"))
    for contender, measured in sorted(speeds.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(measured)
        line = f"  {contender:<18}{median:>10,.0f}{min(measured):>10,.0f}{max(measured):>10,.0f}"
        if bound:
            line += f"{median / bound[1]:>18.0%}"
        if others:
            line += f"{median / max(others):>17.2f}"
        print(line)


def print_startup(runs: list[dict[str, Any]]) -> None:
    """Medians of the start-up workload."""
    print("\nstartup: 16 Pong executors, from a script that imports torch and has no main guard")
    for error in {run["error"] for run in runs if "error" in run}:
        print(f"  {error}")
    measured = [run for run in runs if "error" not in run]
    for key, label in (
        ("executors_ready_s", "seconds until the last executor has its game"),
        ("constructed_s", "seconds until the collector is made, actors included"),
        ("first_batch_s", "seconds until the first batch"),
        ("private_mib_per_executor_mean", "MiB of private memory per executor, mean"),
        ("private_mib_per_executor_max", "MiB of private memory per executor, most"),
        ("idle_cpu_share", "cores used by all workers while they wait"),
    ):
        if measured:
            print(f"  {statistics.median(run[key] for run in measured):8.2f}  {label}")


def names(known: list[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return parse


def main() -> None:
    """Parses the flags, and measures or prints one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads",
        type=names(WORKLOADS),
        default=WORKLOADS,
        help=f"of {','.join(WORKLOADS)}; by default all",
    )
    parser.add_argument(
        "--contenders",
        type=names(CONTENDERS),
        default=DEFAULT_CONTENDERS,
        help=f"of {', '.join(CONTENDERS)}; by default {','.join(DEFAULT_CONTENDERS)}",
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement (15)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--warm-up", type=int, default=5, help="batches not counted (5)")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument(
        "--alone", nargs=2, metavar=("WORKLOAD", "CONTENDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()

    if options.alone is not None:
        workload, contender = options.alone
        if contender == "parts":
            result = measure_parts(workload, options.seconds)
        else:
            result = measure(workload, contender, options.seconds, options.warm_up)
        print(json.dumps(result))
        return

    facts = machine()
    for name, value in facts.items():
        print(f"{name}: {value}")
    report: dict[str, Any] = {"machine": facts, "results": {}, "parts": {}}
    limit_s = 300 + 4 * options.seconds
    settings = ["--seconds", str(options.seconds), "--warm-up", str(options.warm_up)]
    for workload in options.workloads:
        results: dict[str, list[dict[str, Any]]] = {}
        report["results"][workload] = results
        parts = None
        if workload.startswith("pong"):
            alone = [str(Path(__file__)), *settings, "--alone", workload, "parts"]
            parts = report["parts"][workload] = run_alone(alone, limit_s)
        for repetition in range(options.repetitions):
            if workload == "startup":
                run = run_alone([str(HERE / "_startup.py"), str(NUM_ENVS)], limit_s)
                results.setdefault("hts", []).append(run)
                continue
            for contender in options.contenders:
                if contender == "async-batched" and workload.startswith("pong"):
                    continue  # its batches are flat and interleaved: GAE can't use them
                print(f"[{workload}, {contender}, {repetition + 1}]", file=sys.stderr, flush=True)
                run = run_alone(
                    [str(Path(__file__)), *settings, "--alone", workload, contender], limit_s
                )
                results.setdefault(contender, []).append(run)
        if workload == "startup":
            print_startup(results["hts"])
        else:
            print_table(workload, results, parts)
    report["machine"]["load_average_at_end"] = os.getloadavg()
    print(f"\nload average at the end: {os.getloadavg()}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
