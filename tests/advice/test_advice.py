"""Advice in error messages, followed: what the message says has to be in it, and has to work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collectors import start
from environments import EchoEnv
from gymnasium import wrappers
from policies import categorical, marked
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Composite, NonTensor, TensorSpec, Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.modules import LSTMModule, OneHotCategorical, ProbabilisticActor
from torchrl_environments import Spoken

from torchrl_hts import WorkerError, keep_servers

S = gym.spaces
MOST_CHARACTERS = 400  # of a message, without the traceback of a worker


@pytest.fixture(scope="module", autouse=True)
def warm_servers() -> Any:
    with keep_servers():
        yield


class Odd(EchoEnv):
    """Observes `seen`, for its space; rewards with `reward`."""

    def __init__(self, space: gym.Space[Any], seen: Any, reward: Any = 1.0) -> None:
        super().__init__()
        self.observation_space, self.seen, self.given = space, seen, reward

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, _, *rest = super().step(action)
        return self.seen, self.given, *rest  # type: ignore[return-value]


def gather(
    make: Callable[[], Any], policy: nn.Module | None = None, copies: int = 1, **kwargs: Any
) -> Any:
    """The first batch of one environment, or of several alike."""
    collector = start([make] * copies, policy or marked(), num_executors=1, num_actors=1, **kwargs)
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


def refusal(make: Callable[[], Any], policy: nn.Module | None = None, **kwargs: Any) -> str:
    """The message with which it is refused."""
    with pytest.raises((TypeError, ValueError, WorkerError)) as caught:
        gather(make, policy, **kwargs)
    said = str(caught.value)
    if isinstance(caught.value, WorkerError):
        said = caught.value.remote_traceback.splitlines()[-1]
    prose = said.split("gymnasium.wrappers")[0]  # what follows may be a line to paste
    assert len(prose) < MOST_CHARACTERS, said
    return said


def shown(message: str, after: str) -> str:
    """The line of code that a message ends with."""
    assert f" {after} " in message, message
    return message.split(f" {after} ")[1]


def pasted(line: str, env: gym.Env[Any, Any]) -> Any:
    """What a line makes of an environment."""
    return eval(line, {"env": env, "gymnasium": gym, "numpy": np})


BOX = S.Box(-1, 1, (2,), np.float32)
ZEROS = np.zeros(2, np.float32)


class TestKeys:
    """Keys that are no strings."""

    @pytest.mark.parametrize(
        ("space", "seen", "said"),
        [
            ({"observation": BOX, 7: BOX}, {"observation": ZEROS, 7: ZEROS}, "the key 7, which"),
            ({"observation": S.Dict({(1, 2): BOX})}, {}, r"the key (1, 2) below 'observation'"),
        ],
    )
    def test_of_an_observation_space(self, space: Any, seen: Any, said: str) -> None:
        message = refusal(partial(Odd, S.Dict(space), seen))
        assert said in message
        assert "not a string" in message
        assert "rename it with gymnasium.wrappers.TransformObservation" in message

    def test_of_an_observation_space_renamed(self) -> None:
        def make() -> Any:
            env = Odd(S.Dict({"observation": BOX, 7: BOX}), {"observation": ZEROS, 7: ZEROS + 1})
            space = S.Dict({"observation": BOX, "seven": BOX})
            return wrappers.TransformObservation(
                env, lambda seen: {"observation": seen["observation"], "seven": seen[7]}, space
            )

        assert (gather(make)["seven"] == 1).all()

    def test_of_an_action_space(self) -> None:
        space = S.Dict({7: S.Discrete(3)})
        assert "the action space has the key 7, which is not a string" in (
            message := refusal(partial(EchoEnv, action_space=space))
        )
        assert "rename it with gymnasium.wrappers.TransformAction" in message

        def make() -> Any:
            env = Taking(space)
            return wrappers.TransformAction(
                env, lambda taken: {7: taken["seven"]}, S.Dict({"seven": S.Discrete(3)})
            )

        policy = marked()
        policy.out_keys[0] = policy.out_keys_source[0] = ("action", "seven")
        gather(make, policy)


class Taking(EchoEnv):
    """Takes actions under a key that is no string."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.taken = space

    def step(self, action: Any) -> Any:
        assert self.taken.contains(action)
        return super().step(action[7])


class TestValues:
    """Values that don't fit."""

    @pytest.mark.parametrize("seen", [np.array([0.5, 1.0]), np.array([7, 256])])
    def test_another_data_type(self, seen: Any) -> None:
        make = partial(Odd, S.Box(0, 255, (2,), np.uint8), seen)
        message = refusal(make)
        assert "convert it in a gymnasium.ObservationWrapper, or make the space" in message
        kind = shown(message, "a Box of")
        spacious = gather(partial(Odd, S.Box(0, 255, (2,), np.dtype(kind)), seen))
        assert (spacious["observation"] == torch.from_numpy(seen)).all()

        class Converted(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return observation.astype(np.uint8)

        assert (gather(lambda: Converted(make()))["observation"][..., 1] == seen[1] % 256).all()

    @pytest.mark.parametrize("seen", [None, "a text", np.array([1, None]), np.zeros(2, complex)])
    def test_no_numbers(self, seen: Any) -> None:
        message = refusal(partial(Odd, BOX, seen))
        assert "return numbers, or make some of it in a gymnasium.ObservationWrapper" in message

        class Numbers(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return ZEROS

        gather(lambda: Numbers(Odd(BOX, seen)))

    def test_a_reward_that_is_too_large(self) -> None:
        make = partial(Odd, BOX, ZEROS, 1e39)
        assert "scale it with gymnasium.wrappers.TransformReward" in refusal(make)
        scaled = gather(lambda: wrappers.TransformReward(make(), lambda reward: reward / 1e39))
        assert (scaled["next", "reward"] == 1).all()

    def test_a_vector_of_rewards(self) -> None:
        make = partial(Odd, BOX, ZEROS, np.array([1.0, 2.0]))
        message = refusal(make)
        assert "the reward array([1., 2.]); expected one number" in message
        assert "gymnasium.wrappers.TransformReward(env, sum)" in message
        assert (gather(lambda: wrappers.TransformReward(make(), sum))["next", "reward"] == 3).all()

    def test_an_observation_that_is_too_large(self) -> None:
        make = partial(Odd, BOX, np.array([0, 1e39]))
        assert "scale it with a gymnasium.ObservationWrapper" in refusal(make)

        class Scaled(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return observation / 1e39

        assert (gather(lambda: Scaled(make()))["observation"][..., 1] == 1).all()

    def test_masked_elements(self) -> None:
        make = partial(Odd, BOX, np.ma.array([1.0, 2.0], mask=[False, True]))
        message = refusal(make)
        assert "fill them (numpy.ma.filled) in a gymnasium.ObservationWrapper" in message

        class Filled(gym.ObservationWrapper[Any, Any, Any]):
            def observation(self, observation: Any) -> Any:
                return np.ma.filled(observation, -1)

        assert (gather(lambda: Filled(make()))["observation"][..., 1] == -1).all()

    def test_an_action_that_the_space_does_not_have(self) -> None:
        message = refusal(EchoEnv, marked(action=3))
        assert "let the policy have as many actions" in message
        gather(EchoEnv, categorical(num_actions=3))


class Says(Transform):
    """Adds an entry to what an environment gives, with a spec or without one."""

    def __init__(self, what: Any, spec: TensorSpec | None = None) -> None:
        super().__init__()
        self.what, self.spec = what, spec

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("said", self.what)

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        if self.spec is not None:
            observation_spec["said"] = self.spec
        return observation_spec


class Talker(nn.Module):
    """Chooses an action, and says why."""

    def forward(self, observation: Tensor) -> Any:
        return torch.ones(observation.shape[:-1], dtype=torch.int64), "a text"


class TestEntries:
    """Entries that a batch can't hold, or lacks."""

    @pytest.mark.parametrize("what", ["text", "ragged"])
    def test_of_an_environment(self, what: str) -> None:
        make = partial(Spoken, "spec", what)
        assert "leave it out with torchrl.envs.ExcludeTransform('said')" in refusal(make)
        batch = gather(lambda: TransformedEnv(make(), ExcludeTransform("said")))
        assert "said" not in batch

    def test_at_a_depth(self) -> None:
        spec = Composite(deep=NonTensor(()))

        def make(*without: Any) -> Any:
            says = Says(TensorDict(deep="x"), spec)
            return TransformedEnv(Spoken("spec", "tensor"), Compose(says, *without))

        assert "ExcludeTransform(('said', 'deep'))" in refusal(make)
        gather(partial(make, ExcludeTransform(("said", "deep"))))

    def test_without_a_spec(self) -> None:
        def make(spec: TensorSpec | None = None) -> Any:
            return TransformedEnv(GymWrapper(EchoEnv()), Says(torch.ones(3), spec))

        policy = TensorDictModule(OneHot(), ["observation"], ["action"])
        message = refusal(make, policy)
        assert "in the transform's transform_observation_spec" in message
        assert (gather(partial(make, Unbounded((3,))), policy)["next", "said"] == 1).all()
        assert "add it to the environment's observation_spec" in message
        gather(partial(Spoken, "spec", "tensor"))

    def test_of_a_policy(self) -> None:
        def policy() -> TensorDictModule:
            return TensorDictModule(Talker(), ["observation"], ["action", "why"])

        message = refusal(EchoEnv, policy())
        assert "the policy's entry 'why' is a NonTensorData" in message
        assert "leave it out with policy.select_out_keys" in message
        gather(EchoEnv, policy().select_out_keys("action"))

    def test_of_a_gymnasium_environment(self) -> None:
        make = partial(Odd, S.Dict(observation=BOX), {"observation": ZEROS, "more": ZEROS})
        message = refusal(make)
        assert "returned an observation with 'more', which its observation space does" in message
        assert "gymnasium.wrappers.FilterObservation(env, ['observation'])" in message
        gather(lambda: wrappers.FilterObservation(make(), ["observation"]))
        assert "add it to the space" in message
        space = S.Dict(observation=BOX, more=BOX)
        assert "more" in gather(partial(Odd, space, {"observation": ZEROS, "more": ZEROS}))


class OneHot(nn.Module):
    """The action that TorchRL's wrapper expects of a Discrete space."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.eye(3, dtype=torch.int64)[
            torch.ones(observation.shape[:-1], dtype=torch.int64)
        ]


TEXT = S.Text(5)
SENTENCE = S.Sequence(BOX)
GRAPH = S.Graph(BOX, None)


class TestSpaces:
    """Spaces that have no fixed array shape."""

    @pytest.mark.parametrize("space", [TEXT, SENTENCE, GRAPH, S.Tuple([TEXT, SENTENCE])], ids=repr)
    def test_in_a_dict(self, space: gym.Space[Any]) -> None:
        seen = {"observation": ZEROS, "odd": "text"}
        make = partial(Odd, S.Dict(observation=BOX, odd=space), seen)
        message = refusal(make)
        assert f"'odd' is a {type(space).__name__} space; supported are Box" in message
        assert "Leave it out with gymnasium.wrappers.FilterObservation(env, ['observation'])" in (
            message
        )
        gather(lambda: wrappers.FilterObservation(make(), ["observation"]))

    @pytest.mark.parametrize("space", [TEXT, S.Dict(a=S.Dict(b=GRAPH))], ids=repr)
    def test_without_others_beside_it(self, space: gym.Space[Any]) -> None:
        make = partial(Odd, space, "text")
        assert "Make an array of it with gymnasium.wrappers.TransformObservation" in refusal(make)
        gather(lambda: wrappers.TransformObservation(make(), lambda _: ZEROS, BOX))

    @pytest.mark.parametrize(
        ("space", "seen"),
        [
            (S.Tuple([BOX, S.Discrete(2)]), (ZEROS, 1)),
            (S.OneOf([BOX, S.Discrete(2)]), (0, ZEROS)),
            (S.Dict(a=S.Tuple([BOX, S.Discrete(2)]), b=BOX), {"a": (ZEROS, 1), "b": ZEROS}),
        ],
        ids=repr,
    )
    def test_that_can_be_flattened(self, space: gym.Space[Any], seen: Any) -> None:
        make = partial(Odd, space, seen)
        assert "Flatten it with gymnasium.wrappers.FlattenObservation(env)" in refusal(make)
        gather(lambda: wrappers.FlattenObservation(make()))

    def test_of_actions(self) -> None:
        class Pairs(Odd):
            def step(self, action: Any) -> Any:
                return super().step(action[0])

        def make() -> Any:
            env = Pairs(BOX, ZEROS)
            return wrappers.TransformAction(env, lambda a: a, S.Tuple([S.Discrete(3)]))

        message = refusal(make)
        assert "the action space has a Tuple" in message
        assert "Turn it into one of these with gymnasium.wrappers.TransformAction" in message
        gather(lambda: wrappers.TransformAction(make(), lambda a: (a,), S.Discrete(3)))

    def test_a_vector_of_environments(self) -> None:
        class Blind(gym.vector.VectorEnv):  # type: ignore[type-arg]
            num_envs = 2
            single_observation_space = S.Box(0, 1, (4,))
            observation_space = S.Box(0, 1, (2, 4))
            single_action_space, action_space = S.Discrete(3), S.MultiDiscrete([3, 3])

        message = refusal(Blind)
        assert "make it with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP" in message
        gather(lambda: gym.vector.SyncVectorEnv([EchoEnv], autoreset_mode="SameStep"))


def actor(*, distribution: Any = Categorical, key: str = "observation") -> Any:
    net = TensorDictModule(nn.Linear(4, 3), [key], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=distribution)


def floats() -> Any:
    return wrappers.DtypeObservation(EchoEnv(), np.float32)


class TestPolicies:
    """A policy and an environment that don't fit each other."""

    def test_doubles(self) -> None:
        message = refusal(EchoEnv, actor())
        line = shown(message, "'observation' is float64: make the environment")
        assert gather(lambda: pasted(line, EchoEnv()), actor())["observation"].dtype == torch.float

    def test_doubles_in_a_dict(self) -> None:
        space = S.Dict(a=S.Box(-1, 1, (4,), np.float64), b=BOX, c=S.Box(-1, 1, (1, 2), np.float64))
        make = partial(Odd, space, {"a": np.ones(4), "b": ZEROS, "c": np.full((1, 2), 0.5)})
        policy = TensorDictSequential(
            TensorDictModule(nn.Linear(2, 1), ["c"], ["features"]), actor(key="a")
        )
        line = shown(refusal(make, policy), "make the environment")
        batch = gather(lambda: pasted(line, make()), policy)
        assert (batch["c"] == 0.5).all()
        assert {batch[key].dtype for key in "abc"} == {torch.float}

    def test_doubles_deep_down(self) -> None:
        space = S.Dict(a=S.Dict(b=S.Box(-1, 1, (4,), np.float64)))
        make = partial(Odd, space, {"a": {"b": np.zeros(4)}})
        message = refusal(make, actor(key=("a", "b")))
        assert "in a gymnasium.ObservationWrapper, and in its observation_space" in message

        class Lower(gym.ObservationWrapper[Any, Any, Any]):
            observation_space = S.Dict(a=S.Dict(b=S.Box(-1, 1, (4,), np.float32)))

            def observation(self, observation: Any) -> Any:
                return {"a": {"b": observation["a"]["b"].astype(np.float32)}}

        gather(lambda: Lower(make()), actor(key=("a", "b")))

    def test_doubles_of_a_torchrl_environment(self) -> None:
        def make(*transforms: Transform) -> Any:
            env = GymWrapper(EchoEnv(), categorical_action_encoding=True)
            return TransformedEnv(env, Compose(*transforms))

        assert "torchrl.envs.DoubleToFloat() to the environment's transforms" in refusal(
            make, actor()
        )
        gather(lambda: make(DoubleToFloat()), actor())

    def test_whole_numbers(self) -> None:
        make = partial(Odd, S.Box(0, 255, (4,), np.uint8), np.zeros(4, np.uint8))
        message = refusal(make, actor())
        assert "'observation' is no floats: let the policy convert them first" in message
        gather(make, categorical())

    def test_a_failure_that_has_nothing_to_do_with_data_types(self) -> None:
        assert "float64" not in refusal(partial(Odd, S.Box(-1, 1, (5,)), ZEROS), actor())

    def test_a_one_hot_action_spec(self) -> None:
        make = partial(GymWrapper, categorical_action_encoding=True)
        message = refusal(lambda: GymWrapper(floats()), actor())
        assert "categorical_action_encoding=True" in message
        assert "torchrl.modules.OneHotCategorical" in message
        gather(lambda: make(floats()), actor())
        gather(lambda: GymWrapper(floats()), actor(distribution=OneHotCategorical))

    def test_an_index_action_spec(self) -> None:
        def make(encoding: bool) -> Any:
            return lambda: GymWrapper(floats(), categorical_action_encoding=encoding)

        message = refusal(make(True), actor(distribution=OneHotCategorical))
        assert "categorical_action_encoding=False" in message
        assert "torch.distributions.Categorical" in message
        gather(make(False), actor(distribution=OneHotCategorical))

    def test_several_one_hot_actions(self) -> None:
        class Indices(nn.Module):
            def forward(self, observation: Tensor) -> Tensor:
                return torch.ones(*observation.shape[:-1], 2, dtype=torch.int64)

        policy = TensorDictModule(Indices(), ["observation"], ["action"])

        def make(**kwargs: Any) -> Any:
            return GymWrapper(EchoEnv(action_space=S.MultiDiscrete([2, 3])), **kwargs)

        assert "categorical_action_encoding=True (GymEnv, GymWrapper)" in refusal(make, policy)
        gather(partial(make, categorical_action_encoding=True), policy)

    def test_a_recurrent_policy_without_a_primer(self) -> None:
        lstm = LSTMModule(
            4, 5, in_keys=["observation", "h", "c"], out_keys=["x", ("next", "h"), ("next", "c")]
        )
        head = TensorDictModule(nn.Linear(5, 3), ["x"], ["logits"])
        policy = TensorDictSequential(
            lstm, ProbabilisticActor(head, in_keys=["logits"], distribution_class=Categorical)
        )

        def make(*transforms: Transform) -> Any:
            env = GymWrapper(floats(), categorical_action_encoding=True)
            return TransformedEnv(env, Compose(*transforms))

        message = refusal(make, policy)
        assert "the policy reads 'h', which the environment does not give" in message
        assert "torchrl.envs.InitTracker()" in message
        assert "make_tensordict_primer()" in message
        primer = lstm.make_tensordict_primer()
        assert "InitTracker() to the environment's transforms" in refusal(
            lambda: make(lstm.make_tensordict_primer()), policy
        )
        assert primer.primers["h"].shape == (1, 5)
        gather(lambda: make(InitTracker(), lstm.make_tensordict_primer()), policy)

    def test_bfloat16_actions(self) -> None:
        class Half(nn.Module):
            def forward(self, observation: Tensor) -> Tensor:
                return torch.zeros(*observation.shape[:-1], 2, dtype=torch.bfloat16)

        policy = TensorDictModule(Half(), ["observation"], ["action"])
        make = partial(EchoEnv, action_space=BOX)
        assert "let its distribution work in float32" in refusal(make, policy)

        class Full(Half):
            def forward(self, observation: Tensor) -> Tensor:
                return super().forward(observation).float()

        gather(make, TensorDictModule(Full(), ["observation"], ["action"]))

    def test_lazy_parameters(self) -> None:
        net = nn.Sequential(nn.LazyLinear(3))
        policy = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
        )
        message = refusal(floats, policy)
        assert "run it once on a batch like env.fake_tensordict()" in message
        env = GymWrapper(floats(), categorical_action_encoding=True)
        policy(env.fake_tensordict())
        gather(floats, policy)


class TestEnvironments:
    """What a factory makes, and how long episodes are."""

    def test_a_name(self) -> None:
        with pytest.raises(TypeError) as caught:
            start("CartPole-v1", categorical())  # type: ignore[arg-type]
        line = shown(str(caught.value), "such as")
        gather(eval(line, {"functools": functools, "gymnasium": gym}), categorical(num_actions=2))

    def test_a_batch_of_environments(self) -> None:
        message = refusal(partial(GymEnv, "CartPole-v1", num_envs=2))
        assert "give one factory per single environment" in message
        gather(partial(Spoken, "none", "text"))

    def test_steps_that_are_counted_already(self) -> None:
        def make() -> Any:
            return TransformedEnv(Spoken("none", "text"), StepCounter())

        message = refusal(make, max_frames_per_traj=3)
        assert "set max_frames_per_traj=0, or remove its StepCounter" in message
        gather(make, max_frames_per_traj=0)
        gather(partial(Spoken, "none", "text"), max_frames_per_traj=3)

    def test_no_number_where_there_is_one_to_replace(self) -> None:
        make = partial(Odd, BOX, np.array([0, np.nan], np.float32))
        assert "replace it with a gymnasium.ObservationWrapper" in refusal(make)
        gather(lambda: wrappers.TransformObservation(make(), np.nan_to_num, BOX))
        spoken = partial(TransformedEnv, Spoken("none", "text"))
        says = Says(torch.full((2,), torch.nan), Unbounded((2,)))
        assert "replace it with a transform" in refusal(lambda: spoken(Compose(says)))
        gather(lambda: spoken(Compose(says, Says(torch.zeros(2), Unbounded((2,))))))
