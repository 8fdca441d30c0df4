"""Evaluation: the right numbers, the same again for the same seed, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from cached import CACHED, cached
from environments import DictEnv, EchoEnv
from evaluating import GREEDY, RANDOM, PayingEnv, cart_pole, one, pays, remembers
from policies import categorical
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import set_exploration_type

from torchrl_hts._evaluation.evaluator import Evaluator
from torchrl_hts._evaluation.player import env_seed
from torchrl_hts._learner.learner import environment_seed
from torchrl_hts.errors import PolicyError, WorkerError

pytestmark = pytest.mark.usefixtures("nothing_left")


@torch.no_grad()
def slow_episode(
    env: gym.Env[Any, Any], policy: TensorDictModuleBase, seed: int, states: dict[str, int]
) -> tuple[float, int]:
    """An episode as one would write it down; ``states``: recurrent keys and their widths."""
    observation, _ = env.reset(seed=seed)
    total, length, over = 0.0, 0, False
    carried = {key: torch.zeros(1, 1, width) for key, width in states.items()}
    while not over:
        td = TensorDict({"observation": torch.as_tensor(observation)[None]}, [1])
        if states:
            td["is_init"] = torch.tensor([[length == 0]])
            td.update(carried)
        policy(td)
        carried = {key: td["next", key] for key in states}
        observation, reward, terminated, truncated, _ = env.step(td["action"][0].numpy())
        total, length, over = total + float(reward), length + 1, terminated or truncated
    return total, length


# What comes out.


def test_greedy_play_is_that_of_a_plain_loop() -> None:
    policy = categorical(num_actions=2)
    with set_exploration_type(GREEDY):
        expected = [slow_episode(cart_pole(), policy, env_seed(3, k), {}) for k in range(6)]
    result = one(cart_pole, policy, step=12, num_episodes=6, seed=3)
    assert result.step == 12
    assert list(zip(result.returns, result.lengths, strict=True)) == expected
    assert len(set(result.lengths)) > 1
    assert result.mean == pytest.approx(sum(result.returns) / 6)
    assert (result.min, result.max) == (min(result.returns), max(result.returns))
    assert result.video is None


def test_sampled_play_depends_on_seed_and_step_alone() -> None:
    policy = categorical(num_actions=2)
    play = functools.partial(one, cart_pole, policy, num_episodes=5)
    sampled = play(7, exploration_type=RANDOM)
    torch.manual_seed(99)  # the main process's generator has no part in it
    state = torch.get_rng_state()
    assert play(7, exploration_type=RANDOM) == sampled
    assert torch.equal(torch.get_rng_state(), state)
    assert play(8, exploration_type=RANDOM).lengths != sampled.lengths
    assert play(7, exploration_type=RANDOM, seed=1).lengths != sampled.lengths
    assert play(7, exploration_type=GREEDY).lengths != sampled.lengths


def test_what_was_evaluated_before_does_not_matter() -> None:
    policy = categorical(num_actions=2)
    with Evaluator(cart_pole, policy, num_episodes=4, exploration_type=RANDOM) as evaluator:
        for step in (1, 2, 1):
            evaluator.submit(step)
        first, other, again = evaluator.wait()
    assert first == again
    assert first.lengths != other.lengths


def test_seeds_are_not_those_of_training() -> None:
    evaluation = {env_seed(seed, k) for seed in range(20) for k in range(50)}
    training = {environment_seed(s, env, r) for s in range(20) for env in range(50) for r in (0, 1)}
    assert len(evaluation) == 1000
    assert not evaluation & training


def test_the_policy_is_run_in_evaluation_mode_and_its_buffers_start_anew() -> None:
    policy = pays(2.0)
    with Evaluator(PayingEnv, policy, num_episodes=3) as evaluator:
        evaluator.submit(0)
        evaluator.submit(1)
        results = evaluator.wait()
    for result in results:
        assert result.returns == tuple(2.0 * length for length in result.lengths)
    assert policy.training
    assert policy.module.calls == 0


def test_recurrent_policies_carry_their_state() -> None:
    torch.manual_seed(0)
    policy = remembers()
    expected = [slow_episode(PayingEnv(), policy, env_seed(0, k), {"hidden": 8}) for k in range(5)]
    result = one(PayingEnv, policy, num_episodes=5)
    assert result.lengths == tuple(length for _, length in expected)
    assert result.returns == pytest.approx([total for total, _ in expected], rel=1e-5)


def test_nested_observations_and_action_formats_are_those_of_training() -> None:
    def act(pixels: Tensor, speed: Tensor) -> Tensor:
        step = (pixels[:, 0, 0].long() - 250 + (speed[:, 0] * 10).round().long()) // 2
        return nn.functional.one_hot(step % 2, 2)  # of Discrete(2, start=5)

    keys = ["pixels", ("state", "speed")]
    policy = TensorDictModule(act, keys, ["action"])
    assert one(DictEnv, policy, num_episodes=2).returns == (5 + 6 + 5 + 6,) * 2


def test_episodes_can_be_cut_off() -> None:
    env = functools.partial(EchoEnv, lengths=(10**9,))
    result = one(env, categorical(), num_episodes=2, max_frames_per_episode=4)
    assert result.lengths == (4, 4)
    assert result.returns == (1 + 2 + 3 + 4,) * 2


# What is refused.


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(TypeError, match=r"made a builtins.dict; expected a gymnasium.Env, a "):
        Evaluator(dict, categorical())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a callable"):
        Evaluator(EchoEnv(), categorical())  # type: ignore[arg-type]


@pytest.mark.parametrize("factory", CACHED)
def test_an_environment_that_was_made_before_is_refused(factory: Any) -> None:
    with pytest.raises(WorkerError, match="create_env_fn made the environment that it has made"):
        Evaluator(factory, categorical(), num_episodes=3)


def test_the_environment_that_is_played_is_not_the_one_that_is_filmed(tmp_path: Path) -> None:
    said = "create_render_env_fn made the environment that create_env_fn has made before"
    with pytest.raises(WorkerError, match=said):
        Evaluator(
            cached,
            categorical(),
            num_episodes=1,
            video_path=tmp_path / "best.mp4",
            create_render_env_fn=cached,
        )


@pytest.mark.parametrize("envs", [[PayingEnv], PayingEnv(), None])
def test_it_takes_one_callable(envs: Any) -> None:
    with pytest.raises(TypeError, match=r"^create_env_fn is a \w+; expected (a|one) callable that"):
        Evaluator(envs, pays())


def test_a_policy_that_does_not_fit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="reads 'sound', which the environment does not give"):
        Evaluator(EchoEnv, TensorDictModule(nn.Identity(), ["sound"], ["action"]))
    with pytest.raises(PolicyError, match="failed in a trial run"):
        Evaluator(EchoEnv, categorical(num_inputs=9))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_episodes": 0}, ValueError),
        ({"seed": -1}, ValueError),
        ({"max_frames_per_episode": -1}, ValueError),
        ({"exploration_type": "greedy"}, TypeError),
        ({"video_path": "best.mp4"}, TypeError),
        ({"create_render_env_fn": PayingEnv}, TypeError),
        ({"video_path": "best.avi", "create_render_env_fn": PayingEnv}, ValueError),
        ({"fps": 0, "video_path": "best.mp4", "create_render_env_fn": PayingEnv}, ValueError),
        ({"fps": 0}, ValueError),
        ({"fps": float("nan")}, ValueError),
        ({"fps": "x"}, TypeError),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments)).replace("create_render_env_fn", "video")):
        Evaluator(PayingEnv, pays(), **arguments)


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    folder = tmp_path / "films"
    with pytest.raises(TypeError, match="create_env_fn"):
        Evaluator(3, pays(), video_path=folder / "best.mp4", create_render_env_fn=PayingEnv)
    assert not folder.exists()
