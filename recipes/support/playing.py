"""The episodes of `play.py`: what a run has trained, played as the command line says."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchrl.envs.utils import ExplorationType

from support.errors import RecipeError
from support.films import filming, try_out
from support.trained import TrainedRun, Values
from torchrl_hts import Evaluation, Evaluator, WorkerError

__all__ = ["play"]


def play(
    options: argparse.Namespace, run: TrainedRun, values: Values, make_env: Any, policy: Any
) -> Iterator[Evaluation]:
    """Yields what was played: all episodes at once, or in a window one by one."""
    given = run.options
    sampled = options.sample or (given.eval_sampled and not options.deterministic)
    count = options.episodes or given.eval_episodes
    seed = given.seed if options.seed is None else options.seed
    evaluator = partial(
        Evaluator,
        policy=policy,
        exploration_type=ExplorationType.RANDOM if sampled else ExplorationType.DETERMINISTIC,
        max_frames_per_episode=(
            given.eval_max_steps if options.max_steps is None else options.max_steps
        ),
    )
    players = [(make_env, count, seed)]
    if options.render:
        try_out(make_env, options.render)
        window = partial(make_env, render_mode=options.render)
        try_out_window(partial(evaluator, window))
        players = [(window, 1, seed + number) for number in range(count)]
    with filming(options.video, make_env, options.fps or run.video_fps) as film:
        for make, episodes, own_seed in players:
            with evaluator(make, num_episodes=episodes, seed=own_seed, **film) as player:
                player.submit(values.step or 0)
                for evaluation in player.wait():
                    yield evaluation
                    if options.video and evaluation.video is None:
                        raise RecipeError(f"there is no film: {evaluation.video_error}")


def try_out_window(make_player: Callable[..., Evaluator]) -> None:
    """Find out whether there is a window, where it will be: some libraries end their process.

    Args:
        make_player: makes an evaluator of an environment that shows itself.

    Raises:
        RecipeError: if there is none.
    """
    try:
        with make_player(num_episodes=1, max_frames_per_episode=1) as player:
            player.submit(0)
            player.wait()
    except WorkerError as error:
        said = error.remote_traceback.splitlines()[-1:] or str(error).splitlines()
        kind, _, advice = said[0].partition(": ")
        if kind.endswith("DependencyNotInstalled"):
            raise RecipeError(advice) from error
        raise RecipeError(
            f"no window can be opened here ({said[0]}): film an episode with --video FILE"
        ) from error
