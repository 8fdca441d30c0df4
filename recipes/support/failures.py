"""The failure that ended a run: met once more, with the environment's state just before it."""

from __future__ import annotations

import pdb
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tensordict import TensorDictBase

from support.digests import Digests
from support.errors import RecipeError
from support.replays import Start, round_of, train_again
from support.stages import Key, stage_of
from support.trained import TrainedRun
from torchrl_hts import CannotSaveError, HTSCollector, WorkerError

__all__ = ["until_error"]


class FailureWatch:
    """Keeps what all environments do until one of them fails.

    Args:
        start: what the run goes on from.
        keys: of a batch, that steps are played again by.
        digests: that are compared on the way.

    Attributes:
        collector: the run's, once it has begun.
        next_round: the one after the last batch.
    """

    def __init__(self, start: Start, keys: Sequence[Key], digests: Digests) -> None:
        self._start, self._keys, self._digests = start, keys, digests
        self._rounds: list[TensorDictBase] = []
        self.collector: HTSCollector | None = None
        self.next_round = 0

    def __call__(self, collector: HTSCollector, batch: TensorDictBase) -> None:
        """Take in a batch."""
        self.collector, round_ = collector, round_of(batch)
        self.next_round = round_ + 1
        self._digests.check_parameters(round_ * collector.frames_per_batch, collector.policy)
        if round_ >= self._start.first:
            self._rounds.append(batch.select(*self._keys).cpu().clone())

    def steps(self, envs: range) -> Iterator[TensorDictBase]:
        """The steps ``[k]`` of environments from the start's on; in the last one has failed."""
        for batch in self._rounds:
            yield from batch[envs.start : envs.stop].unbind(1)
        if self.collector is not None:
            ahead = torch.stack([self.collector.steps_ahead(env) for env in envs])
            known = max(0, self._start.first - self.next_round) * self.collector.sync_interval
            kept = [key for key in self._keys if key in ahead.keys(True, True)]
            yield from ahead[:, known:].select(*kept).unbind(1)


def until_error(
    run: TrainedRun,
    start: Start,
    digests: Digests,
    directory: Path,
    file: Path,
    *,
    debug: bool = False,
) -> int:
    """Train until an environment fails, and save the state before it; returns the exit code.

    Args:
        run: the run.
        start: what it goes on from.
        digests: that are compared on the way.
        directory: for the files of the run that is had once more.
        file: for the state.
        debug: whether to debug the step that fails.

    Raises:
        RecipeError: if no environment is to blame.
    """
    stage = stage_of(run.training_env(), 0, run.options.seed)
    stage.close()
    watch = FailureWatch(start, stage.keys, digests)
    try:
        code = train_again(run, start, directory, watch)
    except WorkerError as error:
        print(error)
        _fail_again(run, start, watch, error, file, debug=debug)
        return 0
    print("the training has come to its end without a failure of an environment")
    return code or 1


def _fail_again(
    run: TrainedRun,
    start: Start,
    watch: FailureWatch,
    error: WorkerError,
    file: Path,
    *,
    debug: bool,
) -> None:
    """Play what the environment has played, save it before the last step, and let that fail."""
    if error.worker_kind != "executor" or error.round is None or error.step is None:
        raise RecipeError(
            "no single environment is known to be to blame: there is no state to save"
        )
    seed, env = run.options.seed, error.env_indices[0]
    stage = stage_of(run.training_env(), env, seed)
    *steps, last = watch.steps(stage.envs)
    start.put(stage)
    for step in steps:
        stage.step(step)
        stage.next_episode()
    saved = {"env": env, "seed": seed, "round": error.round, "step": error.step}
    action = last[stage.action_key]
    saved |= {"action": action[0] if len(stage.envs) == 1 else action, "error": str(error)}
    where = f"environment {env}, round {error.round}, step {error.step}"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save({**saved, "environment": stage.save()}, file)
    except CannotSaveError as refusal:
        print(f"{where}: its state can't be saved: {refusal}")
    else:
        print(f"{where}: its state is in {file}")
    try:
        stage.fail(last)
    except Exception as again:
        print(f"from there it fails here too: {traceback.format_exception_only(again)[-1].strip()}")
        if debug:
            pdb.post_mortem(again.__traceback__)
    else:
        print("from there it does not fail here: something outside of the environment decides")
