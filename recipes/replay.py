"""Any moment of a training run once more: an episode that is filmed, or the failure that ended it.

    python recipes/replay.py RUN_DIR --round 1234 --env 7 --video episode.mp4
    python recipes/replay.py RUN_DIR --until-error

Every action of a run depends on parameters, observation, seed, environment, round and step alone.
So the recipe is run once more, from the newest checkpoint that is early enough, in a directory of
its own: the run's files stay as they are. What it writes down on the way is compared with what the
run has written down, rows of metrics.csv and parameters. If they differ it says so, and why.

Meanwhile the actions of the environment are kept. When the training is where it is wanted, another
environment is put into the state that the checkpoint has of it, and plays the same actions. That
one is filmed, with the rewards and with what the policy chose from: the whole episode that it plays
in the first step of the round. Its rewards must be the same.

A run keeps --keep-checkpoints of its checkpoints, 3 by default. For a round before them all, and
for environments whose states can't be saved, the run is had once more from its beginning, which
takes as long as it took. An episode that had begun before the checkpoint is filmed from there on;
--from-start films it whole.

Environments that step as one, such as VMAS's, are played again together.

With --until-error the run goes on until an environment fails. The state that it had just before is
saved for `torchrl_hts.EnvironmentReplay`, with the action that it fails at. That step is played
once more, unless it has ended its process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.configuration import config_of
from support.errors import ONCE_MORE, RecipeError, exit_with
from support.flags import integer, positive
from support.output_dir import check_files
from support.start import announce, parse_or_exit


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="output directory of a run")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--round", type=integer, help="the round, from 0 on: its batch's number")
    wanted.add_argument("--until-error", action="store_true", help="until an environment fails")
    parser.add_argument("--env", type=integer, help="the environment's number (0)")
    parser.add_argument("--video", type=Path, help="film the episode: an .mp4 or .gif file")
    parser.add_argument("--fps", type=positive, help="frames per second of the film")
    parser.add_argument(
        "--from-start", action="store_true", help="go on from no checkpoint, but from the beginning"
    )
    parser.add_argument(
        "--save", type=Path, help="where the state before an error goes (RUN_DIR's name-error.pt)"
    )
    parser.add_argument("--pdb", action="store_true", help="then debug the step that fails")
    parser.add_argument("--recipe", type=Path, help="the recipe's script, if it is your own")
    options = parser.parse_args(arguments)
    num_envs = config_of(options.run_dir)["options"].get("num_envs")
    for flag, value in (("--round", options.round), ("--env", options.env)):
        if value is not None and value < 0:
            raise RecipeError(f"{flag} must be at least 0, and is {value}")
    if options.video and options.video.suffix not in (".mp4", ".gif"):
        raise RecipeError(f"--video must end in .mp4 or .gif, and is {options.video}")
    for flag, film in (("--video", options.video), ("--fps", options.fps)):
        if film and options.until_error:
            raise RecipeError(f"--until-error makes no film: leave {flag} out, or give a --round")
    if options.fps and not options.video:
        raise RecipeError("--fps is the speed of a film: leave it out, or give --video FILE")
    if options.env is not None and options.until_error:
        raise RecipeError("--until-error finds the environment itself: leave --env out")
    for flag, given in (("--save", options.save), ("--pdb", options.pdb)):
        if given and not options.until_error:
            raise RecipeError(f"{flag} is for --until-error: leave it out, or give that")
    options.env = options.env or 0
    known = options.recipe is None and type(num_envs) is int  # recipes of users may count otherwise
    if known and options.env >= max(1, num_envs):
        raise RecipeError(f"--env {options.env}: the run has environments 0 to {num_envs - 1}")
    if options.until_error and options.save is None:
        options.save = Path(f"{options.run_dir.resolve().name}-error.pt")
    check_files(video=options.video, save=options.save)
    return options


def main(options: argparse.Namespace) -> int:
    """Has it once more; returns the exit code, 1 if it is not the run."""
    from support.digests import Digests
    from support.episodes import one_episode
    from support.failures import until_error
    from support.replays import find_start
    from support.states import why_other_bits
    from support.trained import open_run

    run = open_run(options.run_dir, options.recipe)
    start = find_start(run, options.round, from_start=options.from_start)
    place = "from its beginning" if start.checkpoint is None else f"from {start.checkpoint.name}"
    print(f"{run.title}, {place}" + (f": {start.why}" if start.why else ""), flush=True)
    digests = Digests(run, start.step)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, run.directory.resolve().name)
        if options.until_error:
            code = until_error(run, start, digests, directory, options.save, debug=options.pdb)
        else:
            code = one_episode(options, run, start, digests, directory)
        digests.check_written(directory)
    for _, difference in digests.differences[:3]:
        print(f"this is not the run as it was: {difference}")
    if digests.differences:
        resumed = "; or the run was resumed, and has begun new episodes there"
        first = min(step for step, _ in digests.differences)
        why = why_other_bits(run.config, start.step, first)
        print(f"why: {why}{resumed if start.loses else ''}")
        return 1
    print(digests.verdict())
    return code


if __name__ == "__main__":
    OPTIONS = parse_or_exit(parse)
    announce("importing torch and torchrl")
    exit_with(lambda: main(OPTIONS), ONCE_MORE)
