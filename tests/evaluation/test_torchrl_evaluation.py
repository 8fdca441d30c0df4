"""Evaluations in TorchRL environments: single ones, batches, agents, transforms, memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from evaluating import one
from policies import categorical
from tensordict import TensorDictBase
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


class Lucky(Clocks):
    """A step pays what torch draws; with a log, each frame's row and step are written there."""

    def __init__(self, *lengths: int, log: Path | None = None) -> None:
        super().__init__(*lengths)
        self.log = log

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        told = super()._step(tensordict)
        return told.set("reward", torch.rand_like(told["reward"]))

    def render(self, mode: str, env_index: int) -> np.ndarray:
        assert mode == "rgb_array"
        assert self.log is not None
        with self.log.open("a") as log:
            log.write(f"{env_index} {int(self.steps[env_index])}\n")
        return np.zeros((16, 16, 3), np.uint8)


def test_of_batches_the_best_episode_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    film, log = tmp_path / "best.mp4", tmp_path / "log"
    with Evaluator(
        functools.partial(Lucky, 4, 5, 6),
        always(0),
        num_episodes=6,
        seed=1,
        video_path=film,
        create_render_env_fn=functools.partial(Lucky, 4, 5, 6, log=log),
    ) as evaluator:
        evaluator.submit(0)
        (evaluation,) = evaluator.wait()
    assert evaluation.video == film
    assert b"ftyp" in film.read_bytes()[:16]
    winner = evaluation.returns.index(evaluation.max)
    assert winner == 5, "of the second batch, and no first row"
    _tried, *shown = log.read_text().splitlines()
    assert shown == [f"2 {steps}" for steps in (0, 1, 2, 3, 4, 5, 0)]  # then the next begins


def test_a_film_is_of_what_is_played(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    film = {"video_path": tmp_path / "a.mp4"}
    for make, why in (
        (functools.partial(Clocks, 3, 5), "another number of them"),
        (functools.partial(gym.make, "CartPole-v1", render_mode="rgb_array"), "another kind of"),
    ):
        with pytest.raises(TypeError, match=why):
            Evaluator(functools.partial(Clocks, 3), always(0), create_render_env_fn=make, **film)
    make = functools.partial(Clocks, 3)
    with pytest.raises(WorkerError, match="the environment to film has no method render"):
        Evaluator(make, always(0), create_render_env_fn=make, **film)


def test_a_batch_of_two_dimensions_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"batch size \(2, 2\); expected a single"):
        Evaluator(Square, always(0))
