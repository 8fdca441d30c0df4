"""Evaluation beside training: the right numbers, at the right time, again after a resume."""

from __future__ import annotations

import functools
import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import DictEnv, EchoEnv, FaultyEnv, GatedEnv, wrapped_in_disguise
from policies import categorical
from processes import Script, alive, group_of, wait_until, wait_until_gone
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import GRUModule

from torchrl_hts.errors import Failure, PolicyError, ResourceError, WorkerError
from torchrl_hts.evaluation import Evaluation, Evaluator
from torchrl_hts.learner import environment_seed
from torchrl_hts.playing import env_seed

pytestmark = pytest.mark.usefixtures("nothing_left")

cart_pole = functools.partial(gym.make, "CartPole-v1")
RANDOM, GREEDY = ExplorationType.RANDOM, ExplorationType.DETERMINISTIC


class PayingEnv(gym.Env[Any, Any]):
    """Rewards with the action. How long it lasts, and its first observation, come from the seed."""

    def __init__(self, render_mode: str | None = None, bonus: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Box(-100, 100, (1,), np.float32)
        self.render_mode, self.bonus = render_mode, bonus
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.last = 0, 0.0
        self.length = int(self.np_random.integers(2, 20))
        return self.observation_space.sample() * 0 + self.np_random.random(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.last = float(action[0])
        observation = self.np_random.random(2, np.float32)
        return observation, self.last + self.bonus, self.t == self.length, False, {}

    def render(self) -> np.ndarray:
        return np.full((24, 32, 3), 10 * self.t + self.last, np.uint8)


class Pays(nn.Module):
    """Always acts with the value of its parameter; its buffer counts its calls."""

    def __init__(self, value: float, ballast: int = 0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))
        self.ballast = nn.Parameter(torch.zeros(ballast))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation: Tensor) -> Tensor:
        self.calls += 1
        return self.value.expand(len(observation), 1) + (self.calls if self.training else 0)


def pays(value: float = 1.0, ballast: int = 0) -> TensorDictModule:
    """A policy for PayingEnv."""
    return TensorDictModule(Pays(value, ballast), ["observation"], ["action"])


def set_value(policy: TensorDictModule, value: float) -> None:
    """Train the policy, so to say."""
    with torch.no_grad():
        policy.module.value.fill_(value)


def one(
    make_env: Callable[[], Any], policy: nn.Module, step: int = 0, **options: Any
) -> Evaluation:
    """A single evaluation."""
    with Evaluator(make_env, policy, **options) as evaluator:
        evaluator.submit(step)
        (evaluation,) = evaluator.wait()
    return evaluation


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
    policy = TensorDictSequential(
        GRUModule(2, 8, in_keys=["observation", "hidden", "is_init"],
                  out_keys=["embedding", ("next", "hidden")]),
        TensorDictModule(nn.Linear(8, 1), ["embedding"], ["action"]),
    )  # fmt: skip
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


# When it comes out.


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe that GatedEnv waits at."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def gated(gate: Path) -> Callable[[], Any]:
    """Environments that pay the parameter, but wait at the gate before their second step."""
    return functools.partial(_PaysAtGate, str(gate))


class _PaysAtGate(GatedEnv):
    def __init__(self, gate: str) -> None:
        super().__init__(gate, at=1)
        self.action_space = gym.spaces.Box(-100, 100, (1,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, float(action[0]), *rest  # type: ignore[return-value]


AT_GATE: dict[str, Any] = {"num_episodes": 1, "max_frames_per_episode": 2}


def open_gate(gate: Path) -> None:
    """Let the evaluation go on that waits there, or will."""
    with open(gate, "wb") as pipe:
        pipe.write(b"x")


def next_result(evaluator: Evaluator) -> Evaluation:
    """The next evaluation, by polling."""
    found: list[Evaluation] = []
    wait_until(lambda: bool(found.extend(evaluator.poll()) or found))
    (evaluation,) = found
    return evaluation


def test_submissions_queue_up_with_their_own_parameters(gate: Path) -> None:
    policy = pays(ballast=10_000_000)  # 40 MB: far more than a socket takes
    with Evaluator(gated(gate), policy, **AT_GATE) as evaluator:
        for step in (1, 2, 3):
            set_value(policy, 10.0 * step)
            evaluator.submit(step)  # none of them waits: the gate is shut
        set_value(policy, -1.0)
        assert evaluator.poll() == []
        results = []
        for _ in range(2):
            open_gate(gate)
            results.append(next_result(evaluator))
        assert evaluator.poll() == []
        open_gate(gate)
        results += evaluator.wait()
        assert evaluator.wait() == []
    assert [(result.step, result.returns) for result in results] == [
        (1, (20.0,)),
        (2, (40.0,)),
        (3, (60.0,)),
    ]


def test_training_goes_first() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, evaluator.pid) == min(own + 10, 19)


# Resuming.


def saved(state: dict[str, Any]) -> Any:
    """A state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_is_pending_is_evaluated_again_after_a_resume(gate: Path) -> None:
    policy = pays()
    with Evaluator(gated(gate), policy, **AT_GATE) as evaluator:
        for step in (1, 2, 3):
            set_value(policy, 10.0 * step)
            evaluator.submit(step)
        open_gate(gate)
        returned = next_result(evaluator)
        state = saved(evaluator.state_dict())  # 2 is being played, 3 waits
    assert [pending["step"] for pending in state["pending"]] == [2, 3]
    assert state["best"] == returned.max == 20.0
    with Evaluator(gated(gate), pays(-1.0), **AT_GATE) as evaluator:
        evaluator.load_state_dict(state)
        results = []
        for _ in range(2):
            open_gate(gate)
            results.append(next_result(evaluator))
        assert not evaluator.state_dict()["pending"]
    assert [(result.step, result.returns) for result in results] == [(2, (40.0,)), (3, (60.0,))]


def test_what_was_not_returned_is_pending_even_if_it_is_finished() -> None:
    policy = categorical(num_actions=2)
    options: dict[str, Any] = {"num_episodes": 3, "exploration_type": RANDOM}
    with Evaluator(cart_pole, policy, **options) as evaluator:
        evaluator.submit(1)
        evaluator._advance(wait=True)
        state = saved(evaluator.state_dict())
        expected = evaluator.poll()
    assert len(expected) == 1
    with Evaluator(cart_pole, categorical(num_actions=2, seed=5), **options) as evaluator:
        evaluator.load_state_dict(state)
        assert evaluator.wait() == expected


def test_only_a_fitting_state_is_loaded() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        evaluator.submit(0)
        state = evaluator.state_dict()
        with pytest.raises(ValueError, match="not been returned"):
            evaluator.load_state_dict(state)
    with (
        Evaluator(PayingEnv, pays(ballast=3), num_episodes=1) as evaluator,
        pytest.raises(ValueError, match="another policy"),
    ):
        evaluator.load_state_dict(state)


SCRIPT = """
import json, os, sys, torch
import test_evaluation as tests
policy = tests.categorical(num_actions=2)
options = dict(num_episodes=3, exploration_type=tests.RANDOM)
evaluator = tests.Evaluator(tests.cart_pole, policy, **options)
for step in (1, 2):
    evaluator.submit(step)
torch.save(evaluator.state_dict(), sys.argv[1])
print(json.dumps(evaluator.pid), flush=True)
evaluator.submit(3)
while True:
    evaluator.wait()
    evaluator.submit(4)
"""


def test_a_killed_run_leaves_no_process_and_its_checkpoint_gives_the_same(tmp_path: Path) -> None:
    policy = categorical(num_actions=2)
    options: dict[str, Any] = {"num_episodes": 3, "exploration_type": RANDOM}
    expected = [one(cart_pole, policy, step, **options) for step in (1, 2)]
    checkpoint = tmp_path / "checkpoint.pt"
    with Script(tmp_path / "run.py", SCRIPT, str(checkpoint)) as script:
        pid = script.receive()
        assert alive(pid)
        os.kill(script.process.pid, signal.SIGKILL)
        wait_until_gone([pid])
    with Evaluator(cart_pole, categorical(num_actions=2, seed=1), **options) as evaluator:
        evaluator.load_state_dict(torch.load(checkpoint, weights_only=True))
        assert evaluator.wait() == expected


# What goes wrong.


def test_a_killed_process_is_said_by_every_method(gate: Path) -> None:
    with Evaluator(gated(gate), pays(), **AT_GATE) as evaluator:
        evaluator.submit(4)
        os.kill(evaluator.pid, signal.SIGKILL)
        for call in (evaluator.wait, evaluator.poll, lambda: evaluator.submit(5)):
            with pytest.raises(WorkerError, match=r"SIGKILL .* in the .* at step 4") as e:
                call()
        assert e.value.worker == "evaluator"
        # What was asked for is not lost: another evaluator can play it.
        assert [pending["step"] for pending in evaluator.state_dict()["pending"]] == [4, 5]


def test_a_process_killed_at_rest_is_noticed() -> None:
    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        os.kill(evaluator.pid, signal.SIGKILL)
        wait_until(lambda: not alive(evaluator.pid))
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL .*while it waited for work"):
            evaluator.poll()


@pytest.mark.parametrize(
    ("fault", "failure", "said"),
    [
        ("raise", Failure.RAISED, r"failed in the .* 9; .*in step.*the ball left the universe"),
        ("shape", Failure.INVALID, r"failed in the evaluation at step 9; .*of shape \(2,\)"),
        ("quit", Failure.RAISED, r"failed in the .* at step 9; .*SystemExit: the engine gave up"),
        ("reset", Failure.RAISED, r"failed in the evaluation at step 9; .*cannot reset"),
        ("exit", Failure.EXITED, r"ended with exit code 7 in the evaluation at step 9"),
        ("fork and die", Failure.KILLED, r"was killed by SIGKILL .*in the evaluation at step 9"),
    ],
)
def test_a_failing_environment_is_an_error_that_says_how(
    fault: str, failure: Failure, said: str
) -> None:
    make_env = functools.partial(FaultyEnv, fault)
    with Evaluator(make_env, categorical(), num_episodes=2) as evaluator:
        pid = evaluator.pid
        with pytest.raises(WorkerError, match=f"(?s){said}") as e:  # noqa: PT012  either may
            evaluator.submit(9)
            evaluator.wait()
        assert e.value.failure is failure
        assert (e.value.exit_signal == signal.SIGKILL) is (failure is Failure.KILLED)
    wait_until(lambda: not group_of(pid))  # what the environment has started ends with it


@pytest.mark.parametrize("within", ["send_object", "receive_object"])
def test_one_that_is_interrupted_within_a_message_is_ended(
    within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an answer that was lost, and what was asked for is still known."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Evaluator(PayingEnv, pays(), num_episodes=1) as evaluator:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr(f"torchrl_hts.playing.{within}", interrupt)
            evaluator.submit(3)
            evaluator.wait()
        with pytest.raises(RuntimeError, match="has been shut down"):
            evaluator.wait()
        assert [pending["step"] for pending in evaluator.state_dict()["pending"]] == [3]


def test_an_environment_that_cannot_be_made_is_an_error_at_once() -> None:
    with pytest.raises(WorkerError, match=r"(?s)while it made the environments.*no engine here"):
        Evaluator(functools.partial(FaultyEnv, "init"), categorical())


def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ResourceError("too few processes")

    monkeypatch.setattr("torchrl_hts.playing.acquire_server", refuse)
    with pytest.raises(ResourceError, match="too few processes"):
        Evaluator(EchoEnv, categorical())


def test_torchrl_environments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"plays gymnasium environments.*GymWrapper"):
        Evaluator(wrapped_in_disguise, categorical())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a callable"):
        Evaluator(EchoEnv(), categorical())  # type: ignore[arg-type]


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
        ({"video_path": "best.mp4", "create_render_env_fn": PayingEnv, "fps": 0}, ValueError),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments)).replace("create_render_env_fn", "video")):
        Evaluator(PayingEnv, pays(), **arguments)


def test_shutdown_ends_an_evaluation_at_once(gate: Path) -> None:
    evaluator = Evaluator(gated(gate), pays(), **AT_GATE)
    evaluator.submit(0)
    pid = evaluator.pid
    began = time.monotonic()
    evaluator.shutdown()
    assert time.monotonic() - began < 4
    assert not alive(pid)
    evaluator.shutdown()
    for call in (evaluator.wait, evaluator.poll, lambda: evaluator.submit(1)):
        with pytest.raises(RuntimeError, match="has been shut down"):
            call()


def test_an_idle_process_closes_its_environments(tmp_path: Path) -> None:
    class Closing(PayingEnv):
        def close(self) -> None:
            with open(tmp_path / "closed", "a") as file:
                file.write("x")

    one(Closing, pays(), num_episodes=3)
    assert (tmp_path / "closed").read_text() == "xxx"


def test_a_forgotten_evaluator_is_ended(gate: Path) -> None:
    evaluator = Evaluator(gated(gate), pays(), **AT_GATE)
    evaluator.submit(0)
    pid = evaluator.pid
    del evaluator
    wait_until_gone([pid])


# Videos.


def rendering(**options: Any) -> Callable[[], Any]:
    return functools.partial(PayingEnv, render_mode="rgb_array", **options)


def num_frames(path: Path) -> int:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    count, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    return int(count)


def test_the_best_episode_so_far_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "videos" / "best.mp4"
    options: dict[str, Any] = {
        "num_episodes": 4, "video_path": path, "create_render_env_fn": rendering()
    }  # fmt: skip
    policy = pays(2.0)
    with Evaluator(PayingEnv, policy, **options) as evaluator:
        evaluator.submit(0)
        set_value(policy, 1.0)
        evaluator.submit(1)
        best, worse = evaluator.wait()
        assert (best.video, worse.video) == (path, None)
        assert num_frames(path) == 1 + best.lengths[best.returns.index(best.max)]
        state = saved(evaluator.state_dict())
    before = path.stat()
    assert state["best"] == best.max
    with Evaluator(PayingEnv, policy, **options) as evaluator:
        evaluator.load_state_dict(state)
        for step, value in enumerate((1.9, 2.0, -5.0), 2):
            set_value(policy, value)
            evaluator.submit(step)
        assert [result.video for result in evaluator.wait()] == [None] * 3
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        set_value(policy, 2.1)
        evaluator.submit(5)
        assert evaluator.wait()[0].video == path
    assert path.stat().st_mtime_ns != before.st_mtime_ns
    assert list(path.parent.iterdir()) == [path]


def test_the_best_return_of_a_queue_counts_in_its_order(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    policy = pays()
    with Evaluator(
        PayingEnv,
        policy,
        num_episodes=2,
        video_path=tmp_path / "best.mp4",
        create_render_env_fn=rendering(),
    ) as evaluator:
        for step, value in enumerate((1.0, 3.0, 2.0, 4.0)):
            set_value(policy, value)
            evaluator.submit(step)
        evaluator._advance(wait=True)  # finished, but not returned
        state = saved(evaluator.state_dict())
        filmed = [result.video is not None for result in evaluator.wait()]
    assert filmed == [True, True, False, True]
    assert state["best"] == -math.inf  # so that a resumed run films the same


def test_a_film_of_another_game_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with Evaluator(
        PayingEnv,
        pays(),
        num_episodes=1,
        video_path=tmp_path / "best.mp4",
        create_render_env_fn=rendering(bonus=0.5),
    ) as evaluator:
        evaluator.submit(0)
        with pytest.raises(WorkerError, match=r"(?s)can't be played again: step 1 of .* of 1\.5"):
            evaluator.wait()
    assert not list(tmp_path.iterdir())


def test_a_game_that_does_not_render_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(WorkerError, match="make it with render_mode='rgb_array'"):
        Evaluator(
            PayingEnv, pays(), video_path=tmp_path / "best.mp4", create_render_env_fn=PayingEnv
        )


def test_a_missing_package_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ModuleNotFoundError, match=r"torchrl_hts\[video\]"):
        Evaluator(
            PayingEnv, pays(), video_path=tmp_path / "best.mp4", create_render_env_fn=rendering()
        )


def test_a_film_that_shutdown_cuts_off_leaves_nothing(tmp_path: Path, gate: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")

    class Stuck(PayingEnv):
        def render(self) -> np.ndarray:
            if self.t == 2:
                with open(gate, "rb"):
                    pass
            return np.zeros((480, 480, 3), np.uint8)

    folder = tmp_path / "videos"
    evaluator = Evaluator(
        PayingEnv,
        pays(),
        num_episodes=3,
        video_path=folder / "best.mp4",
        create_render_env_fn=functools.partial(Stuck, render_mode="rgb_array"),
    )
    evaluator.submit(0)
    pipe = os.open(gate, os.O_WRONLY)  # it is there
    evaluator.shutdown()
    os.close(pipe)
    assert not list(folder.iterdir())
