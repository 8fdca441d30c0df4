"""A network in an environment that learns elsewhere is told of: the copy stays as it was."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from collectors import one_batch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import EnvCreator, GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import RNDTransform

from torchrl_hts import HTSCollector

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

SAID = r"^create_env_fn.* has parameters that can be trained\. .*compute what it gives in postproc"


def target() -> nn.Linear:
    return nn.Linear(3, 2).requires_grad_(False)


def curious(predictor: nn.Module) -> TransformedEnv:
    """An environment whose reward is how wrong a network is, as in TorchRL's RND."""
    transform = RNDTransform(
        target_network=target(), predictor_network=predictor, normalize_obs=False
    )
    return TransformedEnv(GymEnv("Pendulum-v1"), transform)


def entries(predictor: nn.Module) -> list[Any]:
    """Environments, and what makes them, that hold a network."""
    env = curious(predictor)

    def inner() -> TransformedEnv:
        return curious(predictor)

    def nested(*, net: nn.Module = predictor) -> Any:
        return next(curious(each) for each in [net])

    return [
        env,
        [lambda: env],
        functools.partial(curious, predictor),
        lambda: inner(),
        SerialEnv(2, inner),
        nested,
        TransformedEnv(SerialEnv(2, inner), StepCounter()),
        EnvCreator(inner),
    ]


@pytest.mark.parametrize("index", range(8))
def test_it_is_told_and_where(index: int) -> None:
    with pytest.warns(UserWarning, match=SAID) as told:
        one_batch(entries(nn.Linear(3, 2))[index])
    mine = [warning for warning in told if "can be trained" in str(warning.message)]
    assert len(mine) == 1
    assert "collectors.py" in mine[0].filename, "who makes the collector"


def test_one_among_keyword_arguments_is_told() -> None:
    with pytest.warns(UserWarning, match=r"^create_env_kwargs\['predictor'\] \(Linear\) has param"):
        one_batch(curious, create_env_kwargs={"predictor": nn.Linear(3, 2)})


policy = nn.Linear(3, 1)  # of the script, as many have one


class Holder:
    """Has an attribute of the same name."""

    policy = functools.partial(GymEnv, "Pendulum-v1")


def test_a_global_of_an_attributes_name_is_not() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*can be trained")
        one_batch(lambda: Holder().policy())


def test_a_frozen_one_is_not() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*can be trained")
        one_batch(functools.partial(curious, nn.Linear(3, 2).requires_grad_(False)))


class Script:
    """What makes environments, and holds much else."""

    def __init__(self) -> None:
        self.policy = nn.Linear(3, 1)

    def make(self) -> GymEnv:
        return GymEnv("Pendulum-v1")


def test_what_an_object_holds_beside_is_not() -> None:
    script = Script()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*can be trained")
        one_batch(script.make)
        one_batch(lambda: script.make())


def test_what_is_computed_in_postproc_is_the_newest() -> None:
    """The advice, tried."""
    predictor, fixed = nn.Linear(3, 2), target()

    def intrinsic(batch: TensorDictBase) -> TensorDictBase:
        seen = batch["next", "observation"]
        with torch.no_grad():
            wrong = (predictor(seen) - fixed(seen)).pow(2).mean(-1, keepdim=True)
        return batch.set(("next", "intrinsic_reward"), wrong)

    make = functools.partial(GymEnv, "Pendulum-v1")
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 16, "seed": 0}
    with HTSCollector(make, None, postproc=intrinsic, **options) as collector:
        for round_, batch in enumerate(collector):
            assert bool(batch["next", "intrinsic_reward"].any()) == (round_ == 0)
            predictor.load_state_dict(fixed.state_dict())
