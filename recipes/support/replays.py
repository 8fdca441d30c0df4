"""A training run once more, from one of its checkpoints on, in a directory of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from support.checkpoints import Checkpoints, of_another_version
from support.errors import InterruptedTwice, RecipeError, interrupt_before
from support.options import RunOptions
from support.saves import ON_BATCH, ON_BEGIN
from support.stages import Stage
from support.trained import TrainedRun
from torchrl_hts import HTSCollector

__all__ = [
    "Behaviour",
    "Enough",
    "Start",
    "find_start",
    "round_of",
    "train_again",
]

Watch = Callable[[HTSCollector, TensorDictBase], None]


class Enough(Exception):  # noqa: N818  it is no error
    """All is known that was to be found out; ends the training."""


@dataclass(frozen=True)
class Start:
    """What a replay goes on from.

    Attributes:
        checkpoint: the file; None for the run's beginning.
        step: environment steps that it has learned from.
        round: the round of the next batch.
        first: the first round after the environments' states.
        why: how it comes that there is no newer one, for people; "" where it is as it should be.
        environments: the states, one of each batch of environments that step as one.
        behaviour: the parameters that the next rounds act with.
        loses: whether checkpoints lose the environments, so that a resumed run has begun new
            episodes.
    """

    checkpoint: Path | None = None
    step: int = 0
    round: int = 0
    first: int = 0
    why: str = ""
    environments: Sequence[Tensor] = ()
    behaviour: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    loses: bool = False

    def put(self, stage: Stage) -> None:
        """Put environments to where round `first` begins for them."""
        unit = stage.envs.start // len(stage.envs)
        stage.begin(None if self.checkpoint is None else self.environments[unit])


def find_start(run: TrainedRun, before: int | None = None, *, from_start: bool = False) -> Start:
    """The newest checkpoint whose environments are before a round.

    Args:
        run: the run.
        before: the round; None for the newest checkpoint there is.
        from_start: begin with the run's beginning.

    Raises:
        RecipeError: if a checkpoint is damaged, or of learners whose bits one alone can't have.
    """
    checkpoints = Checkpoints(run.directory / "checkpoints", 1)
    paths = checkpoints.paths()
    for path in reversed(paths):
        state = checkpoints.load(path) or {}
        _check_learners(run, state)
        if from_start:
            return Start()
        try:
            start = _start_from(checkpoints, path, state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise of_another_version(path, error) from error
        if start.checkpoint is None or before is None or start.first <= before:
            return start
    if from_start:
        return Start()
    if not paths:
        return Start(why="the run has left no checkpoint")
    return Start(
        why=f"the run kept {run.options.keep_checkpoints} checkpoints (--keep-checkpoints), all "
        "of them later"
    )


def _check_learners(run: TrainedRun, state: Mapping[str, Any]) -> None:
    if (learners := state.get("learners", 1)) > 1 and run.options.shards is None:
        raise RecipeError(
            f"this run was trained by {learners} learners without --shards: one alone gets other "
            "bits, so it can't be replayed here"
        )


def _start_from(checkpoints: Checkpoints, path: Path, state: Mapping[str, Any]) -> Start:
    parts = [part["collector"] for part in checkpoints.parts_of_learners(path, state, 0, 1)]
    lost = [part["why_environments_are_lost"] for part in parts]
    if any(lost):
        why = f"checkpoints can't hold the environments ({next(filter(None, lost))})"
        return Start(why=why, loses=True)
    return Start(
        path,
        int(state["step"]),
        parts[0]["round"],
        parts[0]["round"] + len(parts[0]["collected"]),
        "",
        [saved for part in parts for saved in part["environments"] or ()],
        parts[0]["behaviour_parameters"],
    )


def train_again(
    run: TrainedRun,
    start: Start,
    directory: Path,
    watch: Watch,
    begin: Callable[[HTSCollector], None] | None = None,
) -> int:
    """Goes on with a run in another directory, until a watch has seen enough.

    Args:
        run: the run, whose own files stay as they are.
        start: what to go on from.
        directory: that does not exist yet.
        watch: called with the collector and each batch, before it is learned from.
        begin: called with the collector before its first batch.

    Returns:
        The recipe's exit code; 0 if the watch has ended it.
    """
    directory.mkdir(parents=True)
    for name in ("config.json", "metrics.csv", "evaluations.csv"):
        if (run.directory / name).exists():
            shutil.copy(run.directory / name, directory / name)
    if start.checkpoint is not None:
        (directory / "checkpoints").mkdir()
        for file in start.checkpoint.parent.glob(f"{start.checkpoint.stem}.*"):
            if not file.name.endswith(".tmp"):
                shutil.copy(file, directory / "checkpoints" / file.name)
    ON_BATCH[:], ON_BEGIN[:] = [watch], [] if begin is None else [begin]
    try:
        return run.recipe.train(_options(run.options, directory))
    except Enough:
        return 0
    except InterruptedTwice as interrupt:  # whose words are of a run that is to be saved
        raise KeyboardInterrupt from interrupt
    except Exception as error:
        if interrupt_before(error) is not None:
            raise KeyboardInterrupt from error
        if not isinstance(error, RecipeError):
            raise
        # Of the copy: what is to be mended is the run's own.
        raise RecipeError(str(error).replace(str(directory), str(run.directory))) from error
    finally:
        ON_BATCH.clear()
        ON_BEGIN.clear()


def _options(options: RunOptions, directory: Path) -> RunOptions:
    """Of the same run, in another directory, that tells nobody and demands nothing."""
    changes: dict[str, Any] = {"resume": directory, "output_dir": None, "ignore_versions": True}
    changes |= {"logger": "none", "wandb_mode": None, "checkpoint_interval": 0}
    if any(entry.name == "require_return" for entry in fields(options)):
        changes["require_return"] = None
    return replace(options, **changes)


class Behaviour:
    """The parameters that the actions of each batch were taken with.

    The newest parameters, when batch j is there and not learned from, are those of round j + lag.
    """

    def __init__(self, start: Start) -> None:
        self._known: dict[int, Mapping[str, Tensor]] = dict(start.behaviour)

    def of(self, collector: HTSCollector, batch: TensorDictBase) -> Mapping[str, Tensor]:
        """Those of a batch; to be asked for each, in order."""
        round_, newest = round_of(batch), copied(collector.policy)
        if not self._known:
            self._known = dict.fromkeys(range(round_, round_ + collector.lag), newest)
        self._known[round_ + collector.lag] = newest
        return self._known.pop(round_)


def round_of(batch: TensorDictBase) -> int:
    """The round that a batch is of."""
    return int(batch["policy_version"].reshape(-1)[0])


def copied(policy: nn.Module) -> dict[str, Tensor]:
    """A policy's parameters and buffers, as they are now."""
    return {
        name: value.detach().to("cpu", copy=True)
        for name, value in policy.state_dict().items()
        if isinstance(value, Tensor)
    }
