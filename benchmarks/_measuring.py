"""Measurements, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from _contenders import Runner, serial
from _machine import stolen_s
from _processes import memory_mib
from _recipes import environment
from _workloads import (
    CORES,
    TRAININGS,
    find_workload,
    make_agent,
    make_learn,
    policy_of,
)
from torchrl.collectors import Collector

POLITE_S = 5.0  # for a measurement to end that is no longer wanted


def measure_runner(runner: Runner, seconds: float, warm_up: int) -> dict[str, Any]:
    """Steps per second of a contender, from the end of the warm-up batches on; ends it.

    And the share of the cores that the host gave to others meanwhile.
    """
    try:
        for _ in range(warm_up):
            runner.advance()
        runner.begin()
        frames, num_batches, elapsed_s = 0, 0, 0.0
        began, stolen_before_s = time.perf_counter(), stolen_s()
        while not num_batches or elapsed_s < seconds:
            frames += runner.advance()
            num_batches += 1
            elapsed_s = time.perf_counter() - began
        return {
            "frames": frames,
            "batches": num_batches,
            "elapsed_s": elapsed_s,
            "steps_per_second": frames / elapsed_s,
            "stolen_share": (stolen_s() - stolen_before_s) / elapsed_s / CORES,
            "memory_mib": memory_mib(os.getpid()),
            **runner.facts(),
        }
    finally:
        runner.close()


def median_seconds(function: Callable[[], Any], seconds: float) -> float:
    """What a call takes, over so many seconds of calls, after three to warm up."""
    for _ in range(3):
        function()
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < seconds:
        called = time.perf_counter()
        function()
        times.append(time.perf_counter() - called)
    return statistics.median(times)


def measure_parts(
    workload: str, training: str, num_envs: int, seconds: float, warm_up: int
) -> dict[str, float]:
    """Seconds per step of emulator, inference and learning, each by itself on one thread.

    As many environments take turns as a core would have. They play on from where contenders that
    have had their warm-up batches do, for as many seconds, and so further. The mean counts, since
    what a step takes depends on what happens in the game.
    """
    torch.set_num_threads(1)
    tested, trained = find_workload(workload), TRAININGS[training]
    agent = make_agent(tested)

    units = -(-num_envs // (CORES * tested.batch))  # of one core
    envs = [make_env() for make_env in tested.units(units * tested.batch)]
    for index, env in enumerate(envs):
        env.reset(seed=index)
        env.action_space.seed(index)

    def step_in_turns(turns: int) -> None:
        for _ in range(turns):
            for env in envs:
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                if tested.batch == 1 and (terminated or truncated):  # a batch begins itself
                    env.reset()

    step_in_turns(warm_up * trained.sync_interval)
    stepped, began = 0, time.perf_counter()
    while not stepped or time.perf_counter() - began < seconds:
        step_in_turns(1)
        stepped += len(envs) * tested.batch
    emulator_s = (time.perf_counter() - began) / stepped

    collector = Collector(
        serial(tested.factories(num_envs)),
        policy_of(agent, trained),
        frames_per_batch=num_envs * trained.sync_interval,
        total_frames=-1,
    )
    batch = next(iter(collector)).clone()
    collector.shutdown()
    torch.set_num_threads(1)  # shutdown gives the process its default number of threads back
    observations = batch[:, 0].select("observation")
    learn = make_learn(agent, trained, num_envs, lag=None)

    def infer() -> None:
        with torch.inference_mode():
            policy_of(agent, trained)(observations.clone(False))

    return {
        "emulator_s": emulator_s,
        "inference_s": median_seconds(infer, seconds / 3) / num_envs,
        "learning_s": 0.0
        if learn is None
        else median_seconds(lambda: learn(batch.clone(False)), seconds / 3) / batch.numel(),
    }


def run_alone(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Runs a measurement in a process of its own; its last line is the result."""
    return run_together(arguments, 1, limit_s)[0]


def run_together(arguments: list[str], copies: int, limit_s: float) -> list[dict[str, Any]]:
    """Runs a measurement in several processes at the same time."""
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as directory:
        variables = {**environment(), "TMPDIR": directory}
        try:
            for _ in range(copies):
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                processes.append(process)
            return [result_of(process, limit_s) for process in processes]
        finally:  # workers that are left behind must not slow down the next contender
            for process in processes:
                end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ends all that a measurement has started; what tracks its shared memory ends last, cleanly."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + POLITE_S
        while time.monotonic() < deadline:
            process.poll()  # reaps it: the group lives as long as that is not done
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def result_of(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    """What a measurement has printed last, or why it has not."""
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        _, errors = process.communicate()
        return {"error": f"not finished after {limit_s:.0f} s{last_error(errors)}"}
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        reasons = errors.strip().splitlines()
        return {"error": reasons[-1] if reasons else f"exit status {process.returncode}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def last_error(errors: str) -> str:
    """The last exception that was told of, to be appended."""
    found = [line for line in errors.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return f"; {found[-1]}" if found else ""
