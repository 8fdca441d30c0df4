"""Ranks beyond those that can share out the shards: they wait for the start at which they learn."""

from __future__ import annotations

import logging
import os
import sys

from torchrl_hts._world import protocol
from torchrl_hts._world.group import Group
from torchrl_hts._world.launch import starts_again
from torchrl_hts._world.tree import fitting

__all__ = ["leave_out_spares"]

_LOG = logging.getLogger(__name__)


def leave_out_spares(everybody: Group, shards: int) -> range:
    """The ranks that don't learn, the last ones; returns on those that do.

    A spare waits until the run has ended, and then ends its process. If the run has failed it
    fails too. So torchrun starts it again with the others.

    Args:
        everybody: more ranks than divide the shards, or another number of them.
        shards: a power of two.

    Raises:
        ValueError: on every rank, if the launcher starts nothing again; nobody is a spare then.
        SystemExit: on a spare.
    """
    learners = fitting(everybody.size, shards)
    if not protocol.talk(protocol.any_of(starts_again(os.environ)), everybody.gather):
        raise ValueError(
            f"{everybody.size} learners don't divide {shards} shards: start 1, 2, 4, ... up to "
            f"{shards} of them, or use other shards"
        )
    if everybody.rank >= learners:
        sys.exit(0 if everybody.await_end() else 1)
    if everybody.rank == 0:
        _LOG.warning(
            f"{everybody.size} learners were started, and {shards} shards are for 1, 2, 4, ... up "
            f"to {shards} of them: {learners} learn, and the others wait for the next start"
        )
    return range(learners, everybody.size)
