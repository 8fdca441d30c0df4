"""Plays what a recipe has trained: returns on the screen, a window, a film, or an exported policy.

    python recipes/play.py RUN_DIR
    python recipes/play.py RUN_DIR --video episode.gif --sample --seed 7
    python recipes/play.py RUN_DIR --export policy.pt2

The run's config.json says which recipe it is of, and with which options: environment and network
are made anew from these. Without options the episodes are those of the run's own evaluations, so
that best.pt gives the very returns that evaluations.csv has for it, on the same kind of machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from support.configuration import config_of
from support.errors import ONCE_MORE, RecipeError, exit_with
from support.flags import integer, positive
from support.output_dir import check_files
from support.start import SCREENS, announce, parse_or_exit

OF_EPISODES = ("render", "episodes", "seed", "max_steps", "deterministic", "sample")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="output directory of a run")
    parser.add_argument(
        "--policy",
        choices=("best", "newest"),
        default="best",
        help="best.pt (default) or policy.pt",
    )
    parser.add_argument("--episodes", type=integer, help="how many (those of an evaluation)")
    parser.add_argument("--seed", type=integer, help="of the episodes (that of the run)")
    parser.add_argument(
        "--max-steps", type=integer, help="cut episodes off after so many; 0: never"
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--deterministic", action="store_true", help="play the likeliest actions")
    actions.add_argument("--sample", action="store_true", help="sample the actions")
    parser.add_argument(
        "--render", choices=("human",), help="show a window, and play one episode after the other"
    )
    parser.add_argument("--video", type=Path, help="film the best episode: an .mp4 or .gif file")
    parser.add_argument("--fps", type=positive, help="frames per second of the film")
    parser.add_argument(
        "--export", type=Path, help="write the policy's likeliest actions as a .pt2 (torch.export)"
    )
    parser.add_argument("--recipe", type=Path, help="the recipe's script, if it is your own")
    options = parser.parse_args(arguments)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse what makes no sense, before torch is imported."""
    config_of(options.run_dir)
    for name, least in (("episodes", 1), ("seed", 0), ("max_steps", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise RecipeError(f"--{flag} must be at least {least}, and is {value}")
    for flag, file, endings in (
        ("--video", options.video, (".mp4", ".gif")),
        ("--export", options.export, (".pt2",)),
    ):
        if file is not None and file.suffix not in endings:
            raise RecipeError(f"{flag} must end in {' or '.join(endings)}, and is {file}")
    check_files(video=options.video, export=options.export)
    if options.render and sys.platform == "linux" and not any(map(os.environ.get, SCREENS)):
        raise RecipeError("there is no screen here (no DISPLAY): film an episode with --video FILE")
    if options.export:
        others = ("video", "fps", *OF_EPISODES)
        if idle := [name for name in others if is_given(options, name)]:
            raise RecipeError(
                f"--export plays nothing: leave --{idle[0].replace('_', '-')} out, or --export"
            )
    if options.render and options.video:
        raise RecipeError(
            "--render human plays on the screen alone: leave --video out, or --render"
        )
    if options.fps and not options.video:
        raise RecipeError("--fps is the speed of a film: leave it out, or give --video FILE")


def is_given(options: argparse.Namespace, name: str) -> bool:
    """Whether the command line has an option, of whatever value."""
    value = getattr(options, name)
    return value is not None and value is not False


def main(options: argparse.Namespace) -> int:
    """Plays, or exports; returns the exit code."""
    from support.exporting import export
    from support.playing import play
    from support.states import why_other_bits
    from support.trained import fit, open_run, read_values

    from torchrl_hts import keep_servers

    with keep_servers():
        run = open_run(options.run_dir, options.recipe)
        values = read_values(run.directory, options.policy)
        make_env, policy = run.to_play()
        fit(policy, values)
        step = "" if values.step is None else f", after {values.step:,} steps"
        print(f"{run.title}: {values.file.name}{step}", flush=True)
        if options.export:
            count, states = export(policy, make_env, options.export)
            print(f"{options.export} gives the same actions on {count} observations")
            for name, shape in states.items():
                print(f"its memory begins with states[{name!r}] = zeros of [B, {str(shape)[1:]}")
            return 0
        returns: list[float] = []
        for evaluation in play(options, run, values, make_env, policy):
            for gained, length in zip(evaluation.returns, evaluation.lengths, strict=True):
                returns.append(gained)
                print(f"episode {len(returns)}: return {gained:.1f}, {length:,} steps", flush=True)
    print(
        f"mean return {fmean(returns):.1f} ({min(returns):.1f} to {max(returns):.1f}), "
        f"deviation {pstdev(returns):.1f}"
    )
    if options.video:
        print(f"the best episode is in {options.video}")
    if values.mean_return is not None and not any(is_given(options, name) for name in OF_EPISODES):
        if fmean(returns) == values.mean_return:
            print("bit for bit what the run's own evaluation gave")
        else:
            # A resumed run plays what had been asked for before.
            why = why_other_bits(run.config, (values.step or 0) - 1)
            print(f"the run's own evaluation gave {values.mean_return:.1f}: {why}")
    return 0


if __name__ == "__main__":
    OPTIONS = parse_or_exit(parse)
    announce("importing torch and torchrl")
    exit_with(lambda: main(OPTIONS), ONCE_MORE)
