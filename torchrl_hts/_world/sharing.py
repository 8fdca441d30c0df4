"""What the learners of one machine share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from torchrl_hts._processes.limits import available_cores
from torchrl_hts._processes.linux import core_numbers

__all__ = ["share_machine"]


def share_machine(gather: Callable[[Any], list[Any]], local_size: int | None) -> tuple[int, float]:
    """How many learners are on this machine, and how many cores are this one's.

    Cores are shared out among the learners that may run on the same ones: all of a machine's, or
    each by itself where ``srun`` binds them.

    Args:
        gather: takes this rank's value and returns those of all ranks.
        local_size: as the launcher says it; None: as many as say the same name of a host.
    """
    own = socket.gethostname(), core_numbers()
    ranks = gather(own)
    local_size = local_size or [host for host, _ in ranks].count(own[0])
    return local_size, available_cores() / min(local_size, ranks.count(own))
