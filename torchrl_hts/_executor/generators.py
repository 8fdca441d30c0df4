"""Random generators that a process has one of, made each environment's own.

Python's ``random``, numpy's ``np.random`` and torch's default generator are the process's. What an
environment draws from them must depend neither on who shares its process nor on what was drawn
before (I6, I7). So each environment has `Generators`, which are put in their place before any of
its methods runs. Swapped are the states, not the objects: what was imported from these modules
before (``from random import random``) draws from the same.

Python's and numpy's states are copied in memory (`generator_words`). Even that is too much for one
that draws nothing. So an environment that has not drawn for its first steps makes all further ones
on a state that is the same for all like it. As soon as it is seen to have drawn, its own is used.

VMAS keeps states of its own beside them, for all of its environments; they are swapped likewise
(`vmas_states`).

While environments play in threads of their own, nobody may draw from them (`thread_watch`).

Normal numbers are drawn in pairs by ``np.random.randn`` and ``random.gauss``, and the second is
kept for the next call. It is forgotten between two steps: numpy's can't be read in good time.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from array import array
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from torchrl_hts._executor.generator_words import (
    SIZE,
    WORDS,
    InMemory,
    find_numpy,
    find_python,
    forget_pairs,
)
from torchrl_hts._executor.thread_watch import ThreadWatch
from torchrl_hts._executor.vmas_states import VmasStates, fresh_vmas_states, vmas_states

__all__ = [
    "GeneratorState",
    "Generators",
    "draws_are_seen",
    "entered_state",
    "threads",
]

# A state, as plain values that any pickle can hold: Python's and numpy's words; torch's state, or
# None for one that nobody has drawn from; the seed of that; the patience (see `Generators`); and
# what VMAS keeps, if it is there, torch's state as bytes.
GeneratorState = tuple[bytes, bytes, "bytes | None", int, int, "VmasStates | None"]

_SPAWN_KEY = 0x67656E73  # "gens": sets these seeds apart from others of the same numbers
_PATIENCE = 1000  # steps without a draw, before an environment is taken for one that draws nothing
_FOREVER = 2**62
# Of the first word only the highest bit counts. That of Python's seeds, and the index after them,
# are always the same, and it is by these that draws are noticed: so another bit is set.
_FIRST_WORD = 0x80000001


class Generators:
    """The three generators of one environment.

    Args:
        numbers: integers >= 0 that determine all that is drawn.

    Example:
        >>> import random
        >>> one, other = Generators(0, 1), Generators(0, 2)
        >>> one.enter(); first = [random.random() for _ in range(3)]
        >>> other.enter(); random.random() in first
        False
        >>> one.seed(0, 1); one.enter(); [random.random() for _ in range(3)] == first
        True
    """

    __slots__ = ("_numpy", "_patience", "_python", "_torch", "_torch_seed", "_vmas")

    def __init__(self, *numbers: int) -> None:
        _watch_torch()
        self.seed(*numbers)

    def seed(self, *numbers: int) -> None:
        """Begin anew, from these numbers alone."""
        seeds = np.random.SeedSequence(numbers, spawn_key=(_SPAWN_KEY, len(numbers)))
        words = seeds.generate_state(2 * SIZE + 2).tolist()
        python = array("I", (SIZE, _FIRST_WORD, *words[1:SIZE]))
        numpy = array("I", (_FIRST_WORD, *words[SIZE + 1 : 2 * SIZE], SIZE))
        self._set(python, numpy, None, words[-1] << 31 | words[-2] >> 1, _PATIENCE)

    def _set(
        self, python: array[int], numpy: array[int], torch: Any, torch_seed: int, patience: int
    ) -> None:
        _process.leave(self)
        self._python, self._numpy = memoryview(python), memoryview(numpy)
        self._torch, self._torch_seed = torch, torch_seed
        self._patience = patience
        self._vmas: VmasStates | None = None

    def enter(self) -> None:
        """Let what is drawn from now on come from these generators."""
        process = _process
        process.look()
        if threads.num_playing:
            return
        process.last = self
        if process.owner is not self:
            process.put(self)
        if process.torch is not None and process.torch_owner is not self:
            process.put_torch(self)

    def enter_step(self) -> None:
        """The same for a step, which an environment that draws nothing is not to pay for."""
        process = _process
        if (
            not self._patience
            and _python_mark[0] == process.quiet_python_mark
            and _numpy_mark[0] == process.quiet_numpy_mark
        ):
            process.last = self
            return
        process.look()
        owner = self if self._patience else _nobody
        if self._patience:
            self._patience -= 1
        if threads.num_playing:
            return
        process.last = self
        if process.owner is not owner:
            process.put(owner)
        if process.torch is not None and process.torch_owner is not self:
            process.put_torch(self)

    def state(self) -> GeneratorState:
        """What `restore` goes on from."""
        _process.look()
        if _process.torch_owner is self:
            _process.keep_torch()
        vmas = self._vmas and [_as_bytes(self._vmas[0]), *self._vmas[1:]]
        words = self._python.tobytes(), self._numpy.tobytes()
        return (*words, _as_bytes(self._torch), self._torch_seed, self._patience, vmas)

    def restore(self, state: GeneratorState) -> None:
        """Go on where `state` was called, in another process maybe.

        Raises:
            ValueError: if there is no such state.
        """
        python, numpy, torch, torch_seed, patience, *vmas = state
        self._set(
            _checked_words(python, 0), _checked_words(numpy, SIZE), torch, torch_seed, patience
        )
        if vmas:  # older versions have saved none
            self._vmas = vmas[0]


def entered_state() -> GeneratorState | None:
    """The state of those that what is drawn now comes from; None if they are the process's own."""
    return None if _process.last is None else _process.last.state()


def draws_are_seen() -> bool:
    """Whether this process notices who draws from Python's or numpy's generator."""
    return isinstance(_python, InMemory) and isinstance(_numpy, InMemory)


def _as_bytes(state: Any) -> bytes | None:
    """A state of torch's generator that may be a tensor."""
    return state if state is None or isinstance(state, bytes) else bytes(state.numpy().data)


def _checked_words(state: bytes, index: int) -> array[int]:
    words = array("I", state)
    if len(words) != WORDS or words[index] > SIZE:  # or words would be read that lie beyond
        raise ValueError("the state of the random generators was changed after it was saved")
    return words


_python, _numpy = find_python(), find_numpy()
_python_mark, _numpy_mark = _python.mark, _numpy.mark
threads = ThreadWatch(_python_mark, _numpy_mark)  # of this process


class _Process:
    """Whose states are in their place.

    Attributes:
        last: who has entered last.
        owner: whose words of Python's and numpy's generators are in their place: of the last one,
            or `_nobody`'s.
        python_mark, numpy_mark: the marks when nothing had been drawn from them.
        quiet_python_mark, quiet_numpy_mark: the marks of `_nobody`'s, by which a step knows that
            there is nothing to do; None where torch's generator always is to be seen to.
        torch: once it has been imported.
        torch_owner: whose state of torch's generator is in its place.
    """

    last: Generators | None = None
    owner: Generators | None = None
    python_mark: float | None = None
    numpy_mark: float | None = None
    quiet_python_mark: float | None = None
    quiet_numpy_mark: float | None = None
    torch: Any = None
    torch_owner: Generators | None = None

    def look(self) -> None:
        """See what the last one has drawn.

        Raises:
            RuntimeError: somebody has drawn, and environments play in threads.
        """
        if threads.num_playing:
            threads.check()
            return  # without another look, which would take what is drawn meanwhile for granted
        if _python_mark[0] == self.python_mark and _numpy_mark[0] == self.numpy_mark:
            return
        forget_pairs()
        if isinstance(_python, InMemory):
            _python.words[1] |= 1  # see `_FIRST_WORD`
        if self.last is not None:
            self.last._patience = _FOREVER
        if self.owner is _nobody:
            self.put(_nobody)
        elif self.owner is not None:
            _python.take(self.owner._python)
            _numpy.take(self.owner._numpy)
        self.python_mark, self.numpy_mark = _python_mark[0], _numpy_mark[0]

    def put(self, generators: Generators) -> None:
        """Put Python's and numpy's words in their place; what is there has been seen."""
        _python.put(generators._python)
        _numpy.put(generators._numpy)
        self.python_mark, self.numpy_mark = _python_mark[0], _numpy_mark[0]
        self.owner = generators
        if generators is _nobody and self.torch is None:
            self.quiet_python_mark, self.quiet_numpy_mark = self.python_mark, self.numpy_mark

    def put_torch(self, generators: Generators) -> None:
        """Keep the state of torch's generator that is in its place, and put another there."""
        self.keep_torch()
        generator = self.torch.default_generator
        if generators._torch is None:
            generator.manual_seed(generators._torch_seed)
        else:
            generator.set_state(self.as_tensor(generators._torch))
        vmas = vmas_states()
        if vmas is not None:
            kept = generators._vmas or fresh_vmas_states(
                generators._python.tolist(), generators._numpy.tolist(), generator.get_state()
            )
            vmas[:] = [self.as_tensor(kept[0]), *kept[1:]]
        self.torch_owner = generators

    def keep_torch(self) -> None:
        """Keep the state of torch's generator, and VMAS's, for those whose they are."""
        if self.torch_owner is not None:
            self.torch_owner._torch = self.torch.default_generator.get_state()
            vmas = vmas_states()
            if vmas is not None:
                self.torch_owner._vmas = list(vmas)

    def as_tensor(self, state: Any) -> Any:
        """A state of torch's generator that may be bytes."""
        if isinstance(state, bytes):
            return self.torch.frombuffer(bytearray(state), dtype=self.torch.uint8)
        return state

    def leave(self, generators: Generators) -> None:
        """These are no longer in their place, for they are about to change."""
        self.look()
        if self.owner is generators:
            self.owner = None
        if self.torch_owner is generators:
            self.torch_owner = None

    def found_torch(self, torch: ModuleType) -> None:
        """It has been imported."""
        self.torch = torch
        self.quiet_python_mark = None
        if self.last is not None:
            self.put_torch(self.last)
        threads.found_torch(torch)


class _TorchWatch(importlib.abc.MetaPathFinder):
    """Hears of it when torch has been imported, before anybody can draw from its generator."""

    searching = False

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _process.found_torch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch_torch() -> None:
    if _process.torch is None and not any(isinstance(one, _TorchWatch) for one in sys.meta_path):
        if "torch" in sys.modules:
            _process.found_torch(sys.modules["torch"])
        else:
            sys.meta_path.insert(0, _TorchWatch())


_process = _Process()
# What environments step on that draw nothing.
_nobody = Generators.__new__(Generators)
_nobody.seed()
