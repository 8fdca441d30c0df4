"""A sweep over a recipe's options with Optuna, on this machine, by a sweep file of W&B's.

    python recipes/optuna_sweep.py --output-dir runs/sweep recipes/sweeps/ppo_cartpole.yaml

Everything after the file is an option of the recipe, for all trials. Each trial is a run of the
recipe in OUTPUT_DIR. Its evaluations are told to Optuna as they come, and a trial whose best is
below the median of those before it is stopped. Its run is saved, and --resume goes on with it.

Ctrl-C ends the sweep, and the same command goes on with it: with the run that was under way too,
from its checkpoint. Needs the extra 'optuna'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from support.errors import ONCE_MORE, RecipeError, exit_with
from support.flags import counted, integer
from support.output_dir import claim_output_dir
from support.signals import StopSignals
from support.start import parse_or_exit
from support.sweep_trials import FailedError, run_trial
from support.sweeps import Sweep, read_sweep


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=counted, default=30, help="runs in all (30)")
    parser.add_argument("--sweep-seed", type=integer, default=0, help="of what is tried (0)")
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="of the sweep; before its file"
    )
    parser.add_argument("sweep", type=Path, help="the sweep file, such as those in recipes/sweeps")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the recipe")
    rest.required = False
    return parser.parse_args()


def refuse_drawn(arguments: list[str], sweep: Sweep) -> None:
    """Refuse options of the recipe that would take the place of what each trial has of its own."""
    names = [word.partition("=")[0].removeprefix("--") for word in arguments if word[:2] == "--"]
    for name in ("output-dir", "resume"):
        if name in {*names, *sweep.fixed, *sweep.space}:
            raise RecipeError(
                "each trial has a directory of its own, in that of the sweep: leave "
                f"--{name} out of the recipe's options"
            )
    for name in (name.removeprefix("no-") for name in names):
        if name in sweep.space:
            raise RecipeError(
                f"--{name} is drawn anew for each trial: leave it out, or give it one value in the "
                "sweep file"
            )


def main(options: argparse.Namespace) -> int:
    """Plays trials until there are enough; returns the exit code."""
    try:
        from optuna.trial import TrialState
        from support.sweep_study import (
            best_of,
            draw,
            explaining_study,
            is_complete,
            open_study,
            run_of,
        )

        sweep = read_sweep(options.sweep)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        raise RecipeError(
            f"this needs the package {name}: pip install 'torchrl_hts[optuna]'"
        ) from error
    refuse_drawn(options.arguments, sweep)
    # The first is noted: what a handler raises is lost where Python is just in a __del__.
    signals = StopSignals(tells=lambda: False, has_saved=lambda: True)
    signals.take()
    folder = options.output_dir
    with claim_output_dir(folder, holds_own_run=True), explaining_study(folder):
        study = open_study(folder, sweep, options.arguments, options.sweep_seed)
        while not is_complete(study, options.trials):
            if signals.number is not None:
                print("stopped; the same command goes on", flush=True)
                return 130
            trial = study.ask(dict(sweep.space))
            run = run_of(trial)
            try:
                value = run_trial(trial, sweep, folder / run, options.arguments, signals)
            except FailedError as error:
                print(f"{run} has failed: {error}", flush=True)
                study.tell(trial, state=TrialState.FAIL)
                continue
            except KeyboardInterrupt:
                print(f"stopped in {run}; the same command goes on", flush=True)
                return 130
            told = study.tell(trial, value, TrialState.PRUNED if value is None else None)
            draw(study, sweep.metric, folder / "sweep.png")
            how = "stopped at" if value is None else "ended at"
            last = told.intermediate_values[max(told.intermediate_values)]
            drawn = ", ".join(f"{name} {value}" for name, value in told.params.items())
            print(f"{run} {how} {last:.1f} with {drawn}", flush=True)
        best = best_of(study, folder)
        print(f"the best of {options.trials}: {folder / run_of(best)} with {best.value:.1f}")
    return 0


if __name__ == "__main__":
    given = parse_or_exit(parse)
    exit_with(lambda: main(given), ONCE_MORE)
