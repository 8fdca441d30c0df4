"""Simulations of MuJoCo: what is restored goes on bit for bit, or is refused."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from resumption import check_resumption, play, record

from torchrl_hts.env_state import CannotSaveError, restore_environment, save_environment

pytest.importorskip("mujoco")

TASKS = [
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
]
ENDLESS = ("HalfCheetah", "HumanoidStandup", "Swimmer")  # within 300 steps


def make(task: str) -> gym.Env[Any, Any]:
    return gym.make(f"{task}-v5")


@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_gymnasium(task: str) -> None:
    check_resumption(partial(make, task), 300, ends=task not in ENDLESS)


def go_on(task: str, state: bytes, events: list[Any]) -> list[Any]:
    """In another process."""
    env = make(task)
    restore_environment(env, state)
    return play(env, events)


def test_they_go_on_in_another_process() -> None:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as executor:
        for task in TASKS:
            events, outputs = record(partial(make, task), 230, seed=5)
            env = make(task)
            env.reset(seed=5)
            play(env, events[:30])
            rest = executor.submit(go_on, task, save_environment(env), events[30:])
            assert rest.result() == outputs[30:], task


def test_what_an_observation_reads_before_the_next_step_is_what_it_was() -> None:
    env, other = make("Humanoid"), make("Humanoid")
    env.reset(seed=0)
    play(env, [np.full(17, 0.1, np.float32)] * 20)
    restore_environment(other, save_environment(env))
    here, there = other.unwrapped.data, env.unwrapped.data  # type: ignore[attr-defined]
    for name in ("xipos", "xpos", "cfrc_ext", "qfrc_actuator", "sensordata", "qacc_warmstart"):
        assert getattr(here, name).tobytes() == getattr(there, name).tobytes(), name
    assert here.contact.dist.tobytes() == there.contact.dist.tobytes()


def test_a_model_that_an_environment_changes_is_saved_with_it() -> None:
    env, other = make("Hopper"), make("Hopper")
    env.reset(seed=0)
    model = env.unwrapped.model  # type: ignore[attr-defined]
    model.body_mass[:] *= 1.5
    model.opt.gravity[2] = -5.0
    model.opt.timestep = 0.004
    model.vis.global_.fovy = 30.0
    restore_environment(other, save_environment(env))
    restored = other.unwrapped
    saved = env.unwrapped.data.__getstate__()  # type: ignore[attr-defined]
    assert restored.data.__getstate__() == saved  # type: ignore[attr-defined]
    assert restored.model is restored.data.model  # type: ignore[attr-defined]
    assert restored.mujoco_renderer.model is restored.model  # type: ignore[attr-defined]
    assert restored.model.body_mass.tobytes() == model.body_mass.tobytes()  # type: ignore[attr-defined]
    assert restored.dt == 0.016  # type: ignore[attr-defined]
    events = [np.ones(3, np.float32)] * 9
    assert play(other, events) == play(env, events)


@pytest.mark.parametrize("of", ["data.qpos", "data.qpos[1:].reshape(-1, 1)", "model.body_mass"])
def test_a_view_of_its_memory_is_refused(of: str) -> None:
    env = make("Hopper")
    env.reset(seed=0)
    env.unwrapped.mine = eval(f"env.unwrapped.{of}")  # type: ignore[attr-defined]
    with pytest.raises(CannotSaveError, match=r"'mine'.*a view of MuJoCo's memory: keep a copy"):
        save_environment(env)
    env.unwrapped.mine = env.unwrapped.mine.copy()  # type: ignore[attr-defined]
    save_environment(env)


def test_a_simulation_of_another_model_is_refused() -> None:
    state = save_environment(gym.make("Hopper-v5"))
    with pytest.raises(ValueError, match=r"another make.*whose model has the sizes and names"):
        restore_environment(gym.make("Hopper-v5", xml_file="walker2d_v5.xml"), state)
