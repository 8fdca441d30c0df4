"""Ray, started or joined, and what it is asked for: for the learners of `ray_train.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from support.errors import RecipeError
from torchrl_hts.envs import reaching_ray

__all__ = ["scaling", "start_ray"]

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
