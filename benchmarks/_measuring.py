"""Measurements, each in a process of its own, and what they depend on."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import torch
from _contenders import (
    ALPHA,
    CORES,
    HERE,
    NUM_ENVS,
    STOCK,
    Model,
    make_collector,
    make_factories,
    make_update,
    serial,
)
from tensordict import TensorDictBase
from torchrl.collectors import Collector


def measure(
    workload: str, contender: str, env_id: str, seconds: float, warm_up: int
) -> dict[str, Any]:
    """Steps per second of one contender, from the end of the warm-up batches on."""
    torch.set_num_threads(1)
    stock, contender = contender.endswith(STOCK), contender.removesuffix(STOCK)
    model = Model(workload, env_id)
    collector = make_collector(workload, contender, env_id, model)
    torch.set_num_threads(1)  # whatever making the collector set
    is_hts = contender.startswith("hts")
    learning = workload.startswith("atari")
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


def measure_parts(workload: str, env_id: str, seconds: float) -> dict[str, Any]:
    """Seconds per step of emulator, inference and learning, each alone on one thread."""
    torch.set_num_threads(1)
    model = Model(workload, env_id)
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

    (make_env, *_) = make_factories(workload, env_id)
    env = make_env()
    env.reset(seed=0)
    env.action_space.seed(0)

    def hundred_steps() -> None:
        for _ in range(100):
            _, _, terminated, truncated, _ = env.step(int(env.action_space.sample()))
            if terminated or truncated:
                env.reset()

    collector = Collector(
        serial(make_factories(workload, env_id)),
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
