"""Collectors in a notebook: its kernel is interrupted, shut down and killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager
from processes import alive, script_environment, wait_until_gone

pytestmark = pytest.mark.timeout(180)

SECONDS_TO_END = 5.0

CELL = """
import json, os
import gymnasium as gym
import numpy as np
import torch
from probe import server_pids
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl_hts import HTSCollector

class Countdown(gym.Env):
    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1, 9, (1,), np.float32)

    def __init__(self, bell=None):
        self.bell = bell

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3.0
        return self.observe(), {}

    def observe(self):
        return np.array([self.left], np.float32)

    def step(self, action):
        if self.bell:
            with open(self.bell, "w"):  # waits for somebody who reads
                self.bell = None
        self.left -= 1
        return self.observe(), REWARD, self.left == 0, False, {}

REWARD = 7.0

class Policy(nn.Module):
    def forward(self, observation):
        return (observation[..., 0] > 1).long()

def make(bell=None, **options):
    policy = TensorDictModule(Policy(), ["observation"], ["action"])
    return HTSCollector([lambda: Countdown(bell), Countdown], policy, num_executors=2, **options)

def pids(collector):
    return [*collector.worker_pids().values(), *server_pids(collector)]
"""


class Notebook:
    """A kernel, and what its cells print."""

    def __init__(self, directory: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory), env=script_environment())
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=200)

    def run(self, code: str) -> Any:
        """Run a cell; returns what it has printed, as JSON, or the name of its error."""
        self.begin(code)
        return self.end()

    def begin(self, code: str) -> None:
        """Begin to run a cell."""
        self.cell = self.client.execute(code)

    def end(self) -> Any:
        """Wait for the cell."""
        printed, error = "", None
        while True:
            message = self.client.get_iopub_msg(timeout=200)
            content = message["content"]
            if message["parent_header"].get("msg_id") != self.cell:
                continue
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return error or (json.loads(printed) if printed else None)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.client.stop_channels()
    if notebook.manager.has_kernel:
        notebook.manager.shutdown_kernel(now=True)
    notebook.manager.cleanup_resources()


def test_a_kernel_is_interrupted_and_shut_down(notebook: Notebook, tmp_path: Path) -> None:
    """What a cell defines comes by value; an interrupt ends the collector; nothing is left."""
    assert notebook.run(CELL) is None
    rewards, pids = notebook.run(
        "with make(frames_per_batch=8) as collector:\n"
        "    rewards = next(iter(collector))['next', 'reward'].unique().tolist()\n"
        "    print(json.dumps([rewards, pids(collector)]))"
    )
    assert rewards == [7.0]
    wait_until_gone(pids, SECONDS_TO_END)

    bell = tmp_path / "bell"
    os.mkfifo(bell)
    pids = notebook.run(
        f"collector = make({str(bell)!r}, frames_per_batch=10**6)\n"
        "print(json.dumps(pids(collector)))"
    )
    notebook.begin("next(iter(collector))")
    bell.read_text()  # as soon as an environment steps: a round of minutes has begun
    notebook.manager.interrupt_kernel()
    assert notebook.end() == "KeyboardInterrupt"
    wait_until_gone(pids, SECONDS_TO_END)
    assert notebook.run("next(iter(collector))") == "RuntimeError"

    pids = notebook.run(
        "again = make(frames_per_batch=8)\nbatches = iter(again)\nbatch = next(batches)\n"
        "print(json.dumps([os.getpid(), *pids(again)]))"
    )
    assert all(map(alive, pids))
    notebook.manager.shutdown_kernel()
    wait_until_gone(pids, SECONDS_TO_END)


def test_a_kernel_is_killed(notebook: Notebook) -> None:
    assert notebook.run(CELL) is None
    pids = notebook.run(
        "collector = make(frames_per_batch=8)\nbatches = iter(collector)\nbatch = next(batches)\n"
        "print(json.dumps([os.getpid(), *pids(collector)]))"
    )
    assert len(pids) == 6, "the kernel, two servers and three workers"
    assert all(map(alive, pids))
    notebook.manager.shutdown_kernel(now=True)
    wait_until_gone(pids, SECONDS_TO_END)
