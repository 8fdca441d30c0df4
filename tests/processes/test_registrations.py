"""What the main process has registered with gymnasium can be made by its id in workers."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from collectors import start
from environments import EchoEnv
from gymnasium.envs.registration import WrapperSpec, registry
from policies import categorical
from processes import Script
from torchrl.envs import GymEnv

from torchrl_hts._evaluation.evaluator import Evaluator
from torchrl_hts._learner.learner import environment_seed
from torchrl_hts._processes.registrations import Registrations
from torchrl_hts.errors import WorkerError

pytestmark = pytest.mark.usefixtures("collectors_end", "own_registry")

MINE = partial(gym.make, "HTSTest/Mine-v0")


@pytest.fixture
def own_registry() -> Iterator[None]:
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


class Mine(EchoEnv):
    """Tells by its rewards how it was made."""

    def __init__(self, bonus: float = 0.0, function: Any = None) -> None:
        super().__init__((10**9,))
        self.bonus = bonus if function is None else function(bonus)

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.bonus, *rest


class Double(gym.RewardWrapper[Any, Any]):
    """Of a registration."""

    def reward(self, reward: Any) -> Any:
        return 2 * reward


def rewards(make_env: Any = MINE, num_executors: int = 1, **kwargs: Any) -> set[float]:
    collector = start([make_env] * 2, num_executors=num_executors, **kwargs)
    found = next(iter(collector))["next", "reward"].unique().tolist()
    collector.shutdown()
    return set(found)


@pytest.mark.parametrize(
    "spec",
    [
        {"entry_point": Mine, "kwargs": {"bonus": 3.0}},
        {"entry_point": lambda: Mine(3.0)},
        {"entry_point": "test_registrations:Mine", "kwargs": {"bonus": 3.0}},
        {"entry_point": Mine, "kwargs": {"bonus": 2.0, "function": lambda bonus: bonus + 1}},
        {
            "entry_point": partial(Mine, 1.5),
            "additional_wrappers": (WrapperSpec("Double", "test_registrations:Double", {}),),
        },
    ],
    ids=["class", "lambda", "text", "function among its arguments", "wrapper"],
)
def test_an_environment_of_a_project(spec: dict[str, Any]) -> None:
    gym.register("HTSTest/Mine-v0", **spec)
    assert rewards() == {3.0}


def test_how_it_is_asked_for() -> None:
    gym.register("HTSTest/Mine-v0", Mine, kwargs={"bonus": 3.0}, max_episode_steps=2)
    assert rewards(lambda: gym.make("HTSTest/Mine-v0", bonus=4.0)) == {4.0}
    assert rewards(lambda: gym.spec("HTSTest/Mine-v0").make()) == {3.0}
    with pytest.warns(UserWarning, match="latest versioned"):
        gym.make("HTSTest/Mine")
    assert rewards(lambda: gym.make("HTSTest/Mine")) == {3.0}
    batch = next(iter(start([MINE])))
    assert batch["next", "truncated"].flatten().tolist() == [False, True, False, True]


def test_of_a_torchrl_environment() -> None:
    gym.register("HTSTest/Mine-v0", Mine, kwargs={"bonus": 3.0})
    assert rewards(lambda: GymEnv("HTSTest/Mine-v0", categorical_action_encoding=True)) == {3.0}


def test_in_an_evaluation() -> None:
    gym.register("HTSTest/Mine-v0", Mine, kwargs={"bonus": 3.0})
    with Evaluator(MINE, categorical(), num_episodes=1, max_frames_per_episode=2) as evaluator:
        evaluator.submit(0)
        assert evaluator.wait()[0].returns == (6.0,)


@pytest.mark.parametrize("entry_point", [Mine, "test_registrations:Mine"])
def test_an_environment_of_gymnasium_that_was_replaced(entry_point: Any) -> None:
    with pytest.warns(UserWarning, match="Overriding"):
        gym.register("CartPole-v1", entry_point, kwargs={"bonus": 3.0})
    assert rewards(partial(gym.make, "CartPole-v1")) == {3.0}


def test_an_environment_of_gymnasium_with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry["CartPole-v1"], "max_episode_steps", 2)
    policy = categorical(num_actions=2)
    batch = next(iter(start([partial(gym.make, "CartPole-v1")], policy)))
    assert batch["next", "truncated"].flatten().tolist() == [False, True, False, True]


def test_one_that_is_not_registered_any_more() -> None:
    del registry["CartPole-v1"], registry["CartPole-v0"]
    with pytest.raises(WorkerError, match=r"NameNotFound: .*CartPole.* doesn't exist"):
        start([partial(gym.make, "CartPole-v1")])


def test_those_of_the_moment_in_which_the_collector_is_made() -> None:
    gym.register("HTSTest/Mine-v0", Mine, kwargs={"bonus": 3.0})
    collector = start([_make_dying], on_executor_failure="restart", num_executors=1)
    del registry["HTSTest/Mine-v0"]
    with pytest.warns(RuntimeWarning, match="no engine"):
        batch = next(iter(collector))
    assert batch["next", "reward"].unique().tolist() == [3.0]


def _make_dying() -> Any:
    return _Dies(MINE())


class _Dies(gym.Wrapper[Any, Any, Any, Any]):
    """Raises in its first process."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.first = seed == environment_seed(0, 0, 0)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.first:
            raise OSError("no engine")
        return super().step(action)


class TestInTheFactory:
    """What a factory registers counts, and what it imports is what the main process has too."""

    def test_registered_there(self) -> None:
        gym.register("HTSTest/Mine-v0", Mine, kwargs={"bonus": 3.0})

        def make_env() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                gym.register("HTSTest/Mine-v0", Mine, kwargs={"bonus": 4.0})
            return gym.make("HTSTest/Mine-v0")

        assert rewards(make_env, num_executors=2) == {4.0}

    @pytest.mark.parametrize("num_executors", [1, 2])
    @pytest.mark.parametrize("imports_it", [False, True])
    def test_imported_there(
        self, tmp_path: Path, monkeypatch: Any, num_executors: int, imports_it: bool
    ) -> None:
        """The main process has replaced what the package had registered."""
        package = f"hts_test_registers_{num_executors}{imports_it}"
        (tmp_path / f"{package}.py").write_text(
            "import gymnasium as gym\n"
            "from test_registrations import Mine\n"
            "gym.register('HTSTest/Mine-v0', __name__ + ':Mine', kwargs={'bonus': 1.0})\n"
            "gym.register('HTSTest/Other-v0', __name__ + ':Mine', kwargs={'bonus': 2.0})\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        __import__(package)
        assert rewards(partial(gym.make, "HTSTest/Other-v0")) == {2.0}
        with pytest.warns(UserWarning, match="Overriding"):
            gym.register("HTSTest/Mine-v0", f"{package}:Mine", kwargs={"bonus": 3.0})

        def make_env() -> Any:
            if imports_it:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    __import__(package)
            return gym.make("HTSTest/Mine-v0")

        assert rewards(make_env, num_executors) == {3.0}


class TestWhatCannotBeSent:
    """The message says why, and its advice works."""

    SAID = (
        r"'HTSTest/Mine-v0' is registered in the main process, but can't be sent to this one.*"
        r"TypeError: cannot pickle '_thread\.lock' object\. Register it, or import the module that "
        r"registers it, inside the factory"
    )

    def test_it_is_only_said_to_who_asks(self) -> None:
        gym.register("HTSTest/Mine-v0", Mine, kwargs={"function": threading.Lock()})
        next(iter(start([EchoEnv])))
        with pytest.raises(WorkerError, match=self.SAID):
            start([MINE])

    def test_registering_it_in_the_factory(self) -> None:
        gym.register("HTSTest/Mine-v0", Mine, kwargs={"function": threading.Lock()})

        def make_env() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                gym.register("HTSTest/Mine-v0", partial(Mine, 4.0))
            return gym.make("HTSTest/Mine-v0")

        assert rewards(make_env, num_executors=2) == {4.0}

    def test_importing_it_in_the_factory(self, tmp_path: Path, monkeypatch: Any) -> None:
        (tmp_path / "hts_test_locked.py").write_text(
            "import gymnasium as gym, threading\n"
            "from test_registrations import Mine\n"
            "class Adds:\n"
            "    lock = threading.Lock()\n"
            "    def __init__(self): self.own = self.lock\n"
            "    def __call__(self, bonus): return bonus + 3\n"
            "    def __deepcopy__(self, memo): return self\n"
            "kwargs = {'bonus': 2.0, 'function': Adds()}\n"
            "gym.register('HTSTest/Mine-v0', Mine, kwargs=kwargs)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module("hts_test_locked")

        def make_env() -> Any:
            importlib.import_module("hts_test_locked")
            return gym.make("HTSTest/Mine-v0")

        with pytest.raises(WorkerError, match=self.SAID):
            start([MINE])
        assert rewards(make_env) == {5.0}

    def test_what_cannot_be_unpickled(self) -> None:
        gym.register("HTSTest/Mine-v0", Mine, kwargs={"function": _FailsToArrive()})
        with pytest.raises(WorkerError, match=r"can't be sent .*: OSError: not here\. Register it"):
            start([MINE])


class _FailsToArrive:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise OSError("not here")


def test_what_nobody_has_registered() -> None:
    """The error says where to register it."""
    with pytest.raises(WorkerError, match=r"NamespaceNotFound.*before that or inside the factory"):
        start([MINE])
    with pytest.raises(WorkerError, match=r"NamespaceNotFound.*before that or inside the factory"):
        Evaluator(MINE, categorical())


def test_what_a_package_registers() -> None:
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    make_env = partial(gym.make, "ALE/Pong-v5", obs_type="ram")
    policy = categorical(128, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        batch = next(iter(start([make_env] * 2, policy, num_executors=2)))
    assert batch["observation"].dtype == torch.uint8


IN_A_SCRIPT = """
import functools, json, sys
import gymnasium as gym
from environments import EchoEnv
from gymnasium.envs.registration import WrapperSpec
from policies import categorical
from torchrl_hts import HTSCollector

class Mine(EchoEnv):
    pass

class Same(gym.Wrapper):
    pass

gym.register(
    "Mine-v0", Mine, additional_wrappers=(WrapperSpec("Same", "__main__:Same", {}),)
)
gym.register("Text-v0", "__main__:Mine")
makers = [functools.partial(gym.make, "Mine-v0"), lambda: gym.make("Text-v0")]
with HTSCollector(makers, categorical(), frames_per_batch=8, total_frames=8) as collector:
    print(json.dumps([batch.shape for batch in collector]))
"""


def test_classes_of_a_script(tmp_path: Path) -> None:
    with Script(tmp_path / "train.py", IN_A_SCRIPT) as script:
        assert script.receive() == [[2, 4]]
        assert script.wait()[0] == 0


def test_specs_are_what_they_were_once_they_are_looked_at() -> None:
    gym.register("HTSTest/Mine-v0", Mine, kwargs={"function": abs})
    given = registry["HTSTest/Mine-v0"]
    sent = Registrations.here()
    assert [env_id for env_id, _ in sent.others if env_id.startswith("HTS")] == [given.id]
    sent.take_over(())
    try:
        found = registry["HTSTest/Mine-v0"]
        assert (found.namespace, found.name, found.version) == ("HTSTest", "Mine", 0)
        assert found is not given
        assert found.kwargs == {"function": abs}
        assert found == given
        assert type(found) is type(given)
    finally:
        for module in (gym, gym.envs, gym.envs.registration):
            module.register = module.register.__wrapped__
