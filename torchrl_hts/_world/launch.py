"""Which of how many processes this one is, by what a launcher has put into the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Place", "place", "starts_again"]

_FIRST_PORT, _PORTS = 20_000, 20_000  # below those that systems give away by themselves
_APART = 101  # ports of the steps of one job, some of which may run at once


class Place(NamedTuple):
    """A process among those of its run.

    Attributes:
        rank, size: this process, and how many there are.
        address, port: where rank 0 listens.
        local_size: so many of them run on this machine; None: not known.
    """

    rank: int
    size: int
    address: str
    port: int
    local_size: int | None


def place(variables: Mapping[str, str]) -> Place | None:
    """This process's place; None if no launcher has given it one.

    Knows what torchrun sets (Ray Train and Kubernetes' PyTorchJob do the same), and what ``srun``
    does. A batch script of SLURM's that runs without ``srun`` is alone.

    Raises:
        ValueError: if a variable is missing, damaged or out of bounds.

    Example:
        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        >>> place(torchrun | {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
        Place(rank=1, size=4, address='node0', port=29500, local_size=2)
        >>> place({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
        True
        >>> srun = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "77"}
        >>> place(srun | {"SLURM_STEP_NODELIST": "gpu-[07-08],cpu1"})
        Place(rank=3, size=4, address='gpu-07', port=20077, local_size=None)
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        local = None
        if "LOCAL_WORLD_SIZE" in variables:
            local = _number(variables, "LOCAL_WORLD_SIZE", 1)
        size = _number(variables, "WORLD_SIZE", 1)
        if size == 1:
            return Place(_number(variables, "RANK"), size, "", 0, 1)
        rank = _number(variables, "RANK", 0, size - 1)
        return Place(rank, size, _variable(variables, "MASTER_ADDR"), _port(variables), local)
    if "SLURM_STEP_NUM_TASKS" in variables:
        size = _number(variables, "SLURM_STEP_NUM_TASKS", 1)
        if size == 1:
            return None
        address = variables.get("MASTER_ADDR") or _first_host(variables)
        step = _number(variables, "SLURM_STEP_ID") if "SLURM_STEP_ID" in variables else 0
        port = _FIRST_PORT + (_number(variables, "SLURM_JOB_ID") + step * _APART) % _PORTS
        if "MASTER_PORT" in variables:
            port = _port(variables)
        return Place(_number(variables, "SLURM_PROCID", 0, size - 1), size, address, port, None)
    return None


def starts_again(variables: Mapping[str, str]) -> bool:
    """Whether the launcher starts all again when one has ended: torchrun with ``--max-restarts``.

    Example:
        >>> starts_again({"TORCHELASTIC_MAX_RESTARTS": "3"}), starts_again({})
        (True, False)
    """
    return variables.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _first_host(variables: Mapping[str, str]) -> str:
    """The first of SLURM's short form of host names, such as ``gpu-[07-08,11],cpu1``."""
    hosts = _variable(variables, "SLURM_STEP_NODELIST")
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} names no host; set MASTER_ADDR")
    return "".join(part for part in found.groups() if part)


def _variable(variables: Mapping[str, str], name: str) -> str:
    try:
        return variables[name]
    except KeyError:
        raise ValueError(
            f"the environment says that there are several processes, and lacks {name}: start them "
            "with torchrun or srun, or set it"
        ) from None


def _port(variables: Mapping[str, str]) -> int:
    return _number(variables, "MASTER_PORT", 1, 65_535)


def _number(
    variables: Mapping[str, str], name: str, least: int = 0, most: int | None = None
) -> int:
    text = _variable(variables, name)
    if not text.isdecimal():
        raise ValueError(f"the variable {name} must be a number, got {text!r}")
    if int(text) < least or (most is not None and int(text) > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"the variable {name} must be {bounds}, got {text}")
    return int(text)
