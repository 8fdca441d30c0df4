"""The study of `optuna_sweep.py`: which trials there were, which goes on, and their picture."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna import Study, Trial
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from support.checkpoints import write_atomically
from support.errors import RecipeError
from support.sweeps import Sweep

__all__ = ["best_of", "draw", "explaining_study", "is_complete", "open_study", "run_of"]


@contextlib.contextmanager
def explaining_study(directory: Path) -> Iterator[None]:
    """Say in one sentence that the study in a directory can't be read or written.

    Raises:
        RecipeError: in the place of what the database raises.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        inner = error.__cause__ if isinstance(error, StorageInternalError) else error
        why = str(getattr(inner, "orig", None) or inner)
        raise RecipeError(
            f"{directory / 'study.db'} can't be read or written: {why}. Make room if the disk is "
            "full, or put the file back as it was; then give the same command again"
        ) from error


def open_study(directory: Path, sweep: Sweep, arguments: Sequence[str], seed: int) -> Study:
    """Begin a study, or go on with the one in a directory, first with the runs that were under way.

    Args:
        directory: of the sweep; the study is its study.db.
        sweep: what is drawn from what.
        arguments: options of the recipe that all trials have.
        seed: of what is drawn.

    Raises:
        RecipeError: if the study there is of something else, or doesn't know a run that is there.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="sweep",
        # Not by its path in the URL: versions of SQLAlchemy read ?, # and % there in several ways.
        storage=optuna.storages.RDBStorage(
            "sqlite:///study.db",
            engine_kwargs={"creator": partial(sqlite3.connect, directory.absolute() / "study.db")},
        ),
        direction=sweep.direction,
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=sweep.warmup),
        load_if_exists=True,
    )
    # One that began with the same seed again would draw what has been drawn before.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    asked = {
        "program": str(sweep.program),
        "metric": sweep.metric,
        "fixed": sweep.fixed,
        "space": {name: repr(each) for name, each in sweep.space.items()},
        "arguments": list(arguments),
    }
    before = study.user_attrs.get("asked", asked)
    if other := _first_difference(before, asked):
        raise RecipeError(
            f"{directory} holds another sweep, with {other}: give what it had, or another "
            "--output-dir"
        )
    _refuse_strange_runs(study, directory)
    study.set_user_attr("asked", asked)
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.enqueue_trial(trial.params, user_attrs={"run": run_of(trial)})
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def _first_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What is other than it was, with both values, within dictionaries too; "" if nothing is."""
    for name in [*now, *(name for name in before if name not in now)]:
        if name not in before:
            return f"no {name}"
        if name not in now:
            return f"{name} {json.dumps(before[name])}"
        was, is_ = before[name], now[name]
        if isinstance(was, dict) and isinstance(is_, dict):
            if within := _first_difference(was, is_):
                return f"{name}: {within}"
        elif json.dumps(was) != json.dumps(is_):
            return f"{name} {json.dumps(was)} in place of {json.dumps(is_)}"
    return ""


def _refuse_strange_runs(study: Study, directory: Path) -> None:
    """Refuse runs that no trial of the study has begun: a new one would go on with them."""
    begun = {
        run_of(trial)
        for trial in study.trials
        if trial.state != TrialState.WAITING or "run" in trial.user_attrs
    }
    names = {path.name for path in directory.iterdir() if path.is_dir()}
    for name in sorted(names - begun):
        if re.fullmatch(r"trial-\d{4,}", name):
            raise RecipeError(
                f"{directory / 'study.db'} knows no run {name}, which is in {directory}: put back "
                "the study.db that its runs belong to, move them away, or give another "
                "--output-dir"
            )


def run_of(trial: Trial | FrozenTrial) -> str:
    """The name of a trial's run: its own, or that of an interrupted trial that it goes on with."""
    return str(trial.user_attrs.get("run", f"trial-{trial.number:04d}"))


def is_complete(study: Study, trials: int) -> bool:
    """Whether so many runs have come to an end."""
    waiting = study.get_trials(states=[TrialState.WAITING])
    return not waiting and len({run_of(trial) for trial in study.trials}) >= trials


def best_of(study: Study, directory: Path) -> FrozenTrial:
    """The best of a study's trials.

    Raises:
        RecipeError: if all have failed.
    """
    if study.get_trials(states=[TrialState.COMPLETE]):
        return study.best_trial
    count = len({run_of(trial) for trial in study.trials})
    raise RecipeError(
        f"all {count} trials have failed; {directory}/trial-*.log say why. Raise --trials, or "
        "narrow the bounds in the sweep file and give another --output-dir"
    )


def draw(study: Study, metric: str, file: Path) -> None:
    """Draw each trial's values as they came, and the last of them against each parameter."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    trials = [trial for trial in study.trials if trial.intermediate_values]
    names = sorted({name for trial in trials for name in trial.params})
    num_rows = -(-(1 + len(names)) // 3)
    figure = Figure(figsize=(10, 3 * num_rows), layout="constrained")
    first, *others = figure.subplots(num_rows, 3, squeeze=False, sharey=True).flatten()
    for unused in others[len(names) :]:
        unused.remove()
    first.set(xlabel="number of the evaluation", ylabel=metric)
    for axes, name in zip(others, names, strict=False):
        axes.set_xlabel(name)
        if any(getattr(trial.distributions.get(name), "log", False) for trial in trials):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.tick_params(axis="x", labelrotation=30)
        else:
            axes.locator_params(axis="x", nbins=4)
    ended = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    best = study.best_trial.number if ended else None
    styles = {
        "the best": {"color": "tab:orange", "marker": "o", "zorder": 4},
        "to its end": {"color": "tab:blue", "marker": "o", "zorder": 3},
        "stopped": {"color": "0.6", "marker": "x", "zorder": 2},
    }
    for trial in trials:
        whole = "the best" if trial.number == best else "to its end"
        style: dict[str, Any] = styles[whole if trial in ended else "stopped"]
        numbers, values = zip(*sorted(trial.intermediate_values.items()), strict=True)
        first.plot(numbers, values, **{**style, "marker": ""})
        for axes, name in zip(others, names, strict=False):
            axes.plot(trial.params.get(name), values[-1], **style)
    lines = [first.plot([], [], label=label, **style)[0] for label, style in styles.items()]
    figure.legend(handles=lines, loc="outside upper center", ncols=3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format=file.suffix[1:])
    write_atomically(file, picture.getbuffer())
