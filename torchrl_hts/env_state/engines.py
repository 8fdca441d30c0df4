"""Engines outside of Python that environments hold: ALE's emulators and MuJoCo's simulations.

An environment to restore keeps its own; what is saved is their state.
"""

from __future__ import annotations

from typing import Any

from torchrl_hts.env_state.ale import describe, is_emulator, restore_emulator, save_emulator
from torchrl_hts.env_state.simulations import (
    describe_simulation,
    is_renderer,
    is_simulation,
    restore_simulation,
    save_simulation,
)

__all__ = ["describe_engine", "is_engine", "kept", "restore_engine", "save_engine"]


def is_engine(value: object) -> bool:
    """Whether something is an engine whose state can be saved."""
    return is_emulator(value) or is_simulation(value)


def kept(value: Any) -> dict[tuple[str, ...], Any]:
    """What of an attribute a new environment keeps for itself, by where it is found in it."""
    if is_simulation(value):
        return {(): value, ("model",): value.model}
    return {(): value} if is_emulator(value) or is_renderer(value) else {}


def describe_engine(engine: Any) -> list[str]:
    """What a saved engine and the one to restore must have in common."""
    return describe_simulation(engine) if is_simulation(engine) else describe(engine)


def save_engine(engine: Any, layer: object) -> Any:
    """The state of an engine, in plain data; it goes on as if it had not been saved.

    Args:
        engine: the engine.
        layer: of the environment, that holds it.

    Raises:
        CannotSaveError: it can't be saved; says why.
    """
    if is_simulation(engine):
        return save_simulation(engine)
    return save_emulator(engine, continuous=getattr(layer, "continuous", False))


def restore_engine(engine: Any, state: Any) -> None:
    """Bring an engine to where another one of the same description was.

    Raises:
        ValueError: it is not there; says why.
    """
    if is_simulation(engine):
        restore_simulation(engine, state)
    elif not restore_emulator(engine, *state):
        raise ValueError("the emulator doesn't play on here as it did where it was saved")
