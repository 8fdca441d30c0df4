"""The process that plays evaluation episodes: its two ends, and what they say to each other.

The main process holds a `PlayerProcess`; `run_player` is what runs in the other. Each message to it
is answered by one from it. The parameters to play with lie in shared memory, which the main process
writes while the other waits for work.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._evaluation.own_draws import OwnGenerators
from torchrl_hts._evaluation.running_statistics import normalisation_warnings
from torchrl_hts._evaluation.video import check_renders, film
from torchrl_hts._executor.generators import Generators
from torchrl_hts._executor.gym_env import GymDescription, GymEnvironment, RowOptions
from torchrl_hts._executor.old_gym import REMEDY, checked_reset, is_old_gym
from torchrl_hts._executor.trial_observations import (
    gym_observations,
    observed,
    observed_and_restored,
)
from torchrl_hts._policy.compiled import eagerly
from torchrl_hts._policy.state import run_policy
from torchrl_hts._processes.fork_server import POLITE_S
from torchrl_hts._processes.messages import pickled, receive_object, send_object, unpickled
from torchrl_hts._processes.registrations import Registrations, explaining_what_is_missing
from torchrl_hts._processes.server_pool import (
    WITH_TORCH,
    ServerUser,
    acquire_server,
    release_servers,
)
from torchrl_hts._processes.shutdown_once import Ending
from torchrl_hts._processes.surroundings import Surroundings
from torchrl_hts._rounds.shared_memory import Key, Layout, SharedMemory
from torchrl_hts._rounds.slots import Slots, bind_parameters
from torchrl_hts._supervision.failures import Site, died, failed
from torchrl_hts.errors import WorkerError, WorkerId

__all__ = ["Evaluation", "PlayerJob", "PlayerPlan", "PlayerProcess", "env_seed", "run_player"]

_ENDED = "the evaluator has been shut down"
_NICENESS = 10  # training goes first where cores are short
_SPAWN_KEY = 0x6576616C  # sets the seeds of evaluations apart from those of training


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation gave.

    Attributes:
        step: that it was submitted with.
        returns: undiscounted return of each episode.
        lengths: steps of each episode.
        video: the file that its best episode was written to, if it beats all earlier ones.
        parameters: of the policy that played, and its buffers, by name.

    Example:
        >>> evaluation = Evaluation(step=1000, returns=(9.0, 12.0), lengths=(9, 12))
        >>> evaluation.mean, evaluation.max
        (10.5, 12.0)
    """

    step: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    video: Path | None = None
    parameters: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def mean(self) -> float:
        """Mean return."""
        return math.fsum(self.returns) / len(self.returns)

    @property
    def min(self) -> float:
        """Return of the worst episode."""
        return min(self.returns)

    @property
    def max(self) -> float:
        """Return of the best episode."""
        return max(self.returns)


@dataclass(frozen=True)
class PlayerJob:
    """First message: what to play in. Answered by a `GymDescription`, and what to warn of.

    Attributes:
        factory: the pickled environment factory.
        num_episodes: of each evaluation; an environment is made for each.
        seed: of everything random.
        render_factory: the pickled factory of the environment that is filmed; None for no video.
        video_path: where the best episode goes.
        fps: frames per second of the video; None for what the environment says.
    """

    factory: bytes
    num_episodes: int
    seed: int
    render_factory: bytes | None
    video_path: Path | None
    fps: float | None


@dataclass(frozen=True)
class PlayerPlan:
    """Then, after ``"observe"`` maybe: what to play with. Answered by None.

    Then each job by its `Evaluation`.

    Attributes:
        policy: the pickled policy, on the CPU and in evaluation mode.
        layout: the shared memory's layout.
        inputs: keys that the policy reads.
        outputs: keys that it writes.
        options: how rows are written.
        exploration_type: under which the policy runs.
    """

    policy: bytes
    layout: Layout
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    options: RowOptions
    exploration_type: ExplorationType


class PlayerProcess:
    """The playing process, as the main process sees it.

    Args:
        memory_fd: of the shared memory.
        leftover: a file that it may leave behind if it is killed.

    Raises:
        WorkerError: from `check`, `send` and `receive`, if the process has failed.
    """

    def __init__(self, memory_fd: int, leftover: Path | None) -> None:
        self._leftover = leftover
        self._owner_pid = os.getpid()
        self._closed = False
        self._ending = Ending()
        self._busy = False
        # Copies are raised: the one that is raised keeps alive what its traceback passes through.
        self._failure: WorkerError | None = None
        self._user = ServerUser()
        inheritance = pickled((Surroundings.here(), Registrations.here()))
        try:
            server = acquire_server(WITH_TORCH, self._user)
            target = "torchrl_hts._evaluation.player:run_player"
            self.worker = server.spawn(WorkerId("evaluator"), target, [memory_fd], inheritance)
            self._poll = select.poll()
            for fd in self.worker.fds:
                self._poll.register(fd, select.POLLIN)
        except BaseException:
            release_servers(self._user)
            raise

    def check(self) -> None:
        """Raise if the process has failed or been shut down."""
        if self._failure is not None:
            raise copy(self._failure)
        if self._closed:
            raise RuntimeError(_ENDED)

    def send(self, message: object) -> None:
        """Send a message to the process, which waits for one."""
        self._busy = True
        try:
            send_object(self.worker.control, message)
        except ConnectionError:
            self.receive("before it was given work")
            raise
        except BaseException:
            self.shutdown()  # interrupted within a message: the next would not be understood
            raise

    def has_news(self, *, wait: bool) -> bool:
        """Whether there is a message, or the process has ended."""
        while not (news := self._poll.poll(1000 if wait else 0)) and wait:
            self.check()
        return bool(news)

    def receive(self, doing: str) -> Any:
        """The next message; waits for it.

        Args:
            doing: what the process does meanwhile, for the message of a WorkerError.
        """
        self.has_news(wait=True)
        try:
            if self.worker.has_ended() and not self.worker.control.poll(0):
                raise EOFError
            kind, value, _ = receive_object(self.worker.control)
        except (EOFError, ConnectionError) as error:
            if self._closed:  # meanwhile, by another thread or a signal handler
                raise RuntimeError(_ENDED) from error
            raise self._fail(died(self.worker, Site(text=f" {doing}"))) from error
        except BaseException:
            self.shutdown()
            raise
        self._busy = False
        if kind == "error":
            failure, traceback = value
            raise self._fail(failed(self.worker, failure, traceback, None, Site(text=f" {doing}")))
        if kind == "refused":
            raise TypeError(value)
        return value

    def _fail(self, failure: WorkerError) -> WorkerError:
        self._failure = failure
        return copy(failure)

    def shutdown(self) -> None:
        """End the process: at once if it plays, which nobody waits for any more; see `Ending`."""
        self._closed = True
        if os.getpid() == self._owner_pid:  # not in a fork of the user's process
            self._ending(self._end)

    def _end(self) -> None:
        try:
            self.worker.hang_up()
            if not self._busy:
                self.worker.exit_status(POLITE_S)  # it closes its environments
        finally:
            self.worker.kill()
            self.worker.exit_status(5.0)
            self.worker.close()
            release_servers(self._user)
            if self._leftover is not None:
                self._leftover.unlink(missing_ok=True)


# What follows runs in the playing process.


def run_player(control: Connection, fds: list[int]) -> None:
    """Play evaluations until the control connection closes.

    Args:
        control: connection to the main process.
        fds: shared memory, which has one row per episode and the parameters to play with.
    """
    job: PlayerJob = receive_object(control)
    os.nice(_NICENESS)
    torch.set_num_threads(1)
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
        if not isinstance(env, gym.Env):
            send_object(control, ("refused", _refusal(env), None))
            return
    if stage is not None:
        check_renders(stage, env_seed(job.seed, 0))
    first = environments[0]
    observations, is_back = observed_and_restored(first)
    if not is_back:
        first = environments[0] = made[0] = _made_anew(first, job, generators[0])
    description = GymDescription(first.observation_space, first.action_space, observations)
    send_object(control, ("described", (description, normalisation_warnings(first)), None))
    given: PlayerPlan | str = receive_object(control)
    if isinstance(given, str):  # "observe"
        observations = observed(partial(gym_observations, first))
        environments[0] = made[0] = _made_anew(first, job, generators[0])
        send_object(control, ("observed", observations, None))
        given = receive_object(control)
    assert isinstance(given, PlayerPlan)
    player = _Player(job, given, environments, generators, stage, fds[0])
    send_object(control, ("ready", None, None))
    try:
        while True:
            step, best = receive_object(control)
            send_object(control, ("finished", player.play(step, best), None))
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
