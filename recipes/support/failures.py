"""The failure that ended a run: met once more, with the environment's state just before it."""

from __future__ import annotations

import pdb
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tensordict import TensorDictBase

from support.checkpoints import save_atomically
from support.digests import Digests
from support.errors import RecipeError
from support.replays import Start, round_of, train_again
from support.stages import Key, Stage, stage_of
from support.trained import TrainedRun
from torchrl_hts import CannotSaveError, Failure, HTSCollector, InvalidValueError, WorkerError

__all__ = ["until_error"]

_OF_ENVIRONMENTS = (Exception, SystemExit)  # some engines call sys.exit

# How processes end, or stand still, in which an environment is stepped.
_OF_PROCESSES = (Failure.CRASHED, Failure.KILLED, Failure.EXITED, Failure.HUNG)


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
        self.next_round = start.round

    def begin(self, collector: HTSCollector) -> None:
        """Take in the collector, before its first batch."""
        self.collector = collector

    def __call__(self, collector: HTSCollector, batch: TensorDictBase) -> None:
        """Take in a batch."""
        round_ = round_of(batch)
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
        RecipeError: if none is to blame, or it is not known which one is.
    """
    stage = stage_of(run.training_env(), 0, run.options.seed)
    stage.close()
    watch = FailureWatch(start, stage.keys, digests)
    try:
        code = train_again(run, start, directory, watch, watch.begin)
    except WorkerError as error:
        print(error)
        _fail_again(run, start, watch, error, file, debug=debug)
        return 0
    ended = f"ended with exit code {code}" if code else "come to its end"
    print(f"the training has {ended}, without a failure of an environment")
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
    if error.worker_kind != "executor" or watch.collector is None:
        raise RecipeError("no environment has failed in its steps: there is no state to save")
    if not error.stepped:
        possible = ", ".join(map(str, error.env_indices))
        raise RecipeError(
            f"which environment has failed is not known, of {possible}: there is no state to save"
        )
    seed, env = run.options.seed, error.stepped[0]
    where = f"environment {env}, round {error.round}, step {error.step}"
    stage = stage_of(run.training_env(), env, seed)
    last = _play_until(stage, start, watch, where)
    saved = {"env": env, "seed": seed, "round": error.round, "step": error.step}
    action = last[stage.action_key]
    saved |= {"action": action[0] if len(stage.envs) == 1 else action, "error": str(error)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_atomically(file, {**saved, "environment": stage.save()})
    except CannotSaveError as refusal:
        print(f"{where}: its state can't be saved: {refusal}")
    except OSError as unwritable:
        raise RecipeError(
            f"{file} can't be written: {unwritable.strerror}; give another --save"
        ) from unwritable
    else:
        print(f"{where}: its state is in {file}")
    if error.failure in _OF_PROCESSES:
        print("the step that failed is not played here: it might end, or stop, this process too")
    else:
        _fail_here(stage, last, error, debug=debug)


def _play_until(stage: Stage, start: Start, watch: FailureWatch, where: str) -> TensorDictBase:
    """Play all that an environment has played but for the last step, which is returned.

    Raises:
        RecipeError: if it fails before.
    """
    *steps, last = watch.steps(stage.envs)
    try:
        start.put(stage)
    except _OF_ENVIRONMENTS as again:
        raise RecipeError(
            f"{where}: it fails here too, where it begins: {_said(again)}. There is no state to "
            "save"
        ) from again
    for step in steps:
        stage.step(step)
        stage.next_episode()
    return last


def _fail_here(stage: Stage, last: TensorDictBase, error: WorkerError, *, debug: bool) -> None:
    """Play the step that failed, and say what comes of it."""
    outside = "something outside of the environment decides"
    try:
        stage.fail(last)
    except _OF_ENVIRONMENTS as again:
        if isinstance(again, InvalidValueError):
            print(f"from there this is refused here too: {again}")
        else:
            print(f"from there it fails here too: {_said(again)}")
        if debug:
            pdb.post_mortem(again.__traceback__)
    else:
        if error.failure is Failure.INVALID:
            print(f"from there nothing is refused here: it was an info, or {outside}")
        else:
            print(f"from there it does not fail here: {outside}")


def _said(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
