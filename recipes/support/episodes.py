"""An episode of a run that is had once more: found in its batches, played again and filmed."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDictBase
from torch import nn

from support.choices import Choices, choices
from support.digests import Digests
from support.errors import RecipeError
from support.films import try_out
from support.replays import Behaviour, Enough, Start, round_of, train_again
from support.shown_choices import Film
from support.stages import Stage, stage_of
from support.trained import TrainedRun
from torchrl_hts import HTSCollector

__all__ = ["one_episode"]

_TRAJECTORY = ("collector", "traj_ids")


class EpisodeWatch:
    """Keeps what an environment does until the episode that it plays in a round has ended.

    Args:
        start: what the run goes on from.
        round_: in which the episode is played, at the round's first step.
        env: number of the environment.
        stage: where it will be played again.
        policy: like that of the run.
        digests: that are compared on the way.

    Attributes:
        rounds: the steps of all that step as one with it ``[k, T]``, round by round, from the
            start's environments on.
        chosen_from: what the policy chose from in each of these rounds.
        trajectory: id of the episode; None until its round has come.
    """

    def __init__(
        self,
        start: Start,
        round_: int,
        env: int,
        stage: Stage,
        policy: nn.Module,
        digests: Digests,
    ) -> None:
        self._start, self._round, self.env = start, round_, env
        self._envs, self._keys = slice(stage.envs.start, stage.envs.stop), stage.keys
        self.own = env - stage.envs.start  # its row of `rounds`
        self._policy, self._digests = policy, digests
        self._behaviour = Behaviour(start)
        self._is_over = False
        self.rounds: list[TensorDictBase] = []
        self.chosen_from: list[Choices] = []
        self.trajectory: int | None = None

    def __call__(self, collector: HTSCollector, batch: TensorDictBase) -> None:
        """Take in a batch.

        Raises:
            RecipeError: if the run has no such round, or no such environment.
            Enough: if the episode has ended, and something of the run was compared since.
        """
        for name, plural, value, end in (
            ("round", "rounds", self._round, len(collector)),
            ("env", "environments", self.env, collector.num_envs),
        ):
            if value >= end:
                raise RecipeError(f"--{name} {value}: the run has {plural} 0 to {end - 1}")
        round_, values = round_of(batch), self._behaviour.of(collector, batch)
        step = round_ * collector.frames_per_batch  # that have been learned from
        self._digests.check_parameters(step, collector.policy)
        if self._is_over:
            self._end_at(step)
            return
        if round_ < self._start.first:
            return
        self.rounds.append(batch[self._envs].select(*self._keys).detach().cpu().clone())
        row = batch[self.env].detach().cpu()
        self.chosen_from.append(choices(self._policy, values, row))
        trajectories = row[_TRAJECTORY].reshape(-1)
        if round_ == self._round:
            self.trajectory = int(trajectories[0])
        if self.trajectory is not None:
            others = trajectories != self.trajectory
            ended = row["next", "done"].reshape(-1) & ~others
            self._is_over = bool(ended.any() or (round_ > self._round and others.any()))
            if self._is_over:
                self._end_at(step)

    @property
    def may_have_begun_before(self) -> bool:
        """Whether the episode was under way, or began, where the checkpoint has the environment."""
        first = int(self.rounds[0][self.own, 0][_TRAJECTORY])
        return self._start.checkpoint is not None and first == self.trajectory

    def _end_at(self, step: int) -> None:
        """Go on as far as the run's next row of metrics, by which this one is known to be it."""
        if not self._digests.is_before_a_row(step):
            raise Enough


@dataclass(frozen=True)
class Played:
    """An episode that was played again.

    Attributes:
        length: its steps that are known.
        gained: the sum of their rewards.
        ended: whether it has ended.
        began_before: whether it may have begun before what was played.
    """

    length: int
    gained: float
    ended: bool
    began_before: bool


def play_again(stage: Stage, watch: EpisodeWatch, film: Film | None, titles: list[str]) -> Played:
    """Play what an environment has played, and film the episode that was watched for.

    Args:
        stage: of the environment, at the start of the watch's first round.
        watch: that has seen the episode.
        film: takes its frames; None for none.
        titles: lines beside each frame.

    Raises:
        RecipeError: if the environment plays in another way.
    """
    length, gained, rewards = 0, 0.0, ""
    begun_before = watch.may_have_begun_before
    since = "since the checkpoint" if begun_before else "of the episode"
    for rows, chosen_from in zip(watch.rounds, watch.chosen_from, strict=True):
        for t, steps in enumerate(rows.unbind(1)):
            step = steps[watch.own]
            watched = int(step[_TRAJECTORY]) == watch.trajectory
            if watched and film is not None:
                chosen = {name: values[t] for name, values in chosen_from.items()}
                lines = [*titles, f"step {length:,} {since}", rewards]
                film.add(stage, watch.env, lines, chosen, step[stage.action_key])
            stage.step(steps)
            if watched:
                length, gained = length + 1, gained + step["next", "reward"].item()
                rewards = f"reward {step['next', 'reward'].item():g}, {gained:g} so far"
                if step["next", "done"]:
                    if film is not None and stage.shows_ends:
                        lines = [*titles, "end of the episode", rewards]
                        film.add(stage, watch.env, lines, {}, None)
                    return Played(length, gained, True, begun_before)
            stage.next_episode()
    return Played(length, gained, False, begun_before)


def one_episode(
    options: argparse.Namespace, run: TrainedRun, start: Start, digests: Digests, directory: Path
) -> int:
    """Train until an episode has ended, and play it again; returns the exit code."""
    with contextlib.ExitStack() as closing:
        film = None
        if options.video:  # refused now, not after the training
            film = closing.enter_context(Film(options.video, options.fps or run.video_fps))
            try_out(run.training_env(), "rgb_array")
        make_env = run.training_env(render=film is not None)
        stage = stage_of(make_env, options.env, run.options.seed)
        closing.callback(stage.close)
        policy = run.to_play()[1]
        watch = EpisodeWatch(start, options.round, options.env, stage, policy, digests)
        code = train_again(run, start, directory, watch)
        if code:
            return code
        if watch.trajectory is None:  # no batch has come: the checkpoint is of the run's end
            raise RecipeError(f"--round {options.round}: the run has rounds 0 to {start.round - 1}")
        start.put(stage)
        titles = [run.title, f"round {options.round:,}, environment {options.env}"]
        played = play_again(stage, watch, film, titles)
    print(
        f"environment {options.env}, round {options.round:,}: an episode of "
        f"{played.length:,} steps, return {played.gained:g}"
        + ("" if played.ended else ", that the end of the run has cut off")
        + (", seen from the checkpoint on" if played.began_before else "")
    )
    if options.video:
        print(f"it is in {options.video}")
    return 0
