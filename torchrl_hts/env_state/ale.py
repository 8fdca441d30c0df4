"""The exact state of an emulator of the Arcade Learning Environment.

The states that it gives out hold the memory of the game, the frame counts and the generator. They
lack the action that it repeats when actions are sticky, and whether the last frame was cut off.
They also lack the shapes that the video chip draws with until the game sets them again. What they
don't hold is found by what it does. A copy of the process plays on for some frames; a new emulator
is brought into the state in one way after the other until it plays the same.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_hts.env_state.attributes import is_a
from torchrl_hts.errors import CannotSaveError

__all__ = ["describe", "is_emulator", "restore_emulator", "save_emulator"]

_FRAMES = 32  # no game draws longer with what it has set before
_COUNTS = ("max_num_frames_per_episode", "frame_skip")


def is_emulator(value: object) -> bool:
    """Whether something is an emulator, whose state isn't in its attributes."""
    ale_py = sys.modules.get("ale_py")
    return ale_py is not None and is_a(value, ale_py.ALEInterface)


def describe(ale: Any) -> list[str]:
    """What the saved emulator and the one to restore must have in common."""
    version = sys.modules["ale_py"].__version__
    return [
        f"emulator of ale_py {version} with {Path(ale.getString('rom_file')).name}",
        *(f"{key} of {ale.getInt(key)}" for key in _COUNTS),
        f"repeat_action_probability of {ale.getFloat('repeat_action_probability')}",
    ]


def save_emulator(ale: Any, *, continuous: bool) -> tuple[bytes, list[list[bytes]]]:
    """The state of an emulator, which goes on as if it had not been saved.

    Args:
        ale: the emulator.
        continuous: whether its actions are continuous.

    Raises:
        CannotSaveError: it can't be saved, at this frame or at all; says why.
    """
    if ale.getBool("sound_obs"):
        raise CannotSaveError("the emulator's sound can't be saved")
    if continuous and 0 < ale.getFloat("repeat_action_probability") < 1:
        raise CannotSaveError(
            "continuous actions that are sticky can't be saved: the emulator doesn't tell how "
            "strong the last one was"
        )
    state = ale.cloneState(include_rng=True).serialize()
    futures = [_in_a_copy(partial(_all_of, play, ale)) for play in _PLAYS]
    if not _in_a_copy(lambda: restore_emulator(ale, state, futures)):
        raise CannotSaveError(
            "the coming frames depend on more than the state that the emulator gives out. Try "
            "again some steps later; if it is always so, ale_py doesn't save the whole of this game"
        )
    return state, futures


def _in_a_copy(function: Callable[[], Any]) -> Any:
    """What a function returns in a copy of this process: here, nothing changes."""
    end, copys_end = os.pipe()
    with warnings.catch_warnings():
        # Of threads, whose locks the copy may find held: it takes none, and ends without cleaning.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            with open(copys_end, "wb") as pipe:
                pipe.write(pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(copys_end)
    with open(end, "rb") as pipe:
        result = pipe.read()
    os.waitpid(pid, 0)
    if not result:
        raise RuntimeError("the copy of this process that should play on ended too early")
    return pickle.loads(result)


def _play(ale: Any, frames: int = 0) -> Iterator[bytes]:
    """A digest of each of the frames to come."""
    actions = itertools.cycle(ale.getLegalActionSet())
    for action in itertools.islice(actions, frames or _FRAMES + _settled(ale)):
        over = ale.game_over()  # nothing moves then, and the screen is no part of the state
        reward = ale.act(action)
        digest = hashlib.sha256(repr(reward).encode() + ale.cloneState().serialize())
        if not over:
            digest.update(ale.getScreen())
        yield digest.digest()[:8]


def _reset_and_play(ale: Any) -> Iterator[bytes]:
    ale.reset_game()
    return _play(ale, 2)


def _all_of(play: Callable[[Any], Iterator[bytes]], ale: Any) -> list[bytes]:
    return list(play(ale))


_PLAYS = (_play, _reset_and_play)


def _settled(ale: Any) -> int:
    """Frames after which the last action is the one that is repeated, but once in 1e15."""
    probability = ale.getFloat("repeat_action_probability")
    return math.ceil(math.log(1e-15, probability)) if 0 < probability < 1 else 0


def _ways(ale: Any) -> Iterator[Callable[[], None]]:
    """What may be done before a state is restored, to set what it doesn't hold."""
    settled = _settled(ale)

    def act(action: Any, frames: int) -> None:
        for _ in range(frames):
            ale.act(action)

    def reset_and_act(frames: int) -> None:
        ale.reset_game()
        act(noop, frames)

    noop, *others = ale.getLegalActionSet()
    yield partial(act, noop, settled + 1)
    yield from (partial(reset_and_act, frames) for frames in (0, 1, 2, 3))
    yield from (partial(act, action, settled + 1) for action in others)
    for frames in (2, 3, 5, 8, 13, 21, 34):
        yield from (partial(act, action, settled + frames) for action in (noop, *others))


def restore_emulator(ale: Any, state: bytes, futures: list[list[bytes]]) -> bool:
    """Bring an emulator to where it was; returns if it then plays on as it did.

    What a way leads to may depend on where it begins, so the last tries begin where the last one
    of all does, which nothing follows.
    """
    target = sys.modules["ale_py"].ALEState(state)
    tries = [*zip(_PLAYS, futures, strict=True), *[(_play, futures[0])] * 2]
    for way in _ways(ale):
        for play, future in tries:
            _go(ale, target, way)
            if any(here != there for here, there in zip(play(ale), future, strict=True)):
                break
        else:
            _go(ale, target, way)
            return True
    return False


def _go(ale: Any, target: Any, way: Callable[[], None]) -> None:
    ale.restoreState(target)
    way()
    ale.restoreState(target)
