"""The config.json of a run: read, and looked at before anything is begun with it.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.errors import RecipeError

__all__ = ["config_of", "config_to_go_on_with", "read_config"]


def read_config(file: Path) -> dict[str, Any]:
    """What a config.json holds.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is damaged; says where. `from_json` looks at the options themselves.
    """
    try:
        config = json.loads(file.read_text())
    except RecursionError:
        raise ValueError("brackets within brackets without an end") from None
    if not isinstance(config, dict):
        raise ValueError(f"it holds a {type(config).__name__}")
    for name, kind in (("recipe", str), ("options", dict)):
        if not isinstance(config.get(name), kind):
            raise _wrong(name, config.get(name))
    for name in ("versions", "machine", "spaces"):
        if not isinstance(config.get(name, {}), dict):
            raise _wrong(name, config[name])
    if not isinstance(config.get("id", ""), str):
        raise _wrong("id", config["id"])
    starts, names = config.get("starts") or [], config.get("wandb")
    if not (isinstance(starts, list) and all(map(_is_start, starts))):
        raise _wrong("starts", starts)
    if names is not None and not (isinstance(names, dict) and {"id", "name"} <= names.keys()):
        raise _wrong("wandb", names)
    return config


def config_of(directory: Path) -> dict[str, Any]:
    """What the config.json of a run holds that is looked at, played or had once more.

    Raises:
        RecipeError: if there is no run, or its config.json can't be read or is damaged.
    """
    file = directory / "config.json"
    if not file.exists():
        raise RecipeError(
            f"{directory} holds no run: there is no config.json; give the output directory of one"
        )
    try:
        return read_config(file)
    except OSError as error:
        raise RecipeError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{file} is damaged ({error}): put the file back as it was") from error


def config_to_go_on_with(directory: Path, recipe: str) -> dict[str, Any]:
    """What the config.json of a run holds that a recipe is to go on with.

    Raises:
        OSError, ValueError: see `read_config`.
        RecipeError: if the run is of another recipe.
    """
    config = read_config(directory / "config.json")
    if config["recipe"] != recipe:
        raise RecipeError(
            f"{directory} is a run of {config['recipe']!r}, and this is {recipe!r}: go on "
            "with the recipe that made it, or begin anew in another directory"
        )
    return config


def _is_start(start: Any) -> bool:
    return (
        isinstance(start, dict)
        and isinstance(start.get("step"), int)
        and all(isinstance(start.get(name), dict) for name in ("versions", "machine"))
    )


def _wrong(name: str, value: object) -> ValueError:
    shown = repr(value)
    return ValueError(f"its {name} can't be {shown[:40]}{'...' * (len(shown) > 40)}")
