"""Environments as users have them: arrays used again, cycles, slow ends, forks, programs."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper

from torchrl_hts import HTSCollector, WorkerError

pytestmark = pytest.mark.usefixtures("nothing_left")


class Counter(gym.Env[Any, Any]):
    """Observes the step that it is at, in the one array that it has; episodes have three."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.shown = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.shown[:] = 0
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.shown += 1
        return self.shown, 1.0, bool(self.shown[0] == 3), False, {}


def gathered(*factories: Any, steps: int = 6, **options: Any) -> torch.Tensor:
    """Next observations ``[N, T]`` of one round."""
    with HTSCollector(
        [*factories], None, frames_per_batch=steps * len(factories), num_executors=1, **options
    ) as collector:
        batch = next(iter(collector))
        found: torch.Tensor = batch["next", "observation"].squeeze(-1).clone()
        return found


def in_torchrl() -> GymWrapper:
    return GymWrapper(Counter(), categorical_action_encoding=True)


def test_the_last_observation_of_an_array_that_is_used_again() -> None:
    """It is not the first of the next episode, in environments of TorchRL's neither."""
    expected = torch.tensor([[1.0, 2.0, 3.0] * 2])
    assert torch.equal(gathered(Counter), expected)
    assert torch.equal(gathered(in_torchrl), expected)


class Watched(Counter):
    """Shows itself by a proxy, whose copy would count no further."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = weakref.proxy(self)
        self.gone = weakref.proxy(Counter())

    def step(self, action: Any) -> Any:
        _, *others = super().step(action)
        return self.itself.shown.copy(), *others


def test_proxies_stand_for_what_they_stood_for() -> None:
    assert torch.equal(gathered(Watched, Watched), torch.tensor([[1.0, 2.0, 3.0] * 2] * 2))


class Cyclic(Counter):
    """Holds what holds itself."""

    def __init__(self) -> None:
        super().__init__()
        root: dict[str, Any] = {"children": []}
        root["children"].append({"parent": root})
        self.tree = root


def test_containers_that_hold_each_other() -> None:
    assert gathered(Cyclic).shape == (1, 6)


class Fails(Counter):
    """Fails once."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.marker = Path(folder, "failed")

    def step(self, action: Any) -> Any:
        if not self.marker.exists():
            self.marker.touch()
            raise ValueError("the ball left the universe")
        return super().step(action)


class ClosesSlowly(Counter):
    """Writes its film when it is closed."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.film = Path(folder, f"film-{os.getpid()}")

    def close(self) -> None:
        time.sleep(0.3)  # at work
        self.film.touch()


def test_environments_beside_one_that_fails_are_closed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    factories = [functools.partial(Fails, folder), functools.partial(ClosesSlowly, folder)]
    with pytest.warns(RuntimeWarning, match="the ball left the universe"):
        gathered(*factories, on_executor_failure="restart")
    assert len(list(tmp_path.glob("film-*"))) == 2, "of the executor that failed, and the other"


class Interrupts(Counter):
    """Ends a program as terminals do."""

    def step(self, action: Any) -> Any:
        done = subprocess.run(["sh", "-c", "kill -INT $$; exit 7"], check=False)
        _, *rest = super().step(action)
        return np.array([done.returncode], np.float32), *rest


def test_programs_of_environments_can_be_interrupted() -> None:
    assert (gathered(Interrupts, steps=2) == -signal.SIGINT).all()


class Forks(Counter):
    """Has a child do something, and end as scripts do."""

    def step(self, action: Any) -> Any:
        if (pid := os.fork()) == 0:
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        return super().step(action)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_fork_that_exits_is_no_executor() -> None:
    assert torch.equal(gathered(Forks, steps=3), torch.tensor([[1.0, 2.0, 3.0]]))


class NoField(Counter):
    """Can't begin."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise ValueError("there is no field to play on")


@pytest.mark.parametrize("vector", [gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv])
def test_what_the_first_reset_of_a_batch_raises_is_told(vector: Any) -> None:
    with pytest.raises(WorkerError, match="there is no field to play on"):
        gathered(functools.partial(vector, [NoField] * 2))


CLOSES_BADLY = """
import gymnasium as gym
from torchrl_hts import HTSCollector

class ClosesBadly(gym.Wrapper):
    def close(self):
        raise RuntimeError("no encoder for films")

make_env = lambda: ClosesBadly(gym.make("CartPole-v1"))
with HTSCollector([make_env], None, frames_per_batch=4, total_frames=4) as collector:
    list(collector)
"""


def test_what_closing_raises_is_on_stderr(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CLOSES_BADLY)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0
    assert "RuntimeError: no encoder for films" in done.stderr


class NoSample(gym.spaces.Box):
    """Of which nothing can be drawn."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        raise NotImplementedError


def test_observations_of_a_space_that_draws_none() -> None:
    """The policy is tried with what gymnasium draws from a Box."""

    class Undrawn(Counter):
        observation_space = gym.spaces.Dict(
            a=NoSample(-9, 9, (1,), np.float32), b=gym.spaces.Discrete(2)
        )

        def reset(self, **options: Any) -> Any:
            return {"a": super().reset(**options)[0], "b": 0}, {}

        def step(self, action: Any) -> Any:
            seen, *others = super().step(action)
            return {"a": seen, "b": 1}, *others

    policy = TensorDictModule(lambda a, b: b.long(), ["a", "b"], ["action"])
    with HTSCollector([Undrawn], policy, frames_per_batch=4, num_executors=1) as collector:
        batch = next(iter(collector))
    assert batch["a"].flatten().tolist() == [0, 1, 2, 0]
    assert batch["action"].flatten().tolist() == [0, 1, 1, 0]


def test_observations_of_more_than_64_bits_are_refused() -> None:
    class Long(Counter):
        observation_space = gym.spaces.Box(-9, 9, (1,), np.longdouble)  # type: ignore[arg-type]

    said = r"'observation' as float\d+ .*make it float32, or float64, with an ObservationWrapper"
    with pytest.raises(TypeError, match=said):
        gathered(Long)


class Strict(Counter):
    """Lets numpy raise in its sums; observes and pays what is too small for 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        np.seterr(all="raise")

    def step(self, action: Any) -> Any:
        _, _, *others = super().step(action)
        return np.full(1, 1e-300), np.float64(1e-300), *others


def strict_batch() -> Any:
    return gym.vector.SyncVectorEnv([Strict] * 2)


@pytest.mark.parametrize("make", [Strict, strict_batch])
def test_numpy_may_raise_in_an_environments_own_sums(make: Any) -> None:
    """What it observes and pays is rounded as ever."""
    with HTSCollector([make], None, frames_per_batch=4, num_executors=1) as collector:
        step = next(iter(collector))["next"]
    assert (step["observation"] == 0).all()
    assert (step["reward"] == 0).all()


def test_what_a_script_defines_has_no_name_in_a_worker() -> None:
    """So that an environment can't pickle it there, and is told what to do."""
    state = type("State", (), {"__module__": "__main__"})

    class Pickles(Counter):
        def reset(self, **options: Any) -> Any:
            pickle.dumps(state())
            return super().reset(**options)

    with pytest.raises(WorkerError, match=r"(?s)on __main__.*put it into a module of its own"):
        gathered(Pickles)
