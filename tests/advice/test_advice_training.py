"""Advice of `DelayedGradient` and of `UndelayedUpdateWarning`, followed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from delayed_gradient_reference import make_batch, make_loss
from tensordict import TensorDict
from torch import nn
from torchrl.trainers import Trainer

from torchrl_hts import DelayedGradient, EpisodeReturns

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def said_by(call: Callable[[], Any]) -> str:
    """The message with which something is refused."""
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError)) as caught:
        call()
    return str(caught.value)


def batch(version: int) -> TensorDict:
    return TensorDict({"policy_version": torch.full((2, 3), version)}, [2, 3])


def train(delayed: DelayedGradient, batch: TensorDict | None = None) -> None:
    """A round that changes the parameters."""
    with delayed if batch is None else delayed(batch), torch.no_grad():
        for parameter in delayed.loss_module.parameters():
            parameter.add_(1)


def test_a_batch_without_its_version() -> None:
    delayed = DelayedGradient(nn.Linear(1, 1))
    message = said_by(lambda: delayed(batch(0).exclude("policy_version")))
    for advice in (
        "Gather it with HTSCollector, keep the key",
        'write "with delayed:" for no check',
    ):
        assert advice in message
    train(delayed, batch(0).select("policy_version"))
    train(delayed)
    assert delayed.round == 2


def test_batches_out_of_order() -> None:
    delayed = DelayedGradient(nn.Linear(1, 1))
    train(delayed, batch(0))
    for wrong in (0, 2):
        message = said_by(partial(train, delayed, batch(wrong)))
        assert "whole rounds, each exactly once and in order" in message
    assert "load the states of collector and DelayedGradient that were saved together" in message
    train(delayed, batch(1))
    resumed = DelayedGradient(nn.Linear(1, 1))
    resumed.load_state_dict(delayed.state_dict())
    train(resumed, batch(2))


def test_blocks_within_each_other() -> None:
    delayed = DelayedGradient(nn.Linear(1, 1))
    with delayed:
        assert "leave the block before entering the next" in said_by(delayed.__enter__)
        assert "call it between two batches" in said_by(delayed.state_dict)
    train(delayed)
    assert delayed.state_dict()["round"] == 2


def test_the_state_of_another() -> None:
    delayed = DelayedGradient(nn.Linear(1, 1), lag=2, gradient_at="newest")
    train(delayed)
    state = delayed.state_dict()
    message = said_by(lambda: DelayedGradient(nn.Linear(1, 1)).load_state_dict(state))
    assert "of lag 2 and gradient_at='newest'" in message
    assert "construct it as it was then" in message
    DelayedGradient(nn.Linear(1, 1), lag=2, gradient_at="newest").load_state_dict(state)


def test_parameters_that_are_not_there_yet() -> None:
    net = nn.LazyLinear(2)
    delayed = DelayedGradient(net)
    assert "Run the networks once on an example" in said_by(delayed.__enter__)
    net(torch.zeros(1, 3))
    train(DelayedGradient(net))


def test_parameters_that_are_replaced() -> None:
    net = nn.Linear(1, 1)
    delayed = DelayedGradient(net)
    train(delayed)
    net.bias.data.copy_(torch.ones(1))
    net.load_state_dict(net.state_dict())
    train(delayed)
    net.bias = nn.Parameter(torch.zeros(1))
    message = said_by(lambda: train(delayed))
    assert "Write values in place (copy_, load_state_dict), or begin again with a new" in message
    train(DelayedGradient(net))


class FakeTrainer(Trainer):
    """What `register` looks at in a trainer."""

    def __init__(self, loss_module: nn.Module, lag: int, **changes: Any) -> None:
        self.collector = type("Collector", (), {"lag": lag})()
        self.loss_module, self._modules = loss_module, dict[str, Any]()
        self.learner_backend, self.async_collection = "local", False
        self.optim_steps = lambda batch: None
        vars(self).update(changes)

    def register_module(self, name: str, module: Any) -> None:
        self._modules[name] = module


def test_trainers() -> None:
    loss, _ = make_loss("a2c")

    def register(delayed: DelayedGradient, **changes: Any) -> None:
        delayed.register(FakeTrainer(loss, 3, **changes))

    message = said_by(lambda: register(DelayedGradient(loss, lag=1)))
    assert "Leave the argument out, and register before the first round" in message
    delayed = DelayedGradient(loss)
    register(delayed)
    assert delayed.lag == 3
    message = said_by(lambda: register(DelayedGradient(loss), async_collection=True))
    settings = message.split("as it comes: ")[1].removesuffix(".").replace(" and ", ", ")
    register(DelayedGradient(loss), **eval(f"dict({settings})"))
    other = nn.Linear(1, 1)
    message = said_by(lambda: register(DelayedGradient(other)))
    assert "Construct it with trainer.loss_module, or with the policy that this trains" in message
    register(DelayedGradient(loss.actor_network))


def test_returns_of_several_collectors() -> None:
    returns = EpisodeReturns()
    few = make_batch(0)
    returns.update(few)
    message = said_by(lambda: returns.update(few[:1]))
    assert "use one EpisodeReturns for each collector" in message
    EpisodeReturns().update(few[:1])


def test_returns_with_numbers_that_batches_lack() -> None:
    returns = EpisodeReturns(info_keys=["won"])
    message = said_by(lambda: returns.update(make_batch(0)))
    assert "give the collector info_keys with what follows 'next', too" in message
    given = make_batch(0)
    given["next", "won"] = torch.zeros(*given.shape, 1)
    EpisodeReturns(info_keys=["won"]).update(given)
