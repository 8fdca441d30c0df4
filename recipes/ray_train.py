"""A recipe on a Ray cluster: Ray Train starts its learners, and starts them anew if one fails.

    python recipes/ray_train.py --learners 4 ppo_cartpole --shards 4 --output-dir /shared/cartpole

Everything after the recipe's name is an option of the recipe. The policy has the bits that the
same options have with torchrun. The output directory, the path of these recipes and the directory
that this is called in must be the same on all machines. After each checkpoint Ray is told the
newest metrics, and keeps a copy of the checkpoints. A learner or a machine that is lost costs what
came after the last one: Ray starts all learners again, and they go on with the run in the output
directory, bit for bit.

Without --address a cluster of this machine is started, and ended. Needs the extra 'ray'.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from support.errors import RecipeError, exit_with
from support.flags import counted
from support.start import announce, check_task_or_exit, parse_or_exit

RECIPES = (
    *("a2c_atari", "mappo", "ppo_atari", "ppo_cartpole"),
    *("ppo_football", "ppo_mujoco", "ppo_recurrent", "sac_mujoco"),
)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=counted, default=2, help="processes that learn (2)")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each learner (1)")
    parser.add_argument(
        "--max-failures",
        type=int,
        default=3,
        help="how often learners are started anew (3); -1: without end",
    )
    parser.add_argument("--address", help="of a Ray cluster, such as HEAD:6379 or auto")
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the recipe")
    options = parser.parse_args()
    if not 0 <= options.cpus < float("inf"):
        parser.error(f"--cpus must be at least 0, and finite, got {options.cpus:g}")
    if options.max_failures < -1:
        parser.error(f"--max-failures must be at least -1, got {options.max_failures}")
    return options


def checked(recipe: str, arguments: list[str]) -> Any:
    """The recipe's options.

    Raises:
        RecipeError: if they make no sense, or there is no directory that all learners know.
    """
    from support.options import parse_options

    module = importlib.import_module(recipe)
    options = parse_options(module.Options, module.__doc__, arguments)
    if options.output_dir is None and options.resume is None:
        raise RecipeError("name a directory that all learners reach: --output-dir /shared/run")
    return options


def learn(settings: dict[str, Any]) -> None:
    """What each learner does, in a process that Ray Train has started."""
    import ray.train
    from support.metrics import Row
    from support.saves import WHEN_SAVED

    os.chdir(settings["directory"])  # that paths in the options are relative to
    # By this name a learner that was started anew knows the run as its own, as with torchrun.
    os.environ["TORCHELASTIC_RUN_ID"] = settings["name"]

    def report(directory: Path, row: Row) -> None:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            checkpoint = ray.train.Checkpoint.from_directory(directory / "checkpoints")
        ray.train.report(row, checkpoint=checkpoint)

    options = checked(settings["recipe"], settings["arguments"])
    WHEN_SAVED[:] = [report]
    code = importlib.import_module(settings["recipe"]).train(options)
    if code:
        raise RuntimeError(f"the recipe ended with exit code {code}")


def main(options: argparse.Namespace) -> int:
    """Starts the learners and waits for them."""
    run = checked(options.recipe, options.arguments)
    run.check_learners(options.learners)
    check_task_or_exit(run)  # here once, in place of by each learner again and again
    from support.ray_start import check_room, scaling, start_ray

    start_ray(options.address)
    check_room(options, run)
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    directory = (run.resume or run.output_dir).absolute()
    name = f"{directory.name}-{uuid.uuid4().hex[:8]}"
    trainer = TorchTrainer(
        learn,
        train_loop_config={
            "name": name,
            "recipe": options.recipe,
            "arguments": options.arguments,
            "directory": os.getcwd(),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(**scaling(options, run)),
        run_config=train.RunConfig(
            name=name,
            storage_path=str(directory / "ray"),
            failure_config=train.FailureConfig(max_failures=options.max_failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=1),
        ),
    )
    try:
        result = trainer.fit()
    except train.TrainingFailedError as error:
        raise RecipeError(
            f"the learners have failed more often than --max-failures {options.max_failures}; "
            f"the last time: {error}"
        ) from error
    step = int(result.metrics["step"]) if result.metrics else 0
    announce(f"done after {step:,} steps; files in {directory}, Ray's own in {result.path}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    OPTIONS = parse_or_exit(parse)
    exit_with(lambda: main(OPTIONS))
