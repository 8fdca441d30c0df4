"""Ray, started or joined, and what it is asked for: for the learners of `ray_train.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from support.errors import RecipeError
from support.start import announce
from torchrl_hts.envs import reaching_ray

__all__ = ["check_room", "scaling", "start_ray"]

_UNIT = 1e-4  # in which Ray counts
_RECIPES = Path(__file__).resolve().parents[1]


def start_ray(address: str | None) -> None:
    """Start a cluster of this machine or join one, and have its processes find the recipes.

    Args:
        address: of the cluster to join.

    Raises:
        RecipeError: if there is no Ray here, or no cluster there that takes this process.
    """
    try:
        import ray
        import ray.train
        from ray.exceptions import AuthenticationError
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"this needs the package that provides {error.name!r}: pip install 'torchrl_hts[ray]'"
        ) from error
    given = os.environ.get("PYTHONPATH")
    paths = [str(_RECIPES), str(_RECIPES.parent), *filter(None, [given])]
    address = address or "local"
    try:
        with reaching_ray(address):
            ray.init(
                address=address,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
            )
    except (ConnectionError, AuthenticationError) as error:
        raise RecipeError(str(error)) from error


def check_room(options: argparse.Namespace, run: Any) -> None:
    """Find out whether all machines together have what the learners ask for.

    Args:
        options: of the script.
        run: those of the recipe.

    Raises:
        RecipeError: if it is this machine alone, and lacks something. Others may grow: of those it
            is said.
    """
    import ray

    asked = scaling(options, run)
    each = {**asked["resources_per_worker"], **({"GPU": 1} if asked["use_gpu"] else {})}
    there = ray.cluster_resources()
    for name, number in each.items():
        needed, found = number * options.learners, there.get(name, 0)
        if needed > found + _UNIT * options.learners:
            lacking = f"{options.learners} learners ask for {needed:g} of {name}, and the cluster "
            lacking += f"has {found:g}"
            if options.address is None:
                less = "less --cpus each" if name == "CPU" else "no --device of a GPU"
                raise RecipeError(
                    f"{lacking}, which is this machine's: give fewer --learners, {less}, or the "
                    "--address of a larger cluster"
                )
            announce(f"{lacking} now: waiting until it has more")


def scaling(options: argparse.Namespace, run: Any) -> dict[str, Any]:
    """The arguments of Ray Train's ScalingConfig.

    Args:
        options: of the script.
        run: those of the recipe.
    """
    devices = (vars(run).get(name) or "" for name in ("device", "policy_device"))
    return {
        "num_workers": options.learners,
        "resources_per_worker": {"CPU": options.cpus},
        # One each. A learner sees those of all on its machine, and takes one by its local rank.
        "use_gpu": any(device.startswith("cuda") for device in devices),
    }
