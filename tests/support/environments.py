"""Environments for tests, each of which checks what it is given. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from torchrl_hts._executor.gym_env import GymEnvironment, RowOptions
from torchrl_hts._executor.observations import observation_fields
from torchrl_hts._rounds.shared_memory import Field, Layout, SharedMemory


class EchoEnv(gym.Env[Any, Any]):
    """Observes (own seed, episode, step, last action); rewards with the step; ends on time.

    So a batch tells by itself whether rows, steps, actions and episodes belong together.
    """

    def __init__(
        self,
        lengths: tuple[int, ...] = (5,),
        truncates: bool = False,
        action_space: gym.Space[Any] | None = None,
    ) -> None:
        self.action_space = action_space or gym.spaces.Discrete(3)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.lengths = lengths
        self.truncates = truncates
        self.seed = -1
        self.episode = -1
        self.closed = False

    def _observe(self, action: float) -> np.ndarray:
        return np.array([self.seed, self.episode, self.t, action], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode += 1
        self.t = 0
        return self._observe(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert not self.closed
        assert self.action_space.contains(action), (action, self.action_space)
        self.t += 1
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        scalar = float(np.sum(np.asarray(action, np.float64))) if np.size(action) else 0.0
        return (
            self._observe(scalar),
            float(self.t),
            over and not self.truncates,
            over and self.truncates,
            {},
        )

    def close(self) -> None:
        self.closed = True


def echo(*lengths: int, **kwargs: bool) -> partial[EchoEnv]:
    """Makes one whose episodes have these lengths, by turns; 5 by default."""
    return partial(EchoEnv, lengths or (5,), **kwargs)


class DictEnv(gym.Env[Any, Any]):
    """Nested and multiple observations of several data types."""

    def __init__(self) -> None:
        self.action_space = gym.spaces.Discrete(2, start=5)
        self.observation_space = gym.spaces.Dict(
            {
                "pixels": gym.spaces.Box(0, 255, (2, 3), np.uint8),
                "level": gym.spaces.Discrete(7),
                "state": gym.spaces.Dict({"speed": gym.spaces.Box(-1, 1, (3,), np.float32)}),
            }
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def _observe(self) -> dict[str, Any]:
        return {
            "pixels": np.full((2, 3), 250 + self.t, np.uint8),
            "level": self.t % 7,
            "state": {"speed": np.full(3, self.t / 10, np.float32)},
        }

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (5, 6), action
        self.t += 1
        return self._observe(), float(action), self.t >= 4, False, {}


class GatedEnv(EchoEnv):
    """Waits at one step until somebody has opened a named pipe and writes to it, or closes it."""

    def __init__(self, gate: str, at: int) -> None:
        super().__init__(lengths=(10**9,))
        self.gate, self.at = gate, at

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == self.at:
            with open(self.gate, "rb") as gate:
                gate.read(1)
        return super().step(action)


class FaultyEnv(EchoEnv):
    """Does something bad at a step, or at its first reset."""

    def __init__(self, fault: str, at: int = 3) -> None:
        super().__init__(lengths=(10**9,))
        self.fault, self.at = fault, at
        if fault == "init":
            raise RuntimeError("no engine here")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.fault == "reset":
            raise RuntimeError("cannot reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t == self.at:
            if self.fault == "raise":
                raise ValueError("the ball left the universe")
            if self.fault == "shape":
                observation = observation[:2]
            if self.fault == "exit":
                os._exit(7)
            if self.fault == "quit":
                sys.exit("the engine gave up")
            if self.fault == "interrupt":
                raise KeyboardInterrupt("as by the engine's own handler")
            if self.fault == "fork and die":
                os.setpgid(0, 0)
                if os.fork() == 0:
                    signal.pause()
                os.kill(os.getpid(), signal.SIGKILL)
        return observation, reward, terminated, truncated, info


class ClosingEnv(EchoEnv):
    """Leaves a file behind when it is closed; fails then, if it is to."""

    def __init__(self, path: str, fails: bool) -> None:
        super().__init__()
        self.path = path
        self.fails = fails

    def close(self) -> None:
        Path(self.path).touch()
        if self.fails:
            raise ConnectionError("the simulator is gone")


class SlowlySavedEnv(EchoEnv):
    """Takes its time to say what its state is."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.lock = threading.Lock()  # which can't be pickled: so it is asked

    def get_state(self) -> Any:
        time.sleep(self.seconds)
        return self.seed, self.episode, self.t

    def set_state(self, state: Any) -> None:
        self.seed, self.episode, self.t = state


class SimulatorEnv(EchoEnv):
    """Has a process of its own, which it ends when it is closed."""

    def __init__(self, folder: str, close_s: float = 0.0) -> None:
        super().__init__((10**9,))
        self.simulator = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
        self.close_s = close_s
        Path(folder, str(self.simulator.pid)).touch()

    def close(self) -> None:
        time.sleep(self.close_s)
        self.simulator.terminate()
        self.simulator.wait()


class OddEnv(EchoEnv):
    """Has some other space."""

    def __init__(self, name: str, space: gym.Space[Any]) -> None:
        super().__init__()
        setattr(self, name, space)


class WithNothing(EchoEnv):
    """Observes an empty array besides."""

    def __init__(self) -> None:
        super().__init__()
        nothing = gym.spaces.Box(-1, 1, (3, 0), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"observation": self.observation_space, "nothing": nothing}
        )

    def _observe(self, action: float) -> Any:
        return {"observation": super()._observe(action), "nothing": np.empty((3, 0), np.float32)}


class Paying(gym.Env[Any, Any]):
    """Observes its seed's number and the step; pays what the action is."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-100, 100, (1,), np.float32)

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def _observe(self) -> np.ndarray:
        return np.array([self.t, self.t * 0.5 + 1], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), float(action[0]), self.t >= self.length, False, {}


class Named(gym.Env[Any, Any]):
    """Observes a vector, and under some path 500 and the step."""

    def __init__(self, *path: str) -> None:
        self.path = path
        space: Any = gym.spaces.Box(-1e6, 1e6, (1,), np.float32)
        for name in reversed(path or ("more",)):
            space = gym.spaces.Dict({name: space})
        vector = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"observation": vector, **space.spaces})
        self.action_space = gym.spaces.Discrete(2)

    def _observe(self) -> Any:
        value: Any = np.full(1, 500 + self.t, np.float32)
        for name in reversed(self.path or ("more",)):
            value = {name: value}
        return {"observation": np.zeros(2, np.float32), **value}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._observe(), 1.0, self.t >= 3, False, {}


class Renamed(gym.ObservationWrapper[Any, Any, Any]):
    """The advice, followed."""

    def __init__(self, env: gym.Env[Any, Any], old: str) -> None:
        super().__init__(env)
        self.old = old
        self.observation_space = gym.spaces.Dict(self._renamed(env.observation_space.spaces))  # type: ignore[attr-defined]

    def _renamed(self, values: Any) -> dict[str, Any]:
        return {("mine" if name == self.old else name): value for name, value in values.items()}

    def observation(self, observation: Any) -> Any:
        return self._renamed(observation)


class Scripted(gym.Env[Any, Any]):
    """Returns what it is given."""

    def __init__(self, space: gym.Space[Any], observation: Any, reward: Any = 0.0) -> None:
        self.observation_space, self.action_space = space, gym.spaces.Discrete(2)
        self.observation, self.reward = observation, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.observation, self.reward, False, False, {}


def play(env: gym.Env[Any, Any], fd: int) -> dict[Any, np.ndarray]:
    """A reset and a step; returns what has been written."""
    fields = [field for field, _ in observation_fields(env.observation_space)]
    fields += [Field(("next", *field.key), field.shape, field.dtype) for field in fields]
    fields += [Field(("next", n), (1,), "bool") for n in ("done", "terminated", "truncated")]
    fields += [Field(("next", "reward"), (1,), "float32"), Field(("action",), (), "int64")]
    fields.append(Field(("collector", "traj_ids"), (), "int64"))
    memory = SharedMemory(fd, Layout(1, 1, 0, 0, tuple(fields), ()))
    environment = GymEnvironment(env, 0)
    environment.bind(memory, RowOptions(0, True, (("action",),), ()))
    environment.reset(0, 0)
    environment.write_observation(0, 0)
    environment.step(0, 0)
    return memory.fields(0)


def wrapped_in_disguise() -> Any:
    """A TorchRL environment, which the name of this function doesn't give away."""
    from torchrl.envs import GymWrapper

    return GymWrapper(EchoEnv())


class Generous(gym.RewardWrapper[Any, Any]):
    """Adds to each reward what it has drawn while it was made."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.bonus = float(np.random.uniform())

    def reward(self, reward: Any) -> float:
        return float(reward) + self.bonus


def generous_cartpole() -> gym.Env[Any, Any]:
    return Generous(gym.make("CartPole-v1"))
