"""Return against wall-clock: one PPO, through HTSCollector and through TorchRL's own collectors.

    python benchmarks/learning.py --env-id ALE/Pong-v5 --total-frames 600000
    python benchmarks/learning.py --contenders hts multi-sync --output-dir runs/two
    python benchmarks/learning.py --scenario academy_empty_goal_close --reach 0.4 0.8

Each contender trains the agent of recipes/ppo_atari.py, or with --scenario that of
recipes/ppo_football.py, with the update and the settings of that recipe. All play the same games
for the same number of steps, one after the other. Run it on a machine that does nothing else.
`multi-sync` is MultiSyncCollector with a worker per core, among which the games are shared out;
`parallel` is Collector with ParallelEnv, a process per game. The learner has as many threads as
there are cores, in each of them.

Writes CONTENDER-seedSEED.csv, and learning.svg: mean of the last 100 training episodes,
against minutes and against steps; of football, the score (goals alone) instead of the return. The
table has the mean and the standard deviation over --seeds. With --evaluate-every the parameters are
kept so often, and at the end. When a run is over each of them plays ten episodes greedily
(CONTENDER-seedSEED-evaluated.csv), which takes none of the training's time. Contenders whose files
are whole are not run again. CONTENDER-seedSEED.json has the settings of a run: with others it is
refused. A training that is stopped goes on with the same command, from where it was at most five
minutes before. The games of TorchRL's collectors begin anew then.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import _recipes  # noqa: F401  so that the recipes are found
import ppo_atari
import ppo_football
import torch
from _curves import COLUMNS, LABELS, draw, print_table, read
from _measurements import check_settings, note_settings
from _training import Kept, MakeEnv, Training, game_of, policies, unfinished
from _workloads import CORES
from support import atari
from support.pixel_options import PPOOptions
from support.pixels import Agent

from torchrl_hts import Evaluator
from torchrl_hts.bench.command_line import count, make_directory


def evaluated_game_of(options: PPOOptions) -> MakeEnv:
    """Makes the same game with the reward that counts."""
    if isinstance(options, ppo_football.Options):
        return ppo_football.eval_env(options)
    assert isinstance(options, ppo_atari.Options)
    return atari.eval_env(options)


def evaluate(options: PPOOptions, agent: Agent, file: Path) -> None:
    """Lets each policy play that the training behind a file has kept, and leaves a row for it."""
    kept = [Kept(**each) for each in torch.load(policies(file))]
    with Evaluator(evaluated_game_of(options), agent.policy, seed=options.seed) as evaluator:
        for each in kept:
            agent.policy.load_state_dict(each.values)
            evaluator.submit(each.steps)
        evaluations = evaluator.wait()
    unfinished = evaluated(file).with_suffix(".part")
    with unfinished.open("w", newline="") as rows:
        table = csv.writer(rows)
        table.writerow(COLUMNS)
        for each, played in zip(kept, evaluations, strict=True):
            table.writerow([each.elapsed_s, each.steps, len(played.returns), played.mean])
    unfinished.rename(evaluated(file))
    policies(file).unlink()


def evaluated(file: Path) -> Path:
    """Where the evaluations of a contender are."""
    return file.with_stem(f"{file.stem}-evaluated")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    game = parser.add_mutually_exclusive_group()
    game.add_argument("--env-id", default="ALE/Pong-v5", help="id of ale-py")
    game.add_argument(
        "--scenario", type=academy, help="of football's academy, instead of a game of Atari"
    )
    parser.add_argument("--engine", choices=["gfootball", "envpool"], default="gfootball")
    parser.add_argument("--total-frames", type=count, default=600_000, help="steps of each run")
    parser.add_argument("--learning-rate", type=float, help="by default the recipe's")
    parser.add_argument(
        "--decay-frames",
        type=count,
        help="steps in which the learning rate decays to 0, by default those of the run",
    )
    parser.add_argument(
        "--evaluate-every", type=count, default=0, metavar="STEPS", help="by default never"
    )
    parser.add_argument("--num-envs", type=count, help="by default the recipe's")
    parser.add_argument("--sync-interval", type=count, help="by default the recipe's")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="one after the other (0)"
    )
    parser.add_argument(
        "--reach",
        nargs="+",
        type=float,
        default=[],
        metavar="MEAN",
        help="tell when they got there",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end a run when the last of --reach is reached"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=[*LABELS],
        default=["hts", "multi-sync", "parallel"],
        help=f"of {', '.join(LABELS)}",
    )
    parser.add_argument("--output-dir", type=Path, help="by default runs/learning/GAME")
    parser.add_argument("--alone", choices=[*LABELS], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.decay_frames = given.decay_frames or given.total_frames
    if given.decay_frames < given.total_frames:
        parser.error("--decay-frames must not be less than --total-frames")
    if len(set(given.seeds)) < len(given.seeds):
        parser.error("--seeds must differ")
    if given.stop and not given.reach:
        parser.error("--stop needs --reach MEAN ...: where to stop")
    return given


def academy(name: str) -> str:
    """The name of a scenario, checked."""
    if not name.startswith("academy_"):
        raise argparse.ArgumentTypeError(f"{name} is no scenario of the academy")
    return name


def options_of(given: argparse.Namespace) -> PPOOptions:
    """The recipe's options, with what was given on the command line."""
    chosen = {"total_frames": given.total_frames, "seed": given.seeds[0]}
    for name in ("learning_rate", "num_envs", "sync_interval"):
        if getattr(given, name) is not None:
            chosen[name] = getattr(given, name)
    if given.alone == "hts-lag0":
        chosen["lag"] = 0
    if given.scenario is not None:
        return ppo_football.Options(scenario=given.scenario, engine=given.engine, **chosen)
    return ppo_atari.Options(env_id=given.env_id, **chosen)


def settings_of(given: argparse.Namespace, options: PPOOptions) -> dict[str, Any]:
    """What all runs in a directory have in common; the rest is in the names of their files."""
    named = ("total_frames", "learning_rate", "num_envs", "sync_interval")
    return {
        "task": options.task,
        "engine": given.engine if given.scenario is not None else None,
        **{name: getattr(options, name) for name in named},
        "decay_frames": given.decay_frames,
        "evaluate_every": given.evaluate_every,
        "until": max(given.reach) if given.stop else None,
    }


def run(given: argparse.Namespace, options: PPOOptions, file: Path) -> None:
    """One contender, in this process: what is missing of training and evaluation."""
    torch.manual_seed(options.seed)
    agent = Agent(game_of(options)())
    if not file.exists():
        for old in (evaluated(file), policies(file)):
            old.unlink(missing_ok=True)
        until = max(given.reach) if given.stop else math.inf
        training = Training(given.alone, options, agent, given.decay_frames, file)
        training.run(given.evaluate_every, until)
    if policies(file).exists():
        evaluate(options, agent, file)


def main() -> int:
    """Runs what is missing, each contender and seed in a process of its own, and draws them all."""
    given = parse()
    options = options_of(given)
    directory: Path = given.output_dir or Path("runs/learning") / options.task.rpartition("/")[2]
    make_directory(directory)
    if given.alone is not None:
        (seed,) = given.seeds
        run(given, options, directory / f"{given.alone}-seed{seed}.csv")
        # TorchRL's multi-process collectors may keep a process that is done from ending.
        sys.stdout.flush()
        os._exit(0)
    files = {
        name: [directory / f"{name}-seed{seed}.csv" for seed in given.seeds]
        for name in given.contenders
    }
    settings = settings_of(given, options)
    for file in chain(*files.values()):
        check_settings(file, settings)
        check_settings(unfinished(file), settings)
    for seed, of_seed in zip(given.seeds, zip(*files.values(), strict=True), strict=True):
        for name, file in zip(files, of_seed, strict=True):
            if not (file.exists() or unfinished(file).exists()):
                note_settings(file, settings)
            if not file.exists() or policies(file).exists():
                command = [sys.executable, __file__, *sys.argv[1:]]
                command += ["--seeds", str(seed), "--alone", name]
                if code := subprocess.run(command, check=False).returncode:
                    print(f"error: {name} ended with exit code {code}", file=sys.stderr)
                    return 1
            if given.evaluate_every and not evaluated(file).exists():
                print(
                    f"{file} is of a training that kept no policies: remove it to train again",
                    file=sys.stderr,
                )
    curves = {name: [*map(read, own)] for name, own in files.items()}
    title = f"PPO on {options.task}, {options.num_envs} games, {CORES} cores"
    played = {
        name: [read(evaluated(file)) for file in own if evaluated(file).exists()]
        for name, own in files.items()
    }
    played = {name: own for name, own in played.items() if own}
    draw(title, curves, played, directory / "learning.svg")
    print_table(curves, played, given.reach)
    return 0


if __name__ == "__main__":
    sys.exit(main())
