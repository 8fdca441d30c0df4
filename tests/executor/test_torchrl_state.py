"""TorchRL environments are saved anywhere, and go on elsewhere with the same bits."""

from __future__ import annotations

import ast
import enum
import functools
import pickle
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    NoopResetEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TimeMaxPool,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from torchrl_environments import Clocks
from torchrl_resumption import KEY, Make, Part, Played, check_resumption, saved

from torchrl_hts.env_state.compressed import compressed
from torchrl_hts.env_state.sealed import sealed
from torchrl_hts.errors import CannotSaveError


class Mode(enum.Enum):
    """Which way it goes."""

    UP, DOWN = 1.0, -1.0


class Crowd(list):  # type: ignore[type-arg]
    """A list with an attribute."""


class Odd(EnvBase):
    """Keeps what changes in all the ways there are, and shows all of it in its observation.

    Episodes have 7 steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((12,)))
        self.action_spec = Categorical(3)
        self.reward_spec = Unbounded((1,))
        self.array = np.zeros((2, 3))
        self.same = torch.from_numpy(self.array).T  # over one memory
        self.last = self.array[1, ::-1]
        self.numpy, self.old = np.random.default_rng(3), np.random.RandomState(4)
        self.python, self.torch = random.Random(5), torch.Generator().manual_seed(6)
        self.draw = self.python.random  # a method of C
        self.seen: deque[float] = deque([0.0], maxlen=3)
        self.counts: dict[Any, int] = {("steps", 0): 0}
        self.ordered = OrderedDict(a=1.0, b=2.0)
        self.mode, self.part, self.crowd = Mode.UP, Part(), Crowd([self.counts])
        self.crowd.size = 0
        self.held = [self.part, (self.part, self.mode)]
        self.gain = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.memory = TensorDict({"a": torch.zeros(2), "of": {"b": torch.zeros(1)}}, []).lock_()
        self.grow, self.also = self._growing(), functools.partial(self._add, by=2.0)
        self.kept = {"never", "changes"}
        self.levels: defaultdict[str, list[int]] = defaultdict(list)

    def _growing(self) -> Callable[[], float]:
        height = 0.0

        def grow() -> float:
            nonlocal height
            height += 1
            return height

        return grow

    def _add(self, by: float) -> float:
        self.part.total += by
        return self.part.total

    def _observe(self) -> Tensor:
        drawn = (self.numpy.random(), self.old.randn(), self.draw())
        one = float(torch.rand((), generator=self.torch))
        counted = sum(self.counts.values()) + self.crowd[0]["steps", 0] + self.crowd.size
        numbers = (*drawn, one, self.array.sum(), float(self.same[2, 1]), float(self.last[0]))
        counted += 10 * len(self.levels["a"])
        others = (sum(self.seen), counted, self.mode.value * self.held[0].total)
        return torch.tensor((*numbers, *others, self.grow(), float(self.memory["of", "b"])))

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        self.counts["resets"] = self.counts.get("resets", 0) + 1
        return TensorDict({KEY: self._observe().float()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = int(tensordict["action"])
        self.steps += 1
        self.array[action % 2] += self.numpy.random(3)
        self.seen.append(float(action))
        self.counts["steps", 0] += 1
        self.ordered.move_to_end("a" if action else "b")
        self.levels[next(iter(self.ordered))].append(action)
        self.mode = Mode.DOWN if action else Mode.UP
        self.also()
        self.part.later = self.part.total  # no attribute before
        self.crowd.size += action
        self.memory["of", "b"].add_(self.gain * action)
        done = torch.tensor([int(self.steps) % 7 == 0])
        return TensorDict({KEY: self._observe().float(), "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        self.numpy = np.random.default_rng(seed)


def transformed(*transforms: Callable[[], Any], task: str = "Pendulum-v1") -> EnvBase:
    return TransformedEnv(GymEnv(task), Compose(*(make() for make in transforms)))


def cart() -> EnvBase:
    return transformed(
        lambda: NoopResetEnv(4), lambda: StepCounter(9), RewardSum, InitTracker, task="CartPole-v1"
    )


FRAMES = functools.partial(CatFrames, 3, dim=-1, in_keys=[KEY])
MAKERS: dict[str, Make] = {
    "gymnasium's": cart,
    "frames": lambda: transformed(lambda: StepCounter(11), FRAMES, lambda: NoopResetEnv(3)),
    "a maximum of frames": lambda: transformed(
        lambda: StepCounter(8), lambda: TimeMaxPool(in_keys=[KEY], T=2)
    ),
    "normalised": lambda: transformed(lambda: VecNormV2(in_keys=[KEY]), lambda: StepCounter(8)),
    "normalised as before": lambda: transformed(lambda: VecNorm(in_keys=[KEY, "reward"])),
    "several of TorchRL's": lambda: SerialEnv(3, cart),
    "a batch": lambda: Clocks(3, 5, 7),
    "all kinds of attributes": Odd,
}


@pytest.mark.parametrize("name", MAKERS)
def test_i7_it_goes_on_with_the_same_bits(name: str) -> None:
    check_resumption(MAKERS[name])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("scenario", ["navigation", "balance"])
def test_i7_vmas_goes_on_with_the_same_bits(scenario: str) -> None:
    pytest.importorskip("vmas", reason="vmas is not installed: pip install 'torchrl_hts[vmas]'")
    from torchrl.envs.libs.vmas import VmasEnv

    check_resumption(lambda: VmasEnv(scenario, num_envs=3, max_steps=7), 9)


class Changed(Odd):
    """Gets an attribute at its 5th step."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step = super()._step(tensordict)
        if int(self.steps) == 5:
            self.extra = self.make(self)
        return step


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda env: iter(()), r"env\.extra \(builtins\.tuple_iterator\).*a class of C"),
        (lambda env: ast.Pass(), r"env\.extra .*Pass.* had no such object when it was new"),
        (lambda env: {"a set"}, r"env\.extra \(builtins\.set\).*had no set of 'a set' there"),
        (lambda env: {1: [np.array([env], object)]}, r"env\.extra\[1\]\[0\] .*array of objects"),
        (lambda env: lambda: 1, r"env\.extra .* had no the function .*lambda"),
        (lambda env: os_path, r"env\.extra .*held no .*join when it was new"),
        (lambda env: nn.Parameter(torch.ones(1)) * 2, r"env\.extra .*it has a gradient"),
        (lambda env: env.array.sum, r"env\.extra .*it is a method of a numpy\.ndarray"),
        (lambda env: torch.empty(1, device="meta"), r"env\.extra .*no plain strided tensor"),
        (lambda env: functools.reduce(lambda x, _: [x], range(600), []), r"nested too deeply at"),
        (lambda env: [[] for _ in range(60_000)], r"more than 50,000 objects, env\.extra\["),
        (lambda env: torch.eye(2).to_sparse(), r"env\.extra .*no plain strided tensor"),
    ],
)
def test_what_can_not_be_saved_is_named(make: Callable[[Any], Any], reason: str) -> None:
    played = Played(lambda: Changed(make), 0).begin()
    played.play(4, 0)
    played.save()
    played.play(2, 0)
    with pytest.raises(CannotSaveError, match=reason):
        played.save()


os_path = __import__("os").path.join


class WithEngine(Odd):
    """Holds what can't be seen from Python, and says itself what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.position = open("/dev/null"), torch.zeros(3)  # noqa: SIM115

    def get_state(self) -> dict[str, Any]:
        """All that its observation depends on."""
        return {"position": self.position, "steps": int(self.steps)}

    def set_state(self, state: dict[str, Any]) -> None:
        """The other way round."""
        self.position, self.steps[...] = state["position"], state["steps"]

    def _observe(self) -> Tensor:
        return self.position.repeat(4)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.position = self.position + tensordict["action"]
        return super()._step(tensordict)


def test_i7_an_environment_can_say_itself_what_its_state_is() -> None:
    check_resumption(WithEngine)
    check_resumption(lambda: TransformedEnv(WithEngine(), StepCounter(5)))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    state = saved(cart)
    damaged = state[:-9] + bytes([state[-9] ^ 1]) + state[-8:]
    for wrong, reason in (
        (damaged, "is damaged, of another version"),
        (b"torchrl_hts environment 3\n", "or of another kind of environment"),
        (saved(Odd), r"can't be read here: it holds no test_torchrl_state.Odd"),
        (saved(lambda: SerialEnv(2, cart)), "can't be read here: "),
    ):
        with pytest.raises(ValueError, match=reason):
            Played(cart, 0).restore(wrong)


class Calls:
    """Is pickled as a call."""

    def __reduce__(self) -> Any:
        return print, ("it was called",)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Calls(), r"it names builtins\.print, and may name nothing"),
        (("enum", "os.system", "true"), r"it holds no os\.system"),
        (("enum", "torchrl.envs.libs.gym.GymEnv", "CartPole-v1"), "is no class of Enums"),
        (("namedtuple", "torchrl.envs.libs.gym.GymEnv", []), "is no class of tuples"),
        (("literal", "dtype", "load"), "torch has no data type load"),
        (("lookup", ("random", random.Random(0).getstate()), "__reduce__"), "may not be looked up"),
        (("read", None), "there is no kind 'read'"),
    ],
)
def test_a_state_runs_no_code_that_comes_with_it(record: Any, reason: str) -> None:
    state = saved(cart)
    kind = state[: state.index(b"\n") + 1]
    forged = sealed(kind, compressed(pickle.dumps(([], [None, record], {}))))
    with pytest.raises(ValueError, match=reason):
        Played(cart, 0).restore(forged)


def test_before_its_first_step_there_is_nothing_to_save() -> None:
    with pytest.raises(CannotSaveError, match="it has made no step yet"):
        Played(cart, 0).begin().save()
