"""No name in a batch is written by two; what only looks alike is kept as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from environments import Named, Renamed
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Bounded
from torchrl.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    RenameTransform,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import LSTMModule, OrnsteinUhlenbeckProcessModule, ProbabilisticActor

from torchrl_hts import Evaluator, HTSCollector

pytestmark = pytest.mark.usefixtures("nothing_left")


def torchrl_named(*path: str) -> Any:
    return GymWrapper(Named(*path), categorical_action_encoding=True)


def plain(reads: list[Any] | None = None, writes: list[Any] | None = None) -> nn.Module:
    """A policy that writes, beside an action, as many zeros as it is asked for."""
    writes = writes or []

    def act(observation: Any, *_: Any) -> Any:
        zeros = observation[..., :1] * 0
        return (zeros[..., 0].long(), *[zeros] * len(writes)) if writes else zeros[..., 0].long()

    return TensorDictModule(act, ["observation", *(reads or [])], ["action", *writes])


def categorical() -> nn.Module:
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(2, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def recurrent() -> nn.Module:
    return TensorDictSequential(
        LSTMModule(input_size=2, hidden_size=2, in_key="observation", out_key="features"),
        TensorDictModule(lambda f: (f[..., 0] > 0).long(), ["features"], ["action"]),
    )


def gather(env: Any, policy: nn.Module, **kwargs: Any) -> Any:
    with HTSCollector([env], policy, frames_per_batch=8, total_frames=8, seed=0, **kwargs) as c:
        return next(iter(c)).clone()


TWICE: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
    "counted steps": (("step_count",), plain, {"max_frames_per_traj": 3}),
    "start flags": (("is_init",), recurrent, {}),
    "start flags that are asked for": (("is_init",), partial(plain, ["is_init"]), {}),
    "the action": (("action",), plain, {}),
    "a part of the action": (("action", "move"), plain, {}),
    "the reward": (("reward",), plain, {}),
    "a done flag": (("truncated",), plain, {}),
    "a done flag, without next": (("done",), plain, {"compact_obs": True}),
    "the version": (("policy_version",), plain, {}),
    "the numbers of episodes": (("collector", "mine"), plain, {}),
    "what comes next": (("next", "mine"), plain, {}),
    "logits": (("logits",), categorical, {}),
    "a log-probability": (("action_log_prob",), categorical, {}),
    "a nested output": (("a", "b"), partial(plain, None, [("a", "b")]), {}),
    "what lies within an output": (("a", "b"), partial(plain, None, ["a"]), {}),
    "what an output lies within": (("a",), partial(plain, None, [("a", "b")]), {}),
    "a prediction of it": (("mine",), partial(plain, None, [("next", "mine")]), {}),
}


@pytest.mark.parametrize("name", TWICE)
def test_an_observation_that_another_writes_too_is_refused_and_the_advice_works(name: str) -> None:
    path, make_policy, kwargs = TWICE[name]
    said = rf"gives .*{path[0]}.* (collector|policy) writes .*Rename the environment's"
    with pytest.raises(ValueError, match=rf"{said} with a gymnasium\.ObservationWrapper"):
        gather(partial(Named, *path), make_policy(), **kwargs)
    if name != "what comes next" and path != ("mine",):
        renamed = partial(lambda p: Renamed(Named(*p), p[0]), path)
        found = gather(renamed, make_policy(), **kwargs)
        assert found.get(("mine", *path[1:])).flatten().tolist()[:3] == [500, 501, 502]


@pytest.mark.parametrize(
    ("outputs", "kwargs"),
    [
        ([("next", "reward")], {}),
        (["done"], {}),
        (["step_count"], {"max_frames_per_traj": 3}),
        (["policy_version"], {}),
        ([("collector", "traj_ids")], {}),
        (["observation"], {}),
    ],
)
def test_an_output_that_another_writes_too_is_refused(
    outputs: list[Any], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"policy writes .*\(out_keys\)"):
        gather(Named, plain(None, outputs), **kwargs)


def test_a_private_observation_is_left_out_of_batches_whether_it_is_read_or_not() -> None:
    for policy in (plain(), plain(["_mine"])):
        found = gather(partial(Named, "_mine"), policy)
        assert "_mine" not in found.keys()
        assert "_mine" not in found["next"].keys()
    assert found["next", "done"].flatten().tolist()[:3] == [False, False, True]


class Shifts(TensorDictModuleBase):
    """Writes another observation over the one that it reads, or a copy, and doesn't say so."""

    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = tensordict["observation"].clone()
        tensordict["observation"] = seen + self.shift if self.shift else seen
        tensordict["action"] = torch.zeros(tensordict.shape, dtype=torch.int64)
        return tensordict


@pytest.mark.parametrize("make", [Named, torchrl_named])
def test_an_observation_that_a_policy_replaces_without_declaring_it_is_refused(make: Any) -> None:
    said = "gives 'observation', and the policy writes 'observation'"
    with pytest.raises(ValueError, match=said):
        gather(make, Shifts(1.0))
    assert not gather(make, Shifts(0.0))["observation"].any()


class Scales(nn.Module):
    """Divides what it is given by two, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, more: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            more /= 2
        else:
            more = more / 2
        return (more[..., 0] > 250).long()


@pytest.mark.parametrize("make", [Named, torchrl_named])
def test_an_observation_that_a_policy_changes_in_place_is_refused_and_the_advice_works(
    make: Any,
) -> None:
    """A loss would change it again each time that it goes over a batch."""

    def policy(in_place: bool) -> nn.Module:
        return TensorDictModule(Scales(in_place), ["more"], ["action"])

    with pytest.raises(ValueError, match=r"changes 'more' in place, .*x = x / 255, not x /= 255"):
        gather(make, policy(in_place=True))
    found = gather(make, policy(in_place=False))
    assert found["more"].flatten().tolist() == [500, 501, 502] * 2 + [500, 501]
    assert found["action"].tolist() == [[0, 1, 1] * 2 + [0, 1]]


@pytest.mark.parametrize("path", [("step_count",), ("is_init",), ("a", "is_init"), ("loc",)])
def test_what_nobody_else_writes_is_kept(path: tuple[str, ...]) -> None:
    for make in (Named, torchrl_named):
        found = gather(partial(make, *path), plain())
        values = [500, 501, 502] * 2 + [500, 501]
        assert found.get(path).flatten().tolist() == values
        assert found.get(("next", *path)).flatten().tolist() == [501, 502, 503] * 2 + [501, 502]


def test_a_policy_that_fails_on_what_it_does_not_declare_to_read_is_refused_by_name() -> None:
    noise = OrnsteinUhlenbeckProcessModule(spec=Bounded(-1.0, 1.0, (1,)))
    act = TensorDictModule(lambda x: x[..., :1] * 0, ["observation"], ["action"])
    with pytest.raises(ValueError, match="reads 'is_init', though its in_keys don't say so"):
        gather(partial(Named, "is_init"), TensorDictSequential(act, noise))
    with pytest.raises(ValueError, match="Rename it in the environment, or give it what it expe"):
        gather(partial(Named, "is_init"), TensorDictSequential(act, noise))
    drawn = TensorDictModule(lambda x: (x[..., 0] > 0).long(), ["action"], ["action"])
    policy = TensorDictSequential(act, noise, drawn)
    gather(lambda: Renamed(Named("is_init"), "is_init"), policy)


def test_torchrl_environments_may_write_what_the_collector_doesnt() -> None:
    def make() -> Any:
        return TransformedEnv(torchrl_named(), Compose(StepCounter(), InitTracker()))

    policy = plain(["is_init", "step_count"])
    found = gather(make, policy)
    assert found["step_count"].flatten().tolist() == [0, 1, 2] * 2 + [0, 1]
    assert found["is_init"].flatten().tolist() == [True, False, False] * 2 + [True, False]


def test_torchrl_environments_and_policies_that_write_the_same_are_refused() -> None:
    policy = partial(plain, None, ["mine"])
    said = r"gives 'mine', and the policy writes 'mine'.*RenameTransform"
    with pytest.raises(ValueError, match=said):
        gather(partial(torchrl_named, "mine"), policy())

    def renamed() -> Any:
        return TransformedEnv(torchrl_named("mine"), RenameTransform(["mine"], ["yours"]))

    found = gather(renamed, policy())
    assert not found["mine"].any()
    assert found["yours"].flatten().tolist()[:3] == [500, 501, 502]


def test_the_evaluator_refuses_them_too() -> None:
    with pytest.raises(ValueError, match="gives 'step_count'"):
        Evaluator(partial(Named, "step_count"), plain(), max_frames_per_episode=3)
    with Evaluator(partial(Named, "step_count"), plain(), num_episodes=2) as evaluator:
        evaluator.submit(0)
        assert evaluator.wait()[0].returns == (3.0, 3.0)
