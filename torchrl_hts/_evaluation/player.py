"""Playing evaluation episodes, in a process of its own."""

from __future__ import annotations

import contextlib
import math
import os
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
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
from torchrl_hts._evaluation.running_statistics import normalisation_warnings
from torchrl_hts._evaluation.video import check_renders, film
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymDescription, GymEnvironment
from torchrl_hts._executor.messages import Observe, Observed
from torchrl_hts._executor.old_gym import REMEDY, checked_reset, is_old_gym
from torchrl_hts._executor.own_seeds import seed_from_own_draws
from torchrl_hts._executor.trial_observations import (
    gym_observations,
    observed,
    observed_and_restored,
)
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.state import run_policy
from torchrl_hts._processes.messages import receive_object, send_object, unpickled
from torchrl_hts._processes.registrations import explaining_what_is_missing
from torchrl_hts._rounds.shared_memory import SharedMemory
from torchrl_hts._rounds.slots import Slots, bind_parameters

__all__ = ["env_seed", "run_player"]

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
    generators = [Generators(job.seed, episode) for episode in range(job.num_episodes)]
    environments = [_make(job.factory, own) for own in generators]
    stage = None
    if job.render_factory is not None:
        own = Generators(job.seed, job.num_episodes)
        stage = _make(job.render_factory, own)
        if isinstance(stage, gym.Env):
            stage = OwnGenerators(stage, own)
    made = [*environments, *([] if stage is None else [stage])]
    for env in made:
        if isinstance(env, gym.vector.VectorEnv) or not isinstance(env, gym.Env):
            send_object(control, PlayerRefused(_refusal(env)))
            return
    if stage is not None:
        check_renders(stage, env_seed(job.seed, 0))
    first = environments[0]
    observations, is_back = observed_and_restored(first)
    if not is_back:
        first = environments[0] = made[0] = _made_anew(first, job, generators[0])
    description = GymDescription(first.observation_space, first.action_space, observations)
    send_object(control, PlayerDescribed(description, normalisation_warnings(first)))
    given: PlayerPlan | Observe = receive_object(control)
    if isinstance(given, Observe):
        observations = observed(partial(gym_observations, first))
        environments[0] = made[0] = _made_anew(first, job, generators[0])
        send_object(control, Observed(observations))
        given = receive_object(control)
    assert isinstance(given, PlayerPlan)
    player = _Player(job, given, environments, generators, stage, fds[0])
    send_object(control, Ready())
    try:
        while True:
            play: Play = receive_object(control)
            send_object(control, player.play(play.step, play.best))
    finally:
        with contextlib.ExitStack() as closing:  # all of them, also where closing one fails
            for env in made:
                closing.callback(env.close)


def _make(factory: bytes, generators: Generators) -> Any:
    generators.enter()
    with explaining_what_is_missing():
        return unpickled(factory)()


def _made_anew(env: gym.Env[Any, Any], job: PlayerJob, generators: Generators) -> Any:
    """Another in the place of the first environment, which has been observed."""
    with contextlib.suppress(Exception):
        env.close()
    generators.seed(job.seed, 0)
    return _make(job.factory, generators)


def _refusal(env: object) -> str:
    kind = f"{type(env).__module__}.{type(env).__qualname__}"
    if is_old_gym(env):
        return f"the Evaluator's factory made a {kind}; expected a gymnasium.Env. {REMEDY}"
    if isinstance(env, gym.vector.VectorEnv):
        return (
            f"the Evaluator's factory made a {kind}, which is a batch of environments; give it a "
            "factory of a single one, of which it makes as many as there are episodes"
        )
    return (
        f"the Evaluator plays gymnasium environments; its factory made a {kind}. Give it a "
        "factory of the gymnasium.Env that lies within, with its transforms as gymnasium wrappers, "
        "or use torchrl.collectors.Evaluator"
    )


def env_seed(seed: int, episode: int) -> int:
    """The seed of an episode's environment, in every evaluation."""
    return int(_seeds(seed, episode).generate_state(1)[0])


def _seeds(*numbers: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(numbers, spawn_key=(_SPAWN_KEY,))


class _Player:
    """Environments, one per episode, and the policy that plays in them.

    The environments are written and read as a collector's are, so that the policy sees what it
    sees in training: each has a row of a batch ``[num_episodes, 1]``.
    """

    def __init__(
        self,
        job: PlayerJob,
        given: PlayerPlan,
        environments: list[gym.Env[Any, Any]],
        generators: list[Generators],
        stage: gym.Env[Any, Any] | None,
        memory_fd: int,
    ) -> None:
        self.job, self.stage = job, stage
        self.exploration_type = given.exploration_type
        memory = SharedMemory(memory_fd, given.layout)
        os.close(memory_fd)
        slots = Slots(memory)
        rows = {key: tensor[:, 0] for key, tensor in slots.fields[0].items()}
        self.inputs = {key: rows[key] for key in given.inputs}
        self.outputs = {key: rows[key] for key in given.outputs}
        self.policy: TensorDictModuleBase = unpickled(given.policy)
        bind_parameters(self.policy, slots.parameters[0], torch.device("cpu"))
        self.episodes = [_Episode(env, keep_actions=stage is not None) for env in environments]
        self.rows = [
            GymEnvironment(episode, k, own)
            for k, (episode, own) in enumerate(zip(self.episodes, generators, strict=True))
        ]
        self.generators = Generators(job.seed)  # of the policy
        for row in self.rows:
            row.bind(memory, given.options)

    def play(self, step: int, best: float) -> Evaluation:
        """Play an episode in each environment; films the best one if it beats ``best``."""
        self.generators.seed(self.job.seed, step)
        self.generators.enter()
        torch.manual_seed(int(_seeds(self.job.seed, step, 1).generate_state(1, np.uint64)[0]))
        for episode, row in enumerate(self.rows):
            row.reset(env_seed(self.job.seed, episode), 0)
        playing = list(range(len(self.rows)))
        exploration = set_exploration_type(self.exploration_type)
        with torch.inference_mode(), exploration, eagerly():
            while playing:
                for episode in playing:
                    self.rows[episode].write_observation(0, 0)
                inputs = {key: rows[playing] for key, rows in self.inputs.items()}
                self.generators.enter()
                written = run_policy(self.policy, TensorDict(inputs, [len(playing)]))
                for key, rows in self.outputs.items():
                    rows[playing] = written[key]
                playing = [episode for episode in playing if not self.rows[episode].step(0, 0)]
        returns = tuple(math.fsum(episode.rewards) for episode in self.episodes)
        lengths = tuple(len(episode.rewards) for episode in self.episodes)
        path = self.job.video_path
        if path is None or self.stage is None or not max(returns) > best:
            return Evaluation(step, returns, lengths)
        winner = returns.index(max(returns))
        actions, rewards = self.episodes[winner].actions, self.episodes[winner].rewards
        film(self.stage, env_seed(self.job.seed, winner), actions, rewards, path, self.job.fps)
        return Evaluation(step, returns, lengths, path)


class _Episode(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the rewards of an episode, and the actions for a replay; begins no other by itself."""

    def __init__(self, env: gym.Env[Any, Any], *, keep_actions: bool) -> None:
        super().__init__(env)
        self._keep_actions = keep_actions
        self.rewards: list[float] = []
        self.actions: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new episode; without a seed, which asks for the next one, nothing happens."""
        if seed is not None:
            outcome = self.env.reset(seed=seed)
            self._observation = checked_reset(outcome)
            self.rewards, self.actions = [], []
            return outcome
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A step, which is kept in mind."""
        if self._keep_actions:
            self.actions.append(deepcopy(action))
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        return self._observation, reward, terminated, truncated, info
