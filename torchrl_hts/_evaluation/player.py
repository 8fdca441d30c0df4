"""Playing evaluation episodes, in a process of its own."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import set_exploration_type

from torchrl_hts._evaluation.messages import (
    Evaluation,
    Play,
    PlayerDescribed,
    PlayerJob,
    PlayerPlan,
    PlayerRefused,
    Ready,
)
from torchrl_hts._evaluation.own_draws import OwnGenerators
from torchrl_hts._evaluation.running_statistics import (
    normalisation_warnings,
    statistics_warnings,
)
from torchrl_hts._evaluation.scenes import (
    GymScene,
    Scene,
    TorchRLScene,
    VectorScene,
)
from torchrl_hts._evaluation.torchrl_stage import TorchRLStage
from torchrl_hts._evaluation.video import draw_without_a_screen, film, why_unfilmable
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.made_once import check_made_once, gymnasium_parts
from torchrl_hts._executor.messages import Observe, Observed
from torchrl_hts._executor.old_gym import REMEDY, is_old_gym
from torchrl_hts._executor.own_seeds import seed_from_own_draws, unseeded_spaces
from torchrl_hts._executor.torchrl_env import TorchRLDescription, TorchRLEnvironment
from torchrl_hts._executor.torchrl_layers import torchrl_parts, transforms_with_statistics
from torchrl_hts._executor.trial_observations import (
    Observations,
    gym_observations,
    observed,
    observed_and_restored,
)
from torchrl_hts._executor.vector_env import VectorEnvironment
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.counter_policy import no_generator
from torchrl_hts._policy.state import run_policy
from torchrl_hts._processes.messages import receive_object, send_object, unpickled
from torchrl_hts._processes.registrations import explaining_what_is_missing
from torchrl_hts._rounds.shared_memory import SharedMemory
from torchrl_hts._rounds.slots import Slots, bind_parameters

__all__ = ["env_seed", "run_player"]

_UNITS = (TorchRLEnvironment, VectorEnvironment)  # what may be a batch
_NICENESS = 10  # training goes first where cores are short
_SPAWN_KEY = 0x6576616C  # sets the seeds of evaluations apart from those of training


def run_player(control: Connection, fds: list[int]) -> None:
    """Play evaluations until the control connection closes.

    Args:
        control: connection to the main process.
        fds: shared memory, which has one row per episode and the parameters to play with.
    """
    job: PlayerJob = receive_object(control)
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    seed_from_own_draws()
    first = _make(job.factory, job, 0, 0)
    size = first.env.description.num_envs if isinstance(first.env, _UNITS) else 1
    others = range(1, ceil(job.num_episodes / size))
    made = [first, *(_make(job.factory, job, index, index * size) for index in others)]
    filmed = None
    if job.render_factory is not None:
        draw_without_a_screen()
        filmed = _make(job.render_factory, job, 0, job.num_episodes, "create_render_env_fn")
    why = _refusal_of_any(made, filmed)
    stage = None if why or filmed is None else _stage(filmed)
    if stage is not None:
        why = why_unfilmable(stage, env_seed(job.seed, 0))
    if why:
        send_object(control, PlayerRefused(why))
        return
    description, is_back = _described(first.env)
    if not is_back:
        made[0] = first = _made_anew(first, job)
    send_object(control, PlayerDescribed(description, _warnings(first.env)))
    given: PlayerPlan | Observe = receive_object(control)
    if isinstance(given, Observe):
        observations = _observed(first.env)
        made[0] = _made_anew(first, job)
        send_object(control, Observed(observations))
        given = receive_object(control)
    assert isinstance(given, PlayerPlan)
    player = _Player(job, given, made, stage, fds[0])
    send_object(control, Ready())
    try:
        while True:
            play: Play = receive_object(control)
            send_object(control, player.play(play.step, play.best))
    finally:
        with contextlib.ExitStack() as closing:  # all of them, also where closing one fails
            for each in made:
                closing.callback(each.env.close)
            if stage is not None:
                closing.callback(stage.close)


@dataclass
class _Made:
    """An environment, TorchRL's with all that it takes to step it, and what it draws from."""

    env: Any
    generators: Generators


@unseeded_spaces()
def _make(
    factory: bytes, job: PlayerJob, index: int, number: int, name: str = "create_env_fn"
) -> _Made:
    """Make the environment of a scene, the first of whose episodes has a number.

    The name of the factory is for people.
    """
    generators = Generators(job.seed, number)
    generators.enter()
    with explaining_what_is_missing():
        env = unpickled(factory)()
    if isinstance(env, EnvBase):
        check_made_once(name, torchrl_parts(env))
        env = TorchRLEnvironment(
            env, index, generators, max_frames_per_traj=job.max_frames_per_episode
        )
    elif isinstance(env, gym.Env | gym.vector.VectorEnv):
        check_made_once(name, gymnasium_parts(env))
    if isinstance(env, gym.vector.VectorEnv):
        env = VectorEnvironment(env, index, generators)
    return _Made(env, generators)


def _scene(made: _Made, index: int, *, keep_actions: bool) -> Scene:
    """Where episodes are played."""
    if isinstance(made.env, TorchRLEnvironment):
        return TorchRLScene(made.env, keep_actions=keep_actions)
    if isinstance(made.env, VectorEnvironment):
        return VectorScene(made.env, keep_actions=keep_actions)
    return GymScene(made.env, index, made.generators, keep_actions=keep_actions)


def _stage(filmed: _Made) -> OwnGenerators | TorchRLStage:
    """Where an episode is played again to be filmed."""
    if isinstance(filmed.env, TorchRLEnvironment):
        return TorchRLStage(filmed.env)
    return OwnGenerators(filmed.env, filmed.generators)


def _made_anew(first: _Made, job: PlayerJob) -> _Made:
    """Another in the place of the first environment, which has been observed."""
    with contextlib.suppress(Exception):
        first.env.close()
    return _make(job.factory, job, 0, 0)


def _described(env: Any) -> tuple[GymDescription | TorchRLDescription, bool]:
    """What an environment says of itself, and whether it is afterwards as it was."""
    if isinstance(env, _UNITS):
        return env.description, True
    observations, is_back = observed_and_restored(env)
    return GymDescription(env.observation_space, env.action_space, observations), is_back


def _observed(env: Any) -> Observations | None:
    """What an environment shows; it is of no use any more then."""
    if isinstance(env, _UNITS):
        return observed(env.observations)
    return observed(partial(gym_observations, env))


def _warnings(env: Any) -> list[str]:
    """What evaluations in such an environment would get wrong, a sentence each."""
    if isinstance(env, TorchRLEnvironment):
        return statistics_warnings(transforms_with_statistics(env.env))
    if not isinstance(env, VectorEnvironment):
        return normalisation_warnings(env)
    found = normalisation_warnings(env.env)
    if not env.takes_seeds:
        found.append(
            f"{type(env.env).__name__} takes its seed where it is made, so an evaluation plays "
            "other episodes than the one before it, and the Evaluator's seed has no effect"
        )
    return found


def _refusal_of_any(made: list[_Made], filmed: _Made | None) -> str:
    """Why the evaluator can't play in what factories made, or film it; "" if it can."""
    refusals = [_refusal(each.env, alone=len(made) == 1) for each in made]
    if filmed is not None:
        refusals.append(_refusal(filmed.env, alone=True))
        refusals.append(_refusal_to_film(filmed.env, made[0].env))
    return next(filter(None, refusals), "")


def _refusal(env: Any, *, alone: bool) -> str:
    """Why the evaluator can't play in what a factory made; "" if it can.

    Args:
        env: what it made.
        alone: whether nothing else that the same factory made is played.
    """
    kind = f"{type(env).__module__}.{type(env).__qualname__}"
    if is_old_gym(env):
        return f"the Evaluator's factory made a {kind}; expected a gymnasium.Env. {REMEDY}"
    if isinstance(env, VectorEnvironment) and not env.takes_seeds and not alone:
        return (
            f"{type(env.env).__name__} takes its seed where it is made, so that several batches of "
            "one factory would play the same episodes: let it make a batch of num_episodes "
            "environments at least"
        )
    if isinstance(env, gym.Env | TorchRLEnvironment | VectorEnvironment):
        return ""
    return (
        f"the Evaluator's factory made a {kind}; expected a gymnasium.Env, a "
        "gymnasium.vector.VectorEnv or a torchrl.envs.EnvBase"
    )


def _refusal_to_film(env: Any, first: Any) -> str:
    """Why an episode played in the first environment can't be filmed in another; "" if it can."""
    if isinstance(env, VectorEnvironment):
        return (
            "create_render_env_fn made a gymnasium.vector.VectorEnv, which can't be filmed: let it "
            "make one environment like those of the batch, with render_mode='rgb_array'"
        )
    played, filmed = (
        [each.env.batch_size] if isinstance(each, TorchRLEnvironment) else None
        for each in (first, env)
    )
    if played == filmed:
        return ""
    return (
        "create_render_env_fn made another kind of environment, or another number of them, "
        "than create_env_fn: the film's must be the same but for its rendering"
    )


def env_seed(seed: int, episode: int) -> int:
    """The seed of an episode's environment, in every evaluation."""
    return int(_seeds(seed, episode).generate_state(1)[0])


def _seeds(*numbers: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(numbers, spawn_key=(_SPAWN_KEY,))


class _Player:
    """Environments, for each episode one, and the policy that plays in them.

    The environments are written and read as a collector's are, so that the policy sees what it
    sees in training: each has a row of a batch ``[episodes, 1]``.
    """

    def __init__(
        self,
        job: PlayerJob,
        given: PlayerPlan,
        made: list[_Made],
        stage: OwnGenerators | TorchRLStage | None,
        memory_fd: int,
    ) -> None:
        self.job, self.given, self.stage = job, given, stage
        self.memory = SharedMemory(memory_fd, given.layout)
        os.close(memory_fd)
        slots = Slots(self.memory)
        rows = {key: tensor[:, 0] for key, tensor in slots.fields[0].items()}
        self.inputs = {key: rows[key] for key in given.inputs}
        self.outputs = {key: rows[key] for key in given.outputs}
        self.policy: TensorDictModuleBase = unpickled(given.policy)
        for module in self.policy.modules():
            if isinstance(module, ProbabilisticTensorDictModule):  # or evaluations went on from it
                module.__dict__["_resolve_generator"] = no_generator
        bind_parameters(self.policy, slots.parameters[0], torch.device("cpu"))
        keep = stage is not None
        self.scenes = [_scene(each, index, keep_actions=keep) for index, each in enumerate(made)]
        self.generators = Generators(job.seed)  # of the policy
        for scene in self.scenes:
            scene.bind(self.memory, given.options, self.outputs)

    def play(self, step: int, best: float) -> Evaluation:
        """Play an episode in each environment; films the best one if it beats ``best``."""
        self.generators.seed(self.job.seed, step)
        self.generators.enter()
        torch.manual_seed(int(_seeds(self.job.seed, step, 1).generate_state(1, np.uint64)[0]))
        count = self.job.num_episodes  # the last batch may have more
        for scene in self.scenes:
            seeds = [env_seed(self.job.seed, episode) for episode in scene.rows]
            scene.begin(seeds, min(len(seeds), count - scene.rows.start))
        playing = self.scenes
        exploration = set_exploration_type(self.given.exploration_type)
        with torch.inference_mode(), exploration, eagerly():
            while playing:
                for scene in playing:
                    scene.write_observation()
                episodes = [episode for scene in playing for episode in scene.rows]
                inputs = {key: rows[episodes] for key, rows in self.inputs.items()}
                self.generators.enter()
                written = run_policy(self.policy, TensorDict(inputs, [len(episodes)]))
                for key, rows in self.outputs.items():
                    rows[episodes] = written[key]
                playing = [scene for scene in playing if not scene.step()]
        returns = tuple(each for scene in self.scenes for each in scene.returns)[:count]
        lengths = tuple(each for scene in self.scenes for each in scene.lengths)[:count]
        path = self.job.video_path
        if path is None or self.stage is None or not max(returns) > best:
            return Evaluation(step, returns, lengths)
        winner = returns.index(max(returns))
        scene = next(scene for scene in self.scenes if winner in scene.rows)
        row = scene.rows.index(winner)
        if isinstance(self.stage, TorchRLStage):
            assert isinstance(scene, TorchRLScene)
            self.stage.follow(scene, row, self.memory, self.given.options, self.outputs)
        actions, rewards = scene.actions(row)[: lengths[winner]], scene.rewards[row]
        seed = env_seed(self.job.seed, winner)
        try:
            film(self.stage, seed, actions, rewards, path, self.job.fps)
        except Exception as error:  # what was played counts, with or without a film of it
            return Evaluation(
                step, returns, lengths, video_error=f"{type(error).__name__}: {error}"
            )
        return Evaluation(step, returns, lengths, path)
