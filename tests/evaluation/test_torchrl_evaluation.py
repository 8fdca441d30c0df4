"""Evaluations in TorchRL environments: single ones, batches, agents, transforms, memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from evaluating import one
from policies import categorical
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv, VecNormV2
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import GRUModule
from torchrl_environments import Clocks, Square, cartpole

from torchrl_hts import Evaluator, WorkerError
from torchrl_hts._evaluation.player import env_seed

pytestmark = pytest.mark.usefixtures("nothing_left")


class Always(nn.Module):
    """Acts with the value of its buffer, whatever it sees."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.register_buffer("action", torch.tensor(action))

    def forward(self, observation: Tensor) -> Tensor:
        return self.action.expand(observation.shape[:-1]).clone()


def always(action: int, *group: str) -> TensorDictModule:
    """A policy for `Clocks`."""
    return TensorDictModule(Always(action), [(*group, "observation")], [(*group, "action")])


def plain_return(env: EnvBase, policy: nn.Module, episode: int) -> float:
    """An episode as TorchRL's own loop plays it, greedily."""
    env.set_seed(env_seed(0, episode))
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        played = env.rollout(10_000, policy)
    return played["next", "reward"].double().sum().item()


def test_the_returns_are_those_of_a_plain_loop() -> None:
    policy = categorical(num_actions=2)
    expected = [plain_return(cartpole(), policy, episode) for episode in range(4)]
    assert one(cartpole, policy, num_episodes=4).returns == tuple(expected)


def remembering() -> tuple[Any, nn.Module]:
    """CartPole with what a recurrent policy needs, and one."""
    gru = GRUModule(4, 8, in_keys=["observation", "hidden", "is_init"],
                    out_keys=["features", ("next", "hidden")])  # fmt: skip
    transforms = functools.partial(_with_memory, gru.make_tensordict_primer())
    head = TensorDictModule(nn.Linear(8, 2), ["features"], ["logits"])
    greedy = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return transforms, TensorDictSequential(gru, head, greedy)


def _with_memory(primer: Any) -> EnvBase:
    return TransformedEnv(cartpole(), Compose(InitTracker(), primer.clone()))


def test_a_recurrent_policy_carries_its_state() -> None:
    torch.manual_seed(1)
    make_env, policy = remembering()
    expected = [plain_return(make_env(), policy, episode) for episode in range(3)]
    assert one(make_env, policy, num_episodes=3).returns == tuple(expected)


@pytest.mark.parametrize("agents", [0, 2])
def test_of_a_batch_the_first_episode_of_each_counts(agents: int) -> None:
    """Three clocks end after 3, 5 and, at a sum of 7, 7 steps; a step pays its number."""
    make_env = functools.partial(Clocks, 3, 5, 9, num_agents=agents)
    policy = always(1, *["agents"] * bool(agents))
    result = one(make_env, policy, num_episodes=4)
    assert result.lengths == (3, 5, 7, 3)
    assert result.returns == (6.0, 15.0, 28.0, 6.0)


def test_what_was_evaluated_before_does_not_matter() -> None:
    make_env = functools.partial(Clocks, 3, 5)
    with Evaluator(make_env, always(1), num_episodes=2) as evaluator:
        for step in range(3):
            evaluator.submit(step)
        assert [each.returns for each in evaluator.wait()] == [(6.0, 15.0)] * 3


def test_episodes_can_be_cut_off() -> None:
    make_env = functools.partial(Clocks, 10**6, alone=True)
    result = one(make_env, always(0), num_episodes=2, max_frames_per_episode=4)
    assert result.lengths == (4, 4)


def _normalising() -> EnvBase:
    return TransformedEnv(cartpole(), VecNormV2(in_keys=["observation"]))


def test_statistics_of_a_transforms_own_are_warned_of() -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"running statistics of their own \(VecNormV2\)"),
        Evaluator(_normalising, categorical(num_actions=2), num_episodes=1),
    ):
        pass


def test_films_are_of_gymnasium_environments() -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(TypeError, match="films gymnasium environments"):
        Evaluator(
            cartpole, categorical(num_actions=2), video_path="a.mp4", create_render_env_fn=cartpole
        )


def test_a_batch_of_two_dimensions_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"batch size \(2, 2\); expected a single"):
        Evaluator(Square, always(0))
