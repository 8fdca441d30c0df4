"""What DelayedGradient saves: a run goes on bit for bit, and the state of another is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from delayed_gradient_reference import snapshot
from delayed_learner import Learner, distance, same_bits

from torchrl_hts.delayed_gradient import DelayedGradient

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


@pytest.mark.parametrize("gradient_at", ["behaviour", "newest"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_state_continues_bit_for_bit(lag, gradient_at):
    options = {"lag": lag, "gradient_at": gradient_at, "dtype": torch.float32, "shared": True}
    whole = Learner("a2c", **options).run(0, 6)
    for saved_at in range(5):
        file = io.BytesIO()
        first = Learner("a2c", **options)
        first.run(0, saved_at)
        torch.save(first.state(), file)
        file.seek(0)
        second = Learner("a2c", **options)
        second.load(torch.load(file, weights_only=True))
        assert second.delayed.round == saved_at
        assert same_bits(second.run(saved_at, 6), whole[saved_at:])


def test_state_is_a_copy_and_loads_in_any_order():
    learner = Learner("a2c", lag=2)
    learner.run(0, 3)
    state = learner.delayed.state_dict()
    held = copy.deepcopy(state)
    weights = copy.deepcopy(learner.loss_module.state_dict())
    learner.run(3, 6)
    ring = [key for key in state if key.startswith("ring.")]
    assert len(ring) == 2 * len(list(learner.loss_module.parameters()))
    assert all(torch.equal(state[key], held[key]) for key in ring)
    other = Learner("a2c", "sgd", lag=2)
    other.delayed.load_state_dict(state)
    other.loss_module.load_state_dict(weights)
    with other.delayed:
        behaviour = [held[f"ring.0.{name}"] for name, _ in other.loss_module.named_parameters()]
        assert same_bits([snapshot(other.loss_module)], [behaviour])


@pytest.mark.parametrize(
    "change",
    [
        {"lag": 2},
        {"gradient_at": "newest"},
        {"ring.0.unknown": torch.zeros(1)},
        {"ring.0.actor_network_params.module.0.module.0.bias": torch.zeros(7)},
        {"ring.0.actor_network_params.module.0.module.0.bias": None},
    ],
)
def test_state_of_something_else_is_refused(change):
    learner = Learner("a2c", lag=1)
    learner.run(0, 2)
    state = {**learner.delayed.state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    fresh = Learner("a2c", lag=1)
    with pytest.raises(ValueError, match=r"lag 2|'newest'|ring\.0"):
        fresh.delayed.load_state_dict(state)
    assert fresh.delayed.round == 0  # nothing was half loaded
    fresh.run(0, 1)


def test_weights_loaded_before_the_first_block_count():
    learner, other, untouched = (Learner("a2c", lag=2) for _ in range(3))
    for module in (learner.loss_module, other.loss_module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
    other.delayed = DelayedGradient(other.loss_module, lag=2)
    after = learner.run(0, 4)
    assert same_bits(after, other.run(0, 4))
    assert distance(after, untouched.run(0, 4)) > 0.1
