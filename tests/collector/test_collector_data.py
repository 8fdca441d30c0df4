"""What goes into a batch: spaces, distributions, TorchRL environments, options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collectors import collect
from environments import DictEnv, EchoEnv, WithNothing
from policies import categorical, marked
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch import distributions as D
from torchrl.envs import (
    Compose,
    InitTracker,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    Delta,
    GRUModule,
    IndependentNormal,
    LSTMModule,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
)
from torchrl_environments import cartpole

from torchrl_hts import HTSCollector
from torchrl_hts._policy.counter_policy import CounterPolicy
from torchrl_hts._policy.draws import CounterNoise

pytestmark = pytest.mark.usefixtures("nothing_left")


def actor(net: nn.Module, keys: list[str], distribution: type, **kwargs: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=distribution is not Delta,
        **kwargs,
    )


class Head(nn.Module):
    """Linear heads over an observation of any float type, each ``[..., width]``."""

    def __init__(self, *widths: int, positive_last: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.heads = nn.ModuleList(nn.Linear(4, width) for width in widths)
        self.positive_last = positive_last

    def forward(self, observation: Tensor) -> Any:
        outputs = [head(torch.tanh(observation.float())) for head in self.heads]
        if self.positive_last:
            outputs[-1] = outputs[-1].exp()
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class IndependentCategorical(D.Independent):
    """Several indices at once."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(D.Categorical(logits=logits.unflatten(-1, (2, 3))), 1)


class IndependentBernoulli(D.Independent):
    """Several bits at once."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(D.Bernoulli(logits=logits), 1)


class Exotic(D.Independent):
    """One that nobody has heard of: sampled by the general path."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(D.Laplace(loc, scale), 1)


BOX = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
UNIT_BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


POLICIES: dict[str, tuple[Callable[[], nn.Module], gym.spaces.Space[Any]]] = {
    "categorical": (lambda: categorical(), gym.spaces.Discrete(3)),
    "categorical from 2": (lambda: categorical(), gym.spaces.Discrete(3, start=2)),
    "one-hot": (
        lambda: actor(Head(3), ["logits"], OneHotCategorical), gym.spaces.Discrete(3)
    ),
    "masked": (
        lambda: ProbabilisticActor(
            TensorDictModule(
                lambda o: (o[..., :3].float(), torch.arange(3).expand(*o.shape[:-1], 3) > 0),
                ["observation"], ["logits", "mask"],
            ),
            in_keys=["logits", "mask"], distribution_class=MaskedCategorical, return_log_prob=True,
        ),
        gym.spaces.Discrete(3),
    ),
    "multi-discrete": (
        lambda: actor(Head(6), ["logits"], IndependentCategorical),
        gym.spaces.MultiDiscrete([3, 3]),
    ),
    "binary": (
        lambda: actor(Head(4), ["logits"], IndependentBernoulli), gym.spaces.MultiBinary(4)
    ),
    "normal": (
        lambda: actor(Head(2, 2, positive_last=True), ["loc", "scale"], IndependentNormal), BOX
    ),
    "tanh-normal": (
        lambda: actor(Head(2, 2, positive_last=True), ["loc", "scale"], TanhNormal), UNIT_BOX
    ),
    "truncated-normal": (
        lambda: actor(
            Head(2, 2, positive_last=True), ["loc", "scale"], TruncatedNormal,
            distribution_kwargs={"low": -1.0, "high": 1.0},
        ),
        UNIT_BOX,
    ),
    "delta": (lambda: actor(Head(2), ["param"], Delta), BOX),
    "deterministic": (lambda: TensorDictModule(Head(2), ["observation"], ["action"]), BOX),
    "exotic": (
        lambda: actor(Head(2, 2, positive_last=True), ["loc", "scale"], Exotic), BOX
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_policy_is_sampled_deterministically(name: str) -> None:
    """The environment checks that actions are in its space; the bits don't depend on workers."""
    make_policy, space = POLICIES[name]
    envs = [partial(EchoEnv, (3,), action_space=space)] * 3
    policy = make_policy()
    state = torch.get_rng_state()
    one = collect(envs, policy, num_executors=1)
    assert torch.equal(torch.get_rng_state(), state), "the user's generator was drawn from"
    other = collect(envs, policy, num_executors=3, num_actors=2)
    assert (one == other).all()
    reference = CounterPolicy(make_policy(), ExplorationType.RANDOM)
    reference.prepare(one[:, 0].select("observation"))
    noise = CounterNoise(0, num_envs=3, sync_interval=4, width=reference.width)
    for step in range(one.shape[1]):
        rows, words = one[:, step].select("observation"), noise.round(step // 4)[:, step % 4]
        torch.testing.assert_close(reference(rows, words)["action"], one["action"][:, step])
    if name not in ("delta", "deterministic"):
        assert not torch.equal(collect(envs, policy, seed=1)["action"], one["action"])
        log_prob = one["action_log_prob"]
        assert log_prob.shape == one.shape
        with torch.no_grad():
            expected = policy.get_dist(one).log_prob(one["action"])
        torch.testing.assert_close(log_prob, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aggregate", [False, True])
def test_composite_policy_and_dict_action_space(aggregate: bool) -> None:
    """Whether log-probabilities are added up, workers are told: their servers are older."""
    space = gym.spaces.Dict({"move": BOX, "shoot": gym.spaces.Discrete(3)})

    class Env(EchoEnv):
        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action), action
            self.t += 1
            return self._observe(float(action["shoot"])), 1.0, self.t >= 3, False, {}

    with set_composite_lp_aggregate(aggregate):
        net = TensorDictModule(
            Head(2, 3, 2, positive_last=True),
            ["observation"],
            [("params", "move", "loc"), ("params", "shoot", "logits"), ("params", "move", "scale")],
        )
        policy = ProbabilisticTensorDictSequential(
            net,
            ProbabilisticTensorDictModule(
                in_keys=["params"],
                out_keys=[("action", "move"), ("action", "shoot")],
                distribution_class=CompositeDistribution,
                distribution_kwargs={
                    "distribution_map": {"move": IndependentNormal, "shoot": D.Categorical},
                    "name_map": {"move": ("action", "move"), "shoot": ("action", "shoot")},
                },
                return_log_prob=True,
            ),
        )
        makers = [partial(Env, action_space=space)] * 2
        data = collect(makers, policy)
        assert data["action", "move"].shape == (2, 12, 2)
        assert data["next", "observation"][..., 3].tolist() == data["action", "shoot"].tolist()
        assert (data == collect(makers, policy, num_executors=1)).all()
        written = policy.log_prob(data)
    if aggregate:
        torch.testing.assert_close(data["sample_log_prob"], written)
    else:
        for key in (("action", "move_log_prob"), ("action", "shoot_log_prob")):
            torch.testing.assert_close(data[key], written[key])


def test_nested_and_multiple_observations_keep_their_types() -> None:
    policy = TensorDictModule(
        lambda speed, level: level % 2, [("state", "speed"), "level"], ["action"]
    )
    data = collect([DictEnv] * 2, policy, rounds=2)
    assert data["pixels"].dtype == torch.uint8
    assert data["pixels"].shape == (2, 8, 2, 3)
    assert data["level"].dtype == torch.int64
    assert data["state", "speed"].dtype == torch.float32
    assert data["level"][0].tolist() == [0, 1, 2, 3] * 2
    assert data["next", "level"][0].tolist() == [1, 2, 3, 4] * 2
    assert (data["next", "pixels"][0, :, 0, 0] == 251 + torch.arange(8) % 4).all()
    torch.testing.assert_close(data["next", "reward"].squeeze(-1), 5.0 + data["level"] % 2)


@pytest.mark.parametrize("keys", [["observation"], ["observation", "nothing"]])
def test_observations_without_elements_are_carried_along(keys: list[str]) -> None:
    policy = TensorDictModule(lambda x, *_: x[..., 2].long() % 3, keys, ["action"])
    with HTSCollector([WithNothing] * 2, policy, frames_per_batch=8, seed=0) as collector:
        batch = next(iter(collector))
        state = collector.state_dict()
        following = next(iter(collector))
    assert batch["nothing"].shape == batch["next", "nothing"].shape == (2, 4, 3, 0)
    assert batch["next", "observation"][..., 3].equal(batch["action"].double())
    with HTSCollector([WithNothing] * 2, policy, frames_per_batch=8, seed=0) as resumed:
        resumed.load_state_dict(state)
        assert (next(iter(resumed)) == following).all()


class TestOptions:
    """Each with the stock meaning."""

    def test_max_frames_per_traj(self) -> None:
        data = collect([partial(EchoEnv, (7,))] * 2, categorical(), max_frames_per_traj=3)
        assert data["next", "truncated"][0].squeeze(-1).tolist() == [False, False, True] * 4
        assert not data["next", "terminated"].any()
        assert data["step_count"][0].squeeze(-1).tolist() == [0, 1, 2] * 4
        assert data["next", "step_count"][0].squeeze(-1).tolist() == [1, 2, 3] * 4

    def test_truncation_and_termination_are_told_apart(self) -> None:
        data = collect([partial(EchoEnv, (3,), truncates=True)], categorical())
        assert data["next", "truncated"].squeeze().tolist() == [False, False, True] * 4
        assert not data["next", "terminated"].any()
        assert (data["next", "truncated"] == data["next", "done"]).all()

    def test_set_truncated_marks_the_last_step(self) -> None:
        data = collect([partial(EchoEnv, (99,))], categorical(), set_truncated=True)
        expected = [False, False, False, True] * 3
        assert data["next", "truncated"].squeeze().tolist() == expected
        assert data["next", "done"].squeeze().tolist() == expected
        assert data["observation"][0, :, 2].tolist() == list(range(12))  # the episode goes on

    def test_split_trajs_and_postproc_and_hooks(self) -> None:
        seen: list[Any] = []

        def mark(td: TensorDict) -> TensorDict:
            return td.set("mark", torch.ones(td.shape))

        with HTSCollector(
            [partial(EchoEnv, (3,))] * 2, categorical(), frames_per_batch=8, total_frames=8,
            split_trajs=True, postproc=mark, pre_collect_hook=lambda: seen.append("pre"),
            post_collect_hook=lambda td: seen.append(td.shape),
        ) as collector:  # fmt: skip
            (batch,) = list(collector)
        assert batch.shape == (4, 3)
        assert batch["collector", "mask"].sum() == 8
        assert seen == ["pre", batch.shape]
        assert "mark" in batch.keys()

    def test_exploration_type(self) -> None:
        data = collect([EchoEnv], categorical(), exploration_type=ExplorationType.DETERMINISTIC)
        assert torch.equal(data["action"], data["logits"].argmax(-1))

    def test_policy_factory_and_plain_module(self) -> None:
        made = collect([EchoEnv], None, policy_factory=categorical)  # type: ignore[arg-type]
        assert (made == collect([EchoEnv], categorical())).all()
        plain = nn.Sequential(nn.Linear(4, 2).double())
        data = collect([partial(EchoEnv, action_space=gym.spaces.Box(-9e9, 9e9, (2,), np.float64))],
                       plain)  # fmt: skip
        assert data["action"].shape == (1, 12, 2)

    def test_create_env_kwargs(self) -> None:
        data = collect([EchoEnv] * 2, marked(), create_env_kwargs=[{"lengths": (1,)}, {}])
        assert data["next", "done"].squeeze(-1).sum(1).tolist() == [12, 2]
        data = collect([EchoEnv] * 2, marked(), create_env_kwargs={"lengths": (2,)})
        assert data["next", "done"].squeeze(-1).sum(1).tolist() == [6, 6]

    def test_single_callable_makes_one_environment(self) -> None:
        with HTSCollector(EchoEnv, marked(), frames_per_batch=4) as collector:
            assert next(iter(collector)).shape == (4,)

    def test_devices(self) -> None:
        one = collect([cartpole] * 2, categorical(num_actions=2), device="cpu")
        other = collect(
            [cartpole] * 2, categorical(num_actions=2),
            policy_device="cpu", env_device="cpu", storing_device="cpu",
        )  # fmt: skip
        assert (one == other).all()


@pytest.mark.parametrize("cell", [LSTMModule, GRUModule])
@pytest.mark.parametrize("path", ["gymnasium", "torchrl"])
def test_recurrent_state_is_carried_and_reset(cell: Any, path: str) -> None:
    """Across steps and rounds; what is stored is what a rollout by hand would give."""
    torch.manual_seed(0)
    recurrent = cell(input_size=4, hidden_size=3, in_key="observation", out_key="features")
    policy = TensorDictSequential(
        recurrent,
        TensorDictModule(nn.Linear(3, 2), ["features"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )
    states = [key[1] for key in recurrent.out_keys if key[0] == "next"]

    def with_primer() -> Any:
        return TransformedEnv(
            cartpole(), Compose(InitTracker(), recurrent.make_tensordict_primer())
        )

    env = partial(gym.make, "CartPole-v1") if path == "gymnasium" else with_primer
    data = collect([env] * 3, policy, rounds=15)
    done = data["next", "done"].squeeze(-1)
    assert done.any(1).all()
    is_init = data["is_init"].squeeze(-1)
    assert is_init[:, 0].all()
    assert torch.equal(is_init[:, 1:], done[:, :-1])
    hidden = {key: torch.zeros(3, *data[key].shape[2:]) for key in states}
    for t in range(data.shape[1]):
        for key in states:
            assert torch.equal(data[key][:, t], hidden[key]), "carried, or zero at the start"
        step = data[:, t].select("observation", "is_init", *states)
        with torch.no_grad():
            policy(step)
        for key in states:
            torch.testing.assert_close(data["next", key][:, t], step["next", key])
            keep = ~done[:, t].view(3, *[1] * (step["next", key].ndim - 1))
            hidden[key] = data["next", key][:, t] * keep


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_defaults_of_the_user_change_nothing(device: str) -> None:
    """Workers have torch's own, and write what was planned here."""
    policy = categorical()
    envs = [EchoEnv] * 2
    expected = collect(envs, policy)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(device)
    try:
        found = collect(envs, policy)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert (found == expected).all()
    assert found["next", "reward"].dtype == torch.float32


@pytest.mark.parametrize(("dtype", "signed"), [("uint16", "int32"), ("uint64", "int64")])
def test_unsigned_observations(dtype: str, signed: str) -> None:
    """Depth pictures are of 16 bits, say, of which TensorDicts can't be copied."""

    class Depth(EchoEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gym.spaces.Box(0, 9, (4,), dtype)  # type: ignore[arg-type]

        def _observe(self, action: float) -> np.ndarray:
            return np.array([9, self.episode, self.t, 1 + action]).astype(dtype)

    space = gym.spaces.Box(0, 9, (4,), signed)  # type: ignore[arg-type]
    said = f"'observation' as {dtype}, .* make it float32, or {signed}, with an ObservationWrapper"
    with pytest.raises(TypeError, match=said):
        collect([Depth] * 2, None)

    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.TransformObservation(Depth(), lambda x: x.astype(signed), space)

    assert collect([make] * 2, None)["observation"][0, :3, 2].tolist() == [0, 1, 2]
