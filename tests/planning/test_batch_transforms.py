"""Transforms around a `SerialEnv` or `ParallelEnv` serve one environment, whatever they have seen.

Axes: N environments, T steps, 3 numbers that each observes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import (
    ActionDiscretizer,
    ActionScaling,
    CatFrames,
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    EnvBase,
    EnvCreator,
    GymEnv,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RandomTruncationTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    Stack,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNormV2,
    check_env_specs,
    gSDENoise,
)
from torchrl.modules import GRUModule

from torchrl_hts import HTSCollector, RunningNorm
from torchrl_hts._executor.torchrl_env import TorchRLEnvironment
from torchrl_hts._planning.arguments import check_factories
from torchrl_hts._planning.pickling import pickle_factories

pytestmark = pytest.mark.timeout(240)

N = 3  # as many as each observes, so that shapes alone don't tell what an axis is
SINGLE = partial(GymEnv, "Pendulum-v1")
SEEN = ["observation"]

TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "TensorDictPrimer": lambda: TensorDictPrimer(h=Unbounded((3,)), expand_specs=True),
    "random TensorDictPrimer": lambda: TensorDictPrimer(
        h=Unbounded((N, 2)), expand_specs=True, random=True
    ),
    "gSDENoise": lambda: gSDENoise(3, 1, expand_specs=True),
    "CatFrames": lambda: CatFrames(N=3, dim=-1, in_keys=SEEN),
    "CatFrames after Unsqueeze": lambda: Compose(
        UnsqueezeTransform(-2, in_keys=SEEN), CatFrames(N=2, dim=-2, in_keys=SEEN)
    ),
    "TimeMaxPool": lambda: TimeMaxPool(in_keys=SEEN, T=2),
    "StepCounter": lambda: StepCounter(3),
    "RandomTruncationTransform": lambda: Compose(
        StepCounter(), RandomTruncationTransform(2, 4, prob=0.5)
    ),
    "RewardSum": RewardSum,
    "InitTracker": InitTracker,
    "TargetReturn": lambda: TargetReturn(3.0),
    "ActionDiscretizer": lambda: ActionDiscretizer(5),
    "ActionScaling": ActionScaling,
    "ObservationNorm": lambda: ObservationNorm(
        torch.arange(3.0), torch.full((3,), 2.0), in_keys=SEEN
    ),
    "RewardScaling": lambda: RewardScaling(1.0, 2.0),
    "RewardClipping": lambda: RewardClipping(-1.0, 1.0),
    "DoubleToFloat": DoubleToFloat,
    "DeviceCastTransform": lambda: DeviceCastTransform("cpu"),
    "Stack": lambda: Stack(in_keys=["terminated", "truncated"], out_key="ends", del_keys=False),
}

TOUCHES: dict[str, Callable[[EnvBase], object]] = {
    "untouched": lambda env: None,
    "specs": lambda env: (env.action_spec, env.observation_spec),
    "played": lambda env: (check_env_specs(env), env.rollout(3)),
}


def played(factory: Callable[[], Any]) -> TensorDictBase:
    """A few steps of what a factory makes."""
    env = factory()
    torch.manual_seed(0)
    env.set_seed(0)
    try:
        return env.rollout(8, break_when_any_done=False)
    finally:
        env.close()


def gather(env: Any, **kwargs: Any) -> TensorDictBase:
    kwargs = {"frames_per_batch": 12, "total_frames": 12, "seed": 0} | kwargs
    with HTSCollector(env, **kwargs) as collector:
        (batch,) = collector
    return batch


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
@pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_data_are_those_of_a_transform_in_each_environment(
    make: Callable[[], Transform], touch: Callable[[EnvBase], object]
) -> None:
    env = TransformedEnv(SerialEnv(N, SINGLE), make())
    touch(env)
    wanted = played(lambda: TransformedEnv(SINGLE(), make()))
    first, _, last = check_factories(env, None)
    for factory in (first, last):
        found = played(factory)
        assert set(found.keys(True, True)) == set(wanted.keys(True, True))
        assert (found == wanted).all()
    env.close(raise_if_closed=False)


@pytest.mark.parametrize("touch", [TOUCHES["untouched"], TOUCHES["specs"]])
def test_a_primers_specs_of_the_batch_are_taken_apart(touch: Callable[[EnvBase], object]) -> None:
    primer = TensorDictPrimer(h=Unbounded((N, 2)), expand_specs=False)  # a row for each of N
    env = TransformedEnv(SerialEnv(N, SINGLE), primer)
    touch(env)
    for factory in check_factories(env, None):
        assert factory().observation_spec["h"].shape == (2,)


def test_what_is_given_is_left_as_it_was() -> None:
    env = TransformedEnv(SerialEnv(N, SINGLE), TRANSFORMS["CatFrames"]())
    before = env.rollout(3)["observation"].shape
    check_factories(env, None)
    assert env.transform.state_dict()["_cat_buffers_observation"].shape == (N, 9)
    assert env.rollout(3)["observation"].shape == before
    env.close(raise_if_closed=False)


@pytest.mark.usefixtures("nothing_left")
def test_a_parallel_env_that_has_played_serves_a_recurrent_policy() -> None:
    torch.manual_seed(0)
    gru = GRUModule(3, 5, in_keys=["observation", "rs", "is_init"], out_keys=["f", ("next", "rs")])
    head = TensorDictModule(torch.nn.Linear(5, 1), ["f"], ["action"])
    policy = TensorDictSequential(gru, head)
    make = lambda: Compose(InitTracker(), gru.make_tensordict_primer())  # noqa: E731
    env = TransformedEnv(ParallelEnv(2, SINGLE), make())
    env.rollout(3, policy)
    env.close(raise_if_closed=False)
    batch = gather(env, policy=policy)
    assert batch["rs"].shape == (2, 6, 1, 5)
    wanted = gather([lambda: TransformedEnv(SINGLE(), make())] * 2, policy=policy)
    assert (batch == wanted).all()


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_each_environment_gets_its_row(touch: Callable[[EnvBase], object]) -> None:
    """What a batch and one environment give differs in nothing but the axis."""
    loc, scale = torch.arange(9.0).view(N, 3), 1 + torch.arange(9.0).view(N, 3)
    reward_loc, scale_of_all = torch.arange(3.0).view(N, 1), torch.full((1, 1), 2.0)
    env = TransformedEnv(
        SerialEnv(N, SINGLE),
        Compose(
            ObservationNorm(loc, scale, in_keys=SEEN),
            RewardScaling(reward_loc, scale_of_all),
        ),
    )
    touch(env)
    factories = check_factories(env, None)
    for index, factory in enumerate(factories):
        inside = Compose(
            ObservationNorm(loc[index], scale[index], in_keys=SEEN),
            RewardScaling(reward_loc[index], scale_of_all[0]),
        )
        wanted = played(lambda inside=inside: TransformedEnv(SINGLE(), inside))
        found = played(factory)
        assert (found == wanted).all()
        assert found["next", "reward"].shape == wanted["next", "reward"].shape
    assert not (played(factories[0])["observation"] == played(factories[1])["observation"]).all()
    env.close(raise_if_closed=False)


class KeepsItsSpec(Transform):
    """One that we don't know: the spec that it sees first is what it gives ever after."""

    def __init__(self) -> None:
        super().__init__(in_keys=SEEN, out_keys=["double"])
        self.spec: TensorSpec | None = None

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return 2 * obs

    def _reset(self, tensordict: TensorDictBase, reset: TensorDictBase) -> TensorDictBase:
        return self._call(reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        if self.spec is None:
            self.spec = observation_spec["observation"].clone()
        observation_spec["double"] = self.spec.clone()
        return observation_spec


class InsistsOnItsSpec(KeepsItsSpec):
    """One that raises for what it hasn't seen first."""

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        if self.spec is not None and self.spec.shape != observation_spec["observation"].shape:
            raise ValueError("it has another shape")
        return super().transform_observation_spec(observation_spec)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (KeepsItsSpec, r"'double' is torch.float32 of shape \[3, 3\], but one row .* \[3\]"),
        (InsistsOnItsSpec, "it has another shape"),
    ],
)
def test_others_that_have_seen_the_batch_are_refused_with_advice_that_helps(
    kind: type[Transform], what: str
) -> None:
    make = lambda: TransformedEnv(SerialEnv(N, SINGLE), kind())  # noqa: E731
    env = make()
    check_factories(env, None)  # which touches nothing
    env.observation_spec  # noqa: B018
    said = (
        rf"the transforms around this SerialEnv fit its whole batch, .* alone: {what}.*"
        r"If they have seen its whole batch \(check_env_specs, a rollout or reading its specs "
        r"does that\), give the callable that makes it, or a fresh one"
    )
    with pytest.raises(TypeError, match=said):
        check_factories(env, None)
    wanted = played(lambda: TransformedEnv(SINGLE(), kind()))
    for fresh in (make, make()):
        assert (played(check_factories(fresh, None)[0]) == wanted).all()


def test_several_transforms_are_put_around_without_torchrls_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = "torchrl.envs.transforms._base._AUTO_UNWRAP_WARNING_EMITTED"
    monkeypatch.setattr(given, False)  # it is given once in a process
    env = TransformedEnv(SerialEnv(2, SINGLE), Compose(InitTracker(), RewardSum()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = check_factories(env, None)[0]()
        TorchRLEnvironment(one, 0, max_frames_per_traj=3)
    assert [type(each) for each in one.transform] == [InitTracker, RewardSum]


@pytest.mark.usefixtures("nothing_left")
def test_statistics_that_an_env_creator_shares_are_refused_with_advice_that_helps() -> None:
    def make(normalised: bool = True) -> EnvBase:
        return TransformedEnv(SINGLE(), VecNormV2(in_keys=SEEN)) if normalised else SINGLE()

    creator = EnvCreator(make)
    for factory in (creator, partial(creator), *check_factories(SerialEnv(2, creator), None)):
        with pytest.raises(TypeError, match=r"^create_env_fn\[0\] is an EnvCreator that shares"):
            pickle_factories([factory])
    policy = torch.nn.Sequential(RunningNorm(3), torch.nn.Linear(3, 1))
    batch = gather([partial(make, normalised=False)] * 2, policy=policy)
    assert batch["observation"].shape == (2, 6, 3)
