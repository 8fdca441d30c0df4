"""The exact state of a gymnasium environment, to go on from in a new process, bit for bit.

An environment is a chain of layers: wrappers around a base. What one differs by from another that
the same factory made is what their attributes hold. So these are pickled, all of them into one
stream, and shared objects stay shared. What pickle would lose or change without a word is refused.
That is objects that say themselves how they are pickled, other than those known to be whole: many
are made anew from the arguments of their constructor. It is sets, whose order of iteration is part
of what a program sees, and depends on what was ever in them. And it is what can't be pickled at
all.

The new environment keeps its own layers, functions, engines (ALE's emulators, MuJoCo's simulations)
and specs. What functions hold in their closures and defaults, and the engines' states, are set to
what they were. Gymnasium's renderer of MuJoCo is kept as it is: cameras are not saved.

Not saved: module globals, attributes of classes, the clock, and engines that an environment knows
by a number only; executors save global generators. Emulators show the restored state from their
next frame on.

Refused, too, is what a reader of the state would have to believe (``names.py``). That is above all
functions, methods and modules, and objects of foreign packages, that the environment did not have
when it was new. Objects with a ``__del__`` are refused too.

A base environment whose attributes can't be saved so defines ``get_state()``, which returns all
that ``set_state(state)`` needs to put a new one into the same state. It is then saved by them,
together with gymnasium's own attributes (the generator and the spaces).
"""

from __future__ import annotations

from torchrl_hts.env_state.layers import (
    CannotSaveError,
    names_of,
    restore_environment,
    save_environment,
)

__all__ = ["CannotSaveError", "names_of", "restore_environment", "save_environment"]
