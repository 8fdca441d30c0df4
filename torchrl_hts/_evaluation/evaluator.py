"""Evaluation beside training: whole episodes, on seeds of their own, in a process of its own.

TorchRL's ``torchrl.collectors.Evaluator`` takes TorchRL environments alone, imports torch anew in
its process, and its state forgets the requests that are still to be played. This one plays plain
gymnasium environments too, starts by a fork, and plays them again after a resume, bit for bit.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_hts._evaluation.messages import (
    Evaluation,
    Play,
    PlayerDescribed,
    PlayerJob,
    PlayerPlan,
)
from torchrl_hts._evaluation.player_process import PlayerProcess
from torchrl_hts._evaluation.video import find_ffmpeg, partial_path
from torchrl_hts._executor.gym_env import GymDescription
from torchrl_hts._executor.messages import Observe, Observed
from torchrl_hts._executor.torchrl_env import TorchRLDescription
from torchrl_hts._planning.arguments import check_factory, make_policy
from torchrl_hts._planning.batch_plan import BatchPlan, plan_batch
from torchrl_hts._planning.fitted import Fitted
from torchrl_hts._planning.pickling import pickle_factories, pickle_policy
from torchrl_hts._planning.torch_defaults import torchs_defaults
from torchrl_hts._processes.uncopied import Uncopied
from torchrl_hts._rounds.entries import leaves
from torchrl_hts._rounds.shared_memory import Layout, SharedMemory
from torchrl_hts._rounds.slots import Slots, field_of, policy_tensors
from torchrl_hts.delayed_gradient.undelayed import refuse_within_block
from torchrl_hts.errors import PolicyError
from torchrl_hts.errors.checks import check_integer, check_positive, check_state

__all__ = ["Evaluation", "Evaluator"]

Playable: TypeAlias = gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any] | EnvBase

_LOG = logging.getLogger(__name__)


class Evaluator(Uncopied):
    """Plays evaluation episodes in a process of its own, beside training.

    Episode k of every evaluation is played in environment k, which is reset with a seed that
    depends on ``seed`` and k alone. What an evaluation gives depends on the parameters, ``seed``
    and the step that it is submitted with, on nothing else: not on timing, nor on what was
    evaluated before. For that, ``reset(seed=...)`` must start an environment wholly anew. One that
    goes on counting over episodes has no place here. A warning names wrappers that normalise
    rewards, or observations by running statistics of their own (docs/explanation/reliability.md
    says what to do instead).

    The process is forked from the server that collectors fork their actors from. It runs at a lower
    priority than training, on one thread and the CPU. It ends with this one, however it ends. Not
    for use by several threads at a time.

    Args:
        create_env_fn: makes a `gymnasium.Env`, a batch of them (`gymnasium.vector.VectorEnv`), or
            a TorchRL `EnvBase` with any transforms, alone or with ``batch_size=[k]``. It is equal
            to those of training, though its rewards need not be scaled or clipped. Where several
            agents have rewards, their mean counts.
        policy: the one that is trained. Its newest values are copied at each `submit`; it is run
            in evaluation mode (``policy.eval()``), in a copy.

    Keyword Args:
        num_episodes: episodes per evaluation, all played at the same time with one batched
            forward pass per step: the first of each environment. Of batches so many are made as it
            takes.
        seed: an int >= 0.
        exploration_type: ``DETERMINISTIC`` for greedy play, ``RANDOM`` for sampled actions.
        max_frames_per_episode: length at which an episode is truncated; 0: never. Adds
            ``step_count``, as a collector's ``max_frames_per_traj`` does.
        video_path: an ``.mp4`` file for the best episode so far. It is written after an evaluation
            whose best return beats those of all earlier ones. If filming fails, a warning tells
            why, and the evaluation counts nevertheless.
        create_render_env_fn: makes the same environment with ``render_mode="rgb_array"``, or one
            of TorchRL whose ``render()`` gives frames. A batch of them gives those of one by
            ``render(mode="rgb_array", env_index=k)``, as VMAS does. For a gymnasium ``VectorEnv``
            it makes one environment like those of the batch. Needed for a video alone.
        fps: frames per second of the video, of one frame per step; by default what the
            environment's metadata says. 15 is right for Atari with a frame skip of 4.

    Raises:
        TypeError, ValueError: for arguments that don't fit; the message says which.
        ModuleNotFoundError: if a video is asked for and imageio-ffmpeg is not installed.
        PolicyError: if the policy fails in a trial run.
        WorkerError: if an environment can't be made; later, from every method but `state_dict`
            and `shutdown`, if the process fails. What was submitted stays pending, the submission
            that raises included: a new evaluator plays it if it is given the `state_dict`.

    Example:
        >>> import functools, torch
        >>> from tensordict.nn import ProbabilisticTensorDictModule as Prob, TensorDictModule
        >>> from tensordict.nn import ProbabilisticTensorDictSequential as Actor
        >>> policy = Actor(
        ...     TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ...     Prob(["logits"], ["action"], distribution_class=torch.distributions.Categorical),
        ... )
        >>> make_env = functools.partial(gym.make, "CartPole-v1")
        >>> with Evaluator(make_env, policy, num_episodes=5) as evaluator:
        ...     for step in range(0, 3000, 1000):  # a training loop
        ...         evaluator.submit(step)
        ...         finished = evaluator.poll()  # maybe none yet
        ...     finished += evaluator.wait()
        >>> finished[-1].step, len(finished[-1].returns)
        (2000, 5)
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Playable],
        policy: nn.Module,
        *,
        num_episodes: int = 10,
        seed: int = 0,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        max_frames_per_episode: int = 0,
        video_path: Path | str | None = None,
        create_render_env_fn: Callable[[], Playable] | None = None,
        fps: float | None = None,
    ) -> None:
        num_episodes = check_integer("num_episodes", num_episodes)
        seed = check_integer("seed", seed, least=0)
        max_frames_per_episode = check_integer(
            "max_frames_per_episode", max_frames_per_episode, least=0
        )
        if not isinstance(exploration_type, ExplorationType):
            raise TypeError(
                f"exploration_type must be an ExplorationType, got {exploration_type!r}"
            )
        if fps is not None:
            check_positive(fps=fps)
        path = _check_video(video_path, create_render_env_fn)
        factory, *_ = pickle_factories(check_factory(create_env_fn))
        render_factory = None
        if create_render_env_fn is not None:
            render = check_factory(create_render_env_fn, "create_render_env_fn")
            render_factory, *_ = pickle_factories(render)
        self.policy = make_policy(policy, None)
        copy = pickle.loads(pickle_policy(self.policy)).eval()
        self._submitted: deque[_Submission] = deque()
        self._playing: _Submission | None = None
        self._best = -math.inf  # of what `poll` and `wait` have returned
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        fd = SharedMemory.create_fd()
        try:
            self._process = PlayerProcess(fd, None if path is None else partial_path(path))
            self._finalizer = weakref.finalize(self, self._process.shutdown)
            job = PlayerJob(
                factory, num_episodes, seed, render_factory, path, fps, max_frames_per_episode
            )
            try:
                with torchs_defaults():
                    self._start(fd, job, copy, exploration_type)
            except BaseException:
                self.shutdown()
                raise
        finally:
            os.close(fd)

    def _start(
        self,
        fd: int,
        job: PlayerJob,
        policy: nn.Module,
        exploration_type: ExplorationType,
    ) -> None:
        """Have the environments made, and lay out the memory that is shared."""
        _LOG.info("making %d environments to evaluate in", job.num_episodes)
        self._process.send(job)
        described: PlayerDescribed = self._process.receive("while it made the environments")
        description = described.description
        for warning in described.to_warn_of:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)

        size = description.num_envs  # of each batch
        count = ceil(job.num_episodes / size)

        def plan_for(description: GymDescription | TorchRLDescription) -> BatchPlan:
            if isinstance(policy, Fitted):
                policy.fit(description)
            return plan_batch(
                description,
                deepcopy(policy),
                count * size,
                exploration_type=exploration_type,
                max_frames_per_traj=job.max_frames_per_episode,
                compact_obs=True,
            )

        try:
            plan = plan_for(description)
        except PolicyError:
            if description.observations is not None:
                raise
            self._process.send(Observe())  # the policy refuses what isn't real
            seen: Observed = self._process.receive("while it observed an environment")
            plan = plan_for(replace(description, observations=seen.observations))
        parameters = tuple(field_of((n,), t, 0) for n, t in policy_tensors(self.policy))
        units = (size,) * count if size > 1 else ()
        layout = Layout(
            count * size, 1, 0, 0, plan.fields, parameters, units=units, groups=plan.groups
        )
        self._slots = Slots(SharedMemory(fd, layout))
        self._process.send(
            PlayerPlan(
                policy=pickle_policy(policy),
                layout=layout,
                inputs=tuple(key for key, _ in leaves(plan.examples)),
                outputs=plan.outputs,
                options=plan.options,
                exploration_type=exploration_type,
            )
        )
        self._process.receive("at the start")

    @property
    def pid(self) -> int:
        """Id of the process that plays."""
        return self._process.worker.pid

    def submit(self, step: int) -> None:
        """Ask for an evaluation of the policy as it is now; returns at once.

        The values of the parameters and buffers are copied. They wait for their turn in this
        process's memory, so an evaluation should take less time than passes between two calls.

        Args:
            step: for the result, such as the number of environment steps so far; sampled actions
                depend on it.

        Raises:
            RuntimeError: in a block of a `DelayedGradient`, where the policy is not the newest.
        """
        step = check_integer("step", step, least=0)
        refuse_within_block(self.policy, "submit was called")
        values = [tensor.to("cpu", copy=True) for _, tensor in policy_tensors(self.policy)]
        self._submitted.append(_Submission(step, values))
        self._advance(wait=False)

    def poll(self) -> list[Evaluation]:
        """The evaluations that have finished since the last call, as submitted; never waits."""
        self._advance(wait=False)
        finished = []
        while self._submitted and (evaluation := self._submitted[0].evaluation) is not None:
            parameters = self._by_name(self._submitted.popleft())
            self._best = max(self._best, evaluation.max)
            if evaluation.video_error:
                warnings.warn(
                    f"the best episode of the evaluation at step {evaluation.step} was played, but "
                    f"could not be filmed: {evaluation.video_error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            finished.append(replace(evaluation, parameters=parameters))
        return finished

    @property
    def pending(self) -> bool:
        """Whether there is something that was submitted and `poll` has not returned."""
        return bool(self._submitted)

    def wait(self) -> list[Evaluation]:
        """The evaluations that `poll` has not returned yet, all of them; waits for them."""
        self._advance(wait=True)
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """What was submitted and not returned yet, and the best return so far; doesn't wait."""
        pending = [
            {"step": each.step, "parameters": self._by_name(each)} for each in self._submitted
        ]
        return {"best": self._best, "pending": pending}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Submit again what was pending; for a new evaluator with the same arguments.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            TypeError, ValueError: if it is no such state, something submitted has not been returned
                yet, or the parameters aren't those of the policy. Nothing has been changed then.
        """
        check_state(state_dict, ("best", "pending"))
        if self._submitted:
            raise ValueError("load_state_dict: something submitted has not been returned yet")
        own = {name: tensor.shape for name, tensor in policy_tensors(self.policy)}
        submitted = []
        for pending in state_dict["pending"]:
            found = {name: tensor.shape for name, tensor in pending["parameters"].items()}
            if found != own:
                raise ValueError("the state is of an evaluator of another policy")
            values = [pending["parameters"][name].to("cpu", copy=True) for name in own]
            submitted.append(_Submission(pending["step"], values))
        self._submitted.extend(submitted)
        self._best = state_dict["best"]
        self._advance(wait=False)

    def shutdown(self) -> None:
        """End the process at once, and what it plays with it; may be called again."""
        self._process.shutdown()

    def _by_name(self, submission: _Submission) -> dict[str, Tensor]:
        names = [name for name, _ in policy_tensors(self.policy)]
        return dict(zip(names, submission.parameters, strict=True))

    def _advance(self, *, wait: bool) -> None:
        """Take what the process has finished and give it the next, until there is no more.

        It is given work when it has none, so that neither side ever waits for the other. The
        parameters lie in shared memory, which it doesn't read then, and messages are short.
        """
        while True:
            self._process.check()
            unfinished = [each for each in self._submitted if each.evaluation is None]
            if self._playing is None and unfinished:
                self._slots.write_parameters(0, unfinished[0].parameters)
                finished = [each.evaluation for each in self._submitted if each.evaluation]
                best = max([self._best, *(evaluation.max for evaluation in finished)])
                self._playing = unfinished[0]
                self._process.send(Play(self._playing.step, best))
            if not self._process.has_news(wait=wait and self._playing is not None):
                return
            if self._playing is None:
                self._process.receive("while it waited for work")  # raises: it has ended
            else:
                doing = f"in the evaluation at step {self._playing.step}"
                self._playing.evaluation = self._process.receive(doing)
                self._playing = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


@dataclass
class _Submission:
    """Parameters to evaluate, and the result once it is there."""

    step: int
    parameters: list[Tensor]
    evaluation: Evaluation | None = None


def _check_video(path: Path | str | None, create_env_fn: object) -> Path | None:
    if (path is None) != (create_env_fn is None):
        raise TypeError("a video needs both video_path and create_render_env_fn")
    if path is None:
        return None
    find_ffmpeg()  # raises now, not after hours of training
    path = Path(path).absolute()
    if path.suffix != ".mp4":
        raise ValueError(f"video_path must end in .mp4, got {str(path)!r}")
    return path
