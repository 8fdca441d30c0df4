"""No policy, random ones, and plain callables: as TorchRL's collectors take them."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import DictEnv, EchoEnv
from gymnasium import spaces
from policies import categorical
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Categorical
from torchrl.envs import ActionMask, GymEnv, GymWrapper, TransformedEnv
from torchrl.envs.custom.tictactoeenv import TicTacToeEnv
from torchrl.modules import RandomPolicy

from torchrl_hts import Evaluator, HTSCollector, PolicyError
from torchrl_hts._planning.policy_forms import as_module
from torchrl_hts._planning.random_actions import RandomActions

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

CARTPOLE = functools.partial(gym.make, "CartPole-v1")
PENDULUM = lambda: GymEnv("Pendulum-v1")  # noqa: E731


def gather(env: Any, policy: Any = None, num_envs: int = 3, **kwargs: Any) -> TensorDictBase:
    """Two rounds of 8 steps, one after the other."""
    kwargs = {"frames_per_batch": 8 * num_envs, "total_frames": 16 * num_envs, "seed": 0} | kwargs
    with HTSCollector([env] * num_envs, policy, **kwargs) as collector:
        return torch.cat([batch.clone() for batch in collector], 1)


class AnyAction(gym.Env[Any, Any]):
    """Ends with an error if an action isn't in its space."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if isinstance(self.action_space, spaces.Discrete):
            action = np.int64(action)
        assert self.action_space.contains(action), action
        return np.zeros(2, np.float32), 0.0, False, False, {}


def assert_all_occurs(space: Any, drawn: torch.Tensor) -> None:
    """Rows of drawn actions: every number, or all of a range, up to its bounds."""
    columns = drawn.reshape(len(drawn), -1).T
    if isinstance(space, spaces.Box):
        bounds = zip(space.low.flatten().tolist(), space.high.flatten().tolist(), strict=True)
        for column, (low, high) in zip(columns, bounds, strict=True):
            assert_fills(column, low, high)
        return
    counts = [2] * len(columns)
    if isinstance(space, spaces.Discrete):
        counts = [int(space.n)]
    elif isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.tolist()
    for column, count in zip(columns, counts, strict=True):
        assert column.unique().tolist() == [*range(count)]


def assert_fills(column: torch.Tensor, low: float, high: float) -> None:
    """As uniform numbers fill a range, exponential ones a half of the line, normal ones all."""
    least, mean, most = column.min(), column.mean(), column.max()
    if np.isfinite(low) and np.isfinite(high):
        margin = (high - low) / 20
        assert least < low + margin
        assert abs(mean - (low + high) / 2) < margin
        assert most > high - margin
        return
    assert abs(column.std() - 1) < 0.2
    bound = low if np.isfinite(low) else high if np.isfinite(high) else None
    away = 0.0 if bound is None else 1.0 if bound == low else -1.0
    assert abs(mean - (bound or 0.0) - away) < 0.2


class MaskingEnv(GymWrapper):
    """Puts a mask into its spec with each reset, as PettingZoo's wrapper does."""

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        found = super()._reset(tensordict, **options)
        self.full_action_spec["action"].update_mask(torch.tensor([True, False, True]))
        return found


def masking() -> MaskingEnv:
    return MaskingEnv(EchoEnv(), categorical_action_encoding=True)


class TestRandom:
    @pytest.mark.parametrize("env", [CARTPOLE, PENDULUM], ids=["gymnasium", "torchrl"])
    def test_without_a_policy_actions_are_random_and_repeat_for_any_number_of_workers(
        self, env: Any
    ) -> None:
        one = gather(env, num_executors=1, num_actors=1)
        assert (one == gather(env, num_executors=3, num_actors=2)).all()
        assert (one["action"] != gather(env, seed=1)["action"]).any()
        assert len({row.numpy().tobytes() for row in one["action"]}) == 3
        assert len(one["action"].unique()) > 1
        assert "action_log_prob" not in one.keys()

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(3, start=5),
            spaces.MultiDiscrete([2, 3, 4]),
            spaces.MultiBinary(3),
            spaces.Box(-2, 3, (2,), np.float32),
            spaces.Box(0, 255, (2,), np.uint8),
            spaces.Box(np.array([0, -np.inf, -np.inf]), np.array([np.inf, np.inf, 0.5])),
            spaces.Dict(one=spaces.Discrete(2), two=spaces.Box(-1, 1, (2,), np.float32)),
        ],
        ids=str,
    )
    def test_every_space_is_drawn_from(self, space: spaces.Space[Any]) -> None:
        """All of it: 1024 actions, each of which its environment has found in the space."""
        make_env = functools.partial(AnyAction, space)
        options = {"frames_per_batch": 4 * 128, "total_frames": 4 * 256}
        drawn = gather(make_env, num_envs=4, num_executors=1, **options)
        leaves = space.spaces if isinstance(space, spaces.Dict) else {None: space}
        for name, leaf in leaves.items():
            actions = drawn["action" if name is None else ("action", name)]
            assert_all_occurs(leaf, actions.flatten(0, 1).double())

    def test_draws_are_spread_over_the_whole_space(self) -> None:
        policy = RandomActions(Categorical(4))
        counts = policy(TensorDict({}, [4000]))["action"].bincount()
        assert counts.min() > 850
        assert len(counts) == 4

    @pytest.mark.parametrize("with_spec", [True, False])
    def test_torchrls_random_policy(self, with_spec: bool) -> None:
        policy = RandomPolicy(PENDULUM().full_action_spec if with_spec else None)
        assert (gather(PENDULUM, policy) == gather(PENDULUM)).all()

    def test_an_environments_own_method(self) -> None:
        """As TorchRL's examples pass it."""
        env = PENDULUM()
        for method in (env.rand_step, env.rand_action):
            assert (gather(PENDULUM, method) == gather(PENDULUM)).all()

    def test_a_random_policy_from_a_factory(self) -> None:
        factories = [RandomPolicy] * 2
        assert (gather(PENDULUM, policy_factory=factories) == gather(PENDULUM)).all()

    def test_a_mask_that_would_be_ignored(self) -> None:
        spec = Categorical(3, mask=torch.tensor([True, False, True]))
        with pytest.raises(TypeError, match="random actions would ignore the mask of 'action'"):
            HTSCollector([CARTPOLE], RandomPolicy(spec), frames_per_batch=8)

    @pytest.mark.parametrize("policy", [None, RandomPolicy, "with its spec"])
    def test_a_transform_that_masks_actions(self, policy: Any) -> None:
        """Its mask comes into the spec with the first reset, after the policy has been made."""

        def make() -> Any:
            env = GymWrapper(Masked(), categorical_action_encoding=True)
            return TransformedEnv(env, ActionMask(mask_key="mask"))

        if policy is not None:
            policy = RandomPolicy(make().full_action_spec if isinstance(policy, str) else None)
        with pytest.raises(TypeError, match="random actions would ignore the mask of the action"):
            gather(make, policy)

    @pytest.mark.parametrize("kwargs", [{}, {"num_executors": 1, "num_actors": 1}])
    @pytest.mark.parametrize("kind", ["a spec", "a way to draw"])
    def test_an_environment_that_masks_actions_itself(self, kind: str, kwargs: Any) -> None:
        """Its mask comes into the spec with the first reset, or it draws actions in its own way."""
        make = masking if kind == "a spec" else TicTacToeEnv
        for policy in (None, RandomPolicy()):
            with pytest.raises(TypeError, match="random actions would ignore the mask of the acti"):
                gather(make, policy, **kwargs)
        with pytest.raises(TypeError, match="random actions would ignore the mask of the action"):
            Evaluator(make, RandomPolicy())

    def test_an_evaluator(self) -> None:
        with Evaluator(CARTPOLE, RandomPolicy(), num_episodes=3) as evaluator:
            evaluator.submit(0)
            (evaluation,) = evaluator.wait()
        assert len(evaluation.returns) == 3


def on_tensordicts(tensordict: TensorDictBase) -> TensorDictBase:
    lean = tensordict["observation"][..., 2]
    tensordict["action"] = (lean > 0).long()
    return tensordict.set("lean", lean)


def on_tensors(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 2] > 0).long()


def annotated(state: TensorDictBase):  # type: ignore[no-untyped-def]  # as users write them
    return TensorDict({"action": on_tensors(state["observation"])}, state.batch_size)


def by_default(td: TensorDictBase | None = None) -> TensorDictBase:
    assert td is not None
    return on_tensordicts(td)


class Masked(gym.Env[Any, Any]):
    """One action of many is legal."""

    observation_space = spaces.Dict(mask=spaces.Box(0, 0, (9,), bool))  # samples nothing legal
    action_space = spaces.Discrete(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.step(None)[0], {}

    def step(self, action: Any) -> Any:
        mask = np.zeros(9, bool)
        mask[self.np_random.integers(9)] = True
        return {"mask": mask}, 0.0, False, False, {}


class WithKeys:
    in_keys = ("observation",)
    out_keys = ("action",)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return on_tensordicts(tensordict)


class TestCallables:
    @pytest.mark.parametrize(
        ("policy", "kwargs"),
        [
            (on_tensors, {}),
            (on_tensordicts, {}),
            (annotated, {}),
            (by_default, {}),
            (WithKeys(), {}),
            (functools.partial(on_tensordicts), {}),
            (lambda x: on_tensordicts(x), {"trust_policy": True}),
            (lambda observation: on_tensors(observation), {}),
            (lambda observation: on_tensors(observation).tolist(), {}),
            (lambda observation: on_tensors(observation).numpy(), {}),
            (torch.compile(on_tensors, backend="eager"), {}),
            (
                TensorDictModule(
                    torch.compile(lambda x: on_tensors(x), backend="eager"),
                    in_keys=["observation"],
                    out_keys=["action"],
                ),
                {},
            ),
        ],
    )
    def test_they_act(self, policy: Any, kwargs: Any) -> None:
        batch = gather(CARTPOLE, policy, **kwargs)
        assert torch.equal(batch["action"], on_tensors(batch["observation"]))

    def test_all_that_they_write_is_in_the_batch(self) -> None:
        batch = gather(CARTPOLE, on_tensordicts)
        assert torch.equal(batch["lean"], batch["observation"][..., 2])

    def test_with_several_observations(self) -> None:
        def act(td: TensorDictBase) -> TensorDictBase:
            assert len(list(td.keys(True, True))) > 1
            return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

        assert not gather(DictEnv, act)["action"].any()

    def test_a_mask_that_is_read(self) -> None:
        """The trial is on real observations, where made-up ones won't do."""

        def act(td: TensorDictBase) -> TensorDictBase:
            if not td["mask"].any(-1).all():
                raise ValueError("no legal action")
            return td.set("action", td["mask"].long().argmax(-1))

        for options in ({}, {"num_executors": 1}):
            batch = gather(Masked, act, **options)
            assert batch["mask"].gather(-1, batch["action"][..., None]).all()

    def test_a_module_on_tensordicts_is_followed(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mark = nn.Parameter(torch.zeros(()))

            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                tensordict["mark"] = self.mark.expand(tensordict.batch_size).clone()
                return on_tensordicts(tensordict)

        net, marks = Net(), []
        with HTSCollector(
            [CARTPOLE], net, frames_per_batch=4, total_frames=16, lag=0, seed=0
        ) as collector:
            for batch in collector:
                marks.append(batch["mark"].unique().item())
                with torch.no_grad():
                    net.mark += 1
                collector.update_policy_weights_(TensorDict.from_module(net).data)
        assert marks == [0, 1, 2, 3]

    def test_weights_of_a_plain_module_go_by_its_own_names(self) -> None:
        net = nn.Linear(3, 1)
        with HTSCollector(
            [functools.partial(gym.make, "Pendulum-v1")], net, frames_per_batch=4, lag=0
        ) as collector:
            next(iter(collector))
            collector.update_policy_weights_(
                {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
            )
            assert not next(iter(collector))["action"].any()

    def test_a_module_inside_of_a_function_is_refused_and_the_advice_works(self) -> None:
        net = nn.Linear(3, 1)

        class Holder:
            def __init__(self) -> None:
                self.net = net

            def __call__(self, observation: torch.Tensor) -> torch.Tensor:
                return self.net(observation)

        for policy in (lambda observation: net(observation), net.forward, Holder()):
            with pytest.raises(TypeError, match="whose parameters the collector can't follow"):
                as_module(policy)
        advised = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
        gather(functools.partial(gym.make, "Pendulum-v1"), advised)

    @pytest.mark.parametrize("action", [1, torch.tensor(1), [0]])
    def test_what_returns_no_action_for_each_row(self, action: Any) -> None:
        with pytest.raises(PolicyError, match="observations; return one action for each"):
            gather(CARTPOLE, lambda observation: action)

    def test_what_returns_no_tensordict(self) -> None:
        with pytest.raises(PolicyError, match="given a TensorDict and returned a Tensor"):
            gather(CARTPOLE, lambda td: td["observation"])

    def test_what_fails_in_the_trial(self) -> None:
        with pytest.raises(PolicyError, match=r"KeyError.*TensorDictModule"):
            gather(CARTPOLE, lambda td: td["nothing"])

    def test_what_cannot_be_called(self) -> None:
        with pytest.raises(TypeError, match="another callable, got a str"):
            as_module("policy")

    def test_factories_that_differ(self) -> None:
        with pytest.raises(TypeError, match="one policy acts in all environments"):
            gather(EchoEnv, policy_factory=[categorical, lambda: categorical(seed=1)])


class Deterministic(nn.Module):
    """As baselines write their policies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, obs: Any, deterministic: bool = True) -> Any:
        return self.layer(obs).argmax(-1)


def test_parameters_that_need_not_be_given_are_left_alone() -> None:
    assert gather(CARTPOLE, Deterministic())["action"].shape == (3, 16)


def test_beside_a_lone_bound_draws_are_exponential() -> None:
    """As gymnasium's own samples: mean 1 away from the bound."""
    low, high = np.array([10, -np.inf, -np.inf]), np.array([np.inf, -5, np.inf])
    env = functools.partial(AnyAction, spaces.Box(low, high, dtype=np.float64))
    drawn = gather(env, num_envs=64)["action"].flatten(0, 1)
    assert drawn.mean(0) == pytest.approx([11, -6, 0], abs=0.15)
    assert (drawn[:, 0] >= 10).all()
    assert (drawn[:, 1] <= -5).all()
