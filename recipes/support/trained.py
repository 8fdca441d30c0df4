"""A run that was trained: its recipe and options, by its config.json, and the policy it has left.

A recipe offers ``Options``, ``train(options)``, and for this ``to_play(options)``: how environments
of its evaluations are made, and its policy, untrained. If it has them, ``train_env(options)`` is
how those of its training are made, and ``VIDEO_FPS`` are the frames per second of its films.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from support.checkpoints import read_saved
from support.configuration import config_of
from support.errors import RecipeError, explaining
from support.old_runs import newest_step
from support.options import RunOptions, from_json
from support.states import check_fits
from torchrl_hts.testing import spaces_of

__all__ = ["TrainedRun", "Values", "fit", "open_run", "read_values"]

_RECIPES = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class TrainedRun:
    """What a run's config.json says.

    Attributes:
        directory: its output directory.
        config: all that config.json holds.
        recipe: the module that trained it.
        options: of it.
    """

    directory: Path
    config: Mapping[str, Any]
    recipe: ModuleType
    options: RunOptions

    @property
    def title(self) -> str:
        """What was trained on what."""
        return f"{self.config['recipe']} on {self.options.task}"

    @property
    def video_fps(self) -> float | None:
        """Frames per second of its films; None for what the environment says."""
        return getattr(self.recipe, "VIDEO_FPS", None)

    def to_play(self) -> tuple[Callable[..., Any], nn.Module]:
        """How environments of its evaluations are made, and its policy, untrained.

        Raises:
            RecipeError, ValueError, ModuleNotFoundError, gymnasium.error.Error: if there is no such
                task here.
        """
        with explaining(self.options.task):
            self.options.check_task()
            return self.recipe.to_play(self.options)

    def training_env(self, *, render: bool = False) -> Callable[[], Any]:
        """How environments of the training are made; with frames to look at, if they are."""
        make_env = self.to_play()[0]
        if hasattr(self.recipe, "train_env"):
            make_env = self.recipe.train_env(self.options)
        return partial(make_env, render_mode="rgb_array") if render else make_env


@dataclass(frozen=True)
class Values:
    """A policy's values, as a run has left them.

    Attributes:
        file: that holds them.
        tensors: by name.
        step: environment steps that they were learned from; None where nobody wrote it down.
        mean_return: of the evaluation that found them to be the best; None for the newest.
    """

    file: Path
    tensors: Mapping[str, Tensor]
    step: int | None
    mean_return: float | None = None


def open_run(directory: Path, script: Path | None = None) -> TrainedRun:
    """The run in an output directory.

    Args:
        directory: the output directory.
        script: the recipe's file, if it is not one of these.

    Raises:
        RecipeError: if there is no run, it is damaged or of another version, or the spaces of its
            environments were others.
    """
    config, file = config_of(directory), directory / "config.json"
    name = config["recipe"]
    recipe = _module(name, script, file)
    try:
        options = from_json(recipe.Options, config["options"])
    except (ValueError, KeyError, TypeError, AttributeError, RecipeError) as error:
        what, or_else = name, ""
        if script is not None:
            what, or_else = script.name, ", or give the script that made it by --recipe"
        raise RecipeError(
            f"{file} doesn't fit this {what} ({error}): use the version that made it{or_else}"
        ) from error
    run = TrainedRun(directory, config, recipe, options)
    _refuse_other_spaces(run)
    return run


def _refuse_other_spaces(run: TrainedRun) -> None:
    """As far as config.json says which spaces the run's environments had: older ones don't."""
    saved = run.config.get("spaces")
    if not saved:
        return
    with explaining(run.options.task), closing(run.training_env()()) as env:
        here = spaces_of(env)
    for name, text in here.items():
        if saved.get(name, text) != text:
            raise RecipeError(
                f"{run.directory} is of environments whose {name} was {saved[name]}; here it is "
                f"{text}. Play them as they were, with the version of the environment that the "
                "run had"
            )


def _module(name: Any, script: Path | None, file: Path) -> ModuleType:
    """The recipe of a name, or of a file."""
    if script is not None:
        if script.suffix != ".py" or not script.exists():
            raise RecipeError(f"--recipe {script} is no script: give the .py file of the recipe")
        sys.path.insert(0, str(script.resolve().parent))
        name = script.stem
    elif not re.fullmatch(r"\w+", str(name)) or not (_RECIPES / f"{name}.py").exists():
        raise RecipeError(
            f"{file} is of the recipe {name!r}, which is not one of these: give its script by "
            "--recipe FILE, or use the version that made it"
        )
    recipe = importlib.import_module(name)
    for needed in ("Options", "train", "to_play"):
        if not hasattr(recipe, needed):
            raise RecipeError(
                f"the recipe {name} offers no {needed}, which this needs: see "
                "docs/how_to/play_and_replay.md"
            )
    return recipe


def read_values(directory: Path, which: str = "best") -> Values:
    """The values that a run has left.

    Args:
        directory: its output directory.
        which: "best" for those that evaluated best, or else the newest; "newest" for these.

    Raises:
        RecipeError: if there are none, or they can't be read.
    """
    best, newest = directory / "best.pt", directory / "policy.pt"
    other = ", or play best.pt by --policy best" if best.exists() else ""
    nor = "" if which == "newest" or best.exists() else ", and no best.pt"
    if which == "best" and best.exists():
        without = "put the file back as it was, or move it away to go without it"
        found = _read(best, without)
        try:
            return Values(best, dict(found["policy"]), int(found["step"]), float(found["return"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(best, without) from error
    if not newest.exists() and (other or newest_step(directory) is not None):
        raise RecipeError(
            f"there is no {newest}, which comes with the first checkpoint{nor}: put the file back "
            f"if it was there{other}"
        )
    if not newest.exists():
        raise RecipeError(
            f"there is no policy in {directory} yet: runs leave policy.pt with their first "
            "checkpoint, and best.pt with their first evaluation"
        )
    remedy = f"put the file back as it was{other}"
    return Values(newest, _read(newest, remedy), newest_step(directory))


def _read(file: Path, remedy: str) -> dict[str, Any]:
    try:
        return read_saved(file)
    except OSError as error:
        raise RecipeError(f"{file} can't be read: {error.strerror}") from error
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(file, remedy) from error


def _damaged(file: Path, remedy: str) -> RecipeError:
    return RecipeError(f"{file} is damaged, or of another version: {remedy}")


def fit(policy: nn.Module, values: Values) -> None:
    """Give a policy the values that a run has left.

    Raises:
        RecipeError: if they are not those of such a policy.
    """
    check_fits(policy, values.tensors, values.file)
    own = [name for name, value in policy.state_dict().items() if isinstance(value, Tensor)]
    policy.load_state_dict({name: values.tensors[name] for name in own}, strict=False)
