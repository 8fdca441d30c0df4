"""A policy is tried with what environments give, since their spaces don't tell what it takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from showing import Shows, floats, show_episodes
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import MaskedCategorical, ProbabilisticActor

from torchrl_hts import Evaluator, Failure, HTSCollector, PolicyError, WorkerError
from torchrl_hts._planning import worker_counts
from torchrl_hts._planning.costs import PassCosts, TeamSize

spaces = gym.spaces
SETTINGS: list[dict[str, Any]] = [{}, {"num_executors": 1}, {"num_executors": 3, "num_actors": 2}]


class Strict(Shows):
    """Raises at an action that isn't legal."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.legal[action]:
            raise ValueError(f"the action {action} is not legal")
        return super().step(action)


class Noted(Shows):
    """Leaves a file in a folder when it is made."""

    def __init__(self, folder: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Path(folder, f"{len(os.listdir(folder))}").touch()


def with_mask(space: gym.Space[Any]) -> spaces.Dict:
    return spaces.Dict(observation=spaces.Box(-9, 9, (3,), np.float32), action_mask=space)


def show_mask(env: Any) -> Any:
    mask = env.legal.astype(env.observation_space["action_mask"].dtype)
    return {"observation": np.full(3, env.t, np.float32), "action_mask": mask}


class AsBool(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        if not mask.any(-1).all():
            raise ValueError("no action is legal")
        return mask.bool()


def masked() -> TensorDictSequential:
    """Draws one of the legal actions."""
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
        TensorDictModule(AsBool(), ["action_mask"], ["mask"]),
        ProbabilisticActor(
            TensorDictModule(nn.Identity(), ["logits"], ["logits"]),
            in_keys=["logits", "mask"],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        ),
    )


class Net(nn.Module):
    """Two layers over what something makes of the inputs, which may refuse them."""

    def __init__(self, read: Callable[..., Tensor], width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 4))
        self.read = read

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.read(self.table, *inputs))
        return logits


def acting(read: Callable[..., Tensor], width: int, keys: tuple[str, ...]) -> ProbabilisticActor:
    torch.manual_seed(0)
    return ProbabilisticActor(
        TensorDictModule(Net(read, width), list(keys), ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def of_codes(table: nn.Embedding, codes: Tensor) -> Tensor:
    return table(codes.long()).flatten(-2)


def of_one_code(table: nn.Embedding, code: Tensor, x: Tensor) -> Tensor:
    return torch.cat([table(code), x], -1)


def of_probabilities(table: nn.Embedding, chances: Tensor) -> Tensor:
    if not torch.allclose(chances.sum(-1), torch.ones(()), atol=1e-5) or (chances < 0).any():
        raise ValueError("probabilities must add up to 1")
    return chances


def within(table: nn.Embedding, low: Tensor, x: Tensor) -> Tensor:
    if not (low <= x).all():
        raise ValueError("x must not be below low")
    return torch.cat([low, x], -1)


def show_codes(env: Any) -> Any:
    return env.np_random.integers(0, 11, env.observation_space.shape).astype(np.uint8)


def show_one_code(env: Any) -> Any:
    return {"code": env.np_random.integers(11), "x": np.zeros(2, np.float32)}


def show_probabilities(env: Any) -> Any:
    return env.np_random.dirichlet([1.0, 1.0, 1.0]).astype(np.float32)


def show_ordered(env: Any) -> Any:
    low, x = np.sort(env.np_random.random((2, 3), np.float32), 0)
    return {"low": low, "x": x}


KINDS: dict[str, tuple[Callable[[], gym.Env[Any, Any]], Callable[[], nn.Module]]] = {
    "bool mask": (partial(Shows, with_mask(spaces.Box(0, 1, (4,), bool)), show_mask), masked),
    "binary mask": (partial(Shows, with_mask(spaces.MultiBinary(4)), show_mask), masked),
    "no other action": (partial(Strict, with_mask(spaces.MultiBinary(4)), show_mask), masked),
    "bytes": (
        partial(Shows, spaces.Box(0, 255, (5,), np.uint8), show_codes),
        partial(acting, of_codes, 20, ("observation",)),
    ),
    "one integer": (
        partial(
            Shows, spaces.Dict(code=spaces.Discrete(10**9), x=floats(2)), show_one_code
        ),
        partial(acting, of_one_code, 6, ("code", "x")),
    ),
    "probabilities": (
        partial(Shows, spaces.Box(0, 1, (3,), np.float32), show_probabilities),
        partial(acting, of_probabilities, 3, ("observation",)),
    ),
    "across fields": (
        partial(Shows, spaces.Dict(low=floats(3), x=floats(3)), show_ordered),
        partial(acting, within, 6, ("low", "x")),
    ),
}  # fmt: skip


def collect(make: Any, policy: nn.Module, num_envs: int = 3, **options: Any) -> TensorDict:
    """Two rounds of eight steps."""
    frames = 8 * num_envs
    with HTSCollector(
        [make] * num_envs, policy, frames_per_batch=frames, total_frames=2 * frames, seed=0,
        **options,
    ) as collector:  # fmt: skip
        return torch.cat([batch.exclude("collector") for batch in collector], 1)


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(v, other[k]) for k, v in one.items(True, True))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kind", KINDS)
def test_policies_that_take_only_what_is_real(kind: str) -> None:
    """I7: and whoever was asked for observations, the bits are the same."""
    make, policy = KINDS[kind]
    found = [collect(make, policy(), **options) for options in SETTINGS]
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    if "action_mask" in found[0].keys():
        legal = found[0]["action_mask"].gather(-1, found[0]["action"][..., None])
        assert legal.all()
    assert collect(make, policy(), num_envs=1).shape == (1, 16)


def masked_torchrl_env(space: gym.Space[Any]) -> Any:
    from torchrl.envs import ActionMask, GymWrapper, TransformedEnv

    env = GymWrapper(Strict(with_mask(space), show_mask), categorical_action_encoding=True)
    return TransformedEnv(env, ActionMask())


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("space", [spaces.MultiBinary(4), spaces.Box(0, 1, (4,), bool)])
def test_masks_of_torchrl_environments(space: gym.Space[Any]) -> None:
    make = partial(masked_torchrl_env, space)
    found = [collect(make, masked(), **options) for options in SETTINGS]
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def plain() -> ProbabilisticActor:
    return acting(lambda table, x: x, 2, ("observation",))


def counted_torchrl_env() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(Shows(floats(2), show_episodes), categorical_action_encoding=True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize(
    ("make", "first"),
    [
        (partial(Shows, floats(2), show_episodes), 1),
        (partial(Shows, floats(2), show_episodes, unsaved=True), 1),
        (counted_torchrl_env, 2),  # torchrl's wrapper sets the seed by a reset
    ],
    ids=["saved", "made anew", "torchrl"],
)
def test_the_first_episode_of_a_run_is_an_environments_first(
    make: Any, first: int, options: dict[str, Any]
) -> None:
    episodes = collect(make, plain(), **options)["observation"][..., 0]
    assert (episodes == torch.arange(16) // 6 + first).all()
    assert (collect(make, plain(), num_envs=1)["observation"][0, 0] == first).all()


@pytest.mark.usefixtures("nothing_left")
def test_an_environment_that_can_be_saved_is_made_once(tmp_path: Path) -> None:
    make = partial(Noted, str(tmp_path), floats(2), show_episodes)
    collect(make, plain(), num_executors=1)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("nothing_left")
def test_passes_are_timed_with_what_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[PassCosts | None] = []

    def choose(_: Any, num_envs: int, cores: int, time_passes: Any, **__: Any) -> TeamSize:
        found.append(time_passes())
        return TeamSize(2, 1)

    monkeypatch.setattr(worker_counts, "team_for", choose)
    for kind in ("bool mask", "probabilities"):
        make, policy = KINDS[kind]
        collect(make, policy())
    assert [costs is not None and costs.rows for costs in found] == [(1, 3), (1, 3)]


@pytest.mark.usefixtures("nothing_left")
def test_a_policy_that_refuses_most_rows_is_measured_as_one_that_takes_them() -> None:
    """The same network finds the same sizes, in a space that says all and in one that doesn't."""
    sizes = []
    for top in (10, 255):
        make = partial(Shows, spaces.Box(0, top, (5,), np.uint8), show_codes)
        policy = acting(of_codes, 20, ("observation",))
        with HTSCollector([make] * 20, policy, frames_per_batch=40, seed=0) as collector:
            sizes.append(collector.statistics().invariant_sizes)
    assert sizes[0] == sizes[1]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("unsaved", [False, True])
def test_evaluations(unsaved: bool) -> None:
    make = partial(Strict, with_mask(spaces.MultiBinary(4)), show_mask, unsaved)
    with Evaluator(make, masked(), num_episodes=2) as evaluator:
        evaluator.submit(0)
        (evaluation,) = evaluator.wait()
    assert evaluation.lengths == (6, 6)

    class Paid(Shows):
        def step(self, action: Any) -> Any:
            seen, _, *rest = super().step(action)
            return seen, float(self.episodes), *rest

    with Evaluator(partial(Paid, floats(2), show_episodes, unsaved), plain()) as evaluator:
        evaluator.submit(0)
        assert set(evaluator.wait()[0].returns) == {6.0}, "each plays its first episode"


def test_a_policy_that_fails_on_what_is_real_fails_at_once() -> None:
    make = partial(Shows, floats(3), lambda env: np.ones(3, np.float32))
    policy = acting(of_probabilities, 3, ("observation",))
    with pytest.raises(PolicyError, match=r"on what the environment gave .*add up to 1"):
        collect(make, policy)


class Ends(Shows):
    """Can't be reset."""

    def __init__(self, does: str) -> None:
        super().__init__(floats(2), show_episodes)
        self.does = does

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.does == "crash":
            os.abort()
        if self.does == "exit":
            raise SystemExit(3)
        raise OSError("the engine is gone")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("does", "failure"),
    [("raise", Failure.RAISED), ("crash", Failure.CRASHED), ("exit", Failure.RAISED)],
)
def test_a_reset_that_fails_is_told_of_by_the_first_round(does: str, failure: Failure) -> None:
    with pytest.raises(WorkerError, match=r"environment 0 .*in round 0, step 0") as raised:
        collect(partial(Ends, does), plain(), num_envs=1)
    assert raised.value.failure is failure
