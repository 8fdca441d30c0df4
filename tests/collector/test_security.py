"""A checkpoint runs no code that comes with it; memory is the user's alone; nobody listens."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import pickle
import random
import re
import stat
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import script_paths  # noqa: F401  so that the scripts are found
import torch
from environments import EchoEnv
from gymnasium.utils import EzPickle
from hand_pickles import call, forged, method, name, new, value
from policies import marked
from processes import processes_below
from support.checkpoints import Checkpoints
from support.errors import RecipeError

from torchrl_hts import HTSCollector, WorkerError
from torchrl_hts._learner.packing import to_bytes, to_tensor
from torchrl_hts._rounds.shared_memory import SharedMemory
from torchrl_hts.env_state import CannotSaveError, names_of, restore_environment, save_environment


def double(x: float) -> float:
    """A function that `Game` may be given."""
    return 2 * x


def forget(path: str) -> None:
    """A function of the environment's own package, which it never has."""
    os.remove(path)


class Piece:
    """Made when a game begins."""

    def __init__(self, path: str = "") -> None:
        if path:
            forget(path)


class Closing(Piece):
    """Does something at its end."""

    path = ""

    def __del__(self) -> None:
        if self.path:
            forget(self.path)


class Remade(EzPickle, Piece):
    """Its constructor is called when it is unpickled."""


class Game(EchoEnv):
    """Holds whatever it is given."""

    def __init__(self, rule: Callable[[float], float] = double) -> None:
        super().__init__()
        self.rule, self.bound = rule, self.play
        self.held: Any = None

    def play(self) -> None:
        """A method that it has from the start."""


class Holder(EchoEnv):
    """Holds one thing, and no method."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held


US, REMOVE = __name__, "it names posix.remove"


def attacks(victim: str) -> dict[str, tuple[bytes, str]]:
    """Pickles that remove a file, or get hold of what could; and what is said of them."""
    return _by_functions(victim) | _by_classes(victim) | _by_references()


def _by_functions(victim: str) -> dict[str, tuple[bytes, str]]:
    code = f"__import__('os').remove({victim!r})"
    return {
        "os": (call("posix", "remove", victim), REMOVE),
        "eval": (call("builtins", "eval", code), "it names builtins.eval"),
        "exec": (call("builtins", "exec", code), "it names builtins.exec"),
        "import": (call("builtins", "__import__", "antigravity"), "builtins.__import__"),
        "getattr": (name("builtins", "getattr"), "it names builtins.getattr"),
        "a process": (call("subprocess", "Popen", ["rm", victim]), "subprocess.Popen"),
        "to be called later": (
            name("functools", "partial") + name("posix", "remove") + pickle.TUPLE1 + pickle.REDUCE,
            REMOVE,
        ),
        "a function of the package": (call(US, "forget", victim), f"it names {US}.forget"),
        "through a module's imports": (name(US, "os.remove"), f"it names {US}.os.remove"),
        "what loads by name": (
            call("gymnasium.envs.registration", "load_env_creator", "os:remove"),
            "load_env_creator",
        ),
    }


def _by_classes(victim: str) -> dict[str, tuple[bytes, str]]:
    harmful = pickle.dumps(f"__import__('os').remove({victim!r})")
    return {
        "a constructor": (
            name("copyreg", "_reconstructor")
            + pickle.MARK
            + 2 * name(US, "Piece")
            + value(victim)
            + pickle.TUPLE
            + pickle.REDUCE,
            "it names copyreg._reconstructor",
        ),
        "an old opcode": (
            b"(V%b\niposix\nremove\n" % victim.encode(), "a class in a way that states don't",
        ),
        "another": (b"(cposix\nremove\nV%b\no" % victim.encode(), REMOVE),
        "another that calls what is known": (
            b"(c%b\nPiece\nV%b\no" % (US.encode(), victim.encode()), "a class in a way that",
        ),
        "a constructor of the package": (call(US, "Piece", victim), f"it names {US}.Piece"),
        "a class with an end": (new(US, "Closing", {"path": victim}), f"it names {US}.Closing"),
        "a class that is made anew": (
            new(US, "Remade", {"_ezpickle_args": (victim,), "_ezpickle_kwargs": {}}),
            f"it names {US}.Remade",
        ),
        "a class that unpickles": (
            new("gymnasium.vector.utils.misc", "CloudpickleWrapper", harmful),
            "CloudpickleWrapper",
        ),
        "a class that is imported": (name(US, "subprocess.Popen"), "subprocess.Popen"),
    }  # fmt: skip


def _by_references() -> dict[str, tuple[bytes, str]]:
    array = call("numpy", "dtype", "f8", False, True)
    return {
        "a module": (value(("module", "os")) + pickle.BINPERSID, "it names the module.os"),
        "a module that isn't loaded": (
            value(("module", "antigravity")) + pickle.BINPERSID, "the module.antigravity",
        ),
        "an attribute of a class": (
            name(US, "Game") + value((None, {"step": 1})) + pickle.BUILD, "it names builtins.type",
        ),
        "an attribute of what is there": (
            value((0,)) + pickle.BINPERSID + value({"t": 1}) + pickle.BUILD, f"{US}.Game",
        ),
        "a method": (method(value(b"x"), "decode"), "it names builtins.bytes.decode"),
        "a method of its own": (
            method(new(US, "Piece", {}), "__init__"), f"it names {US}.Piece.__init__",
        ),
        "a method of an array": (method(array, "newbyteorder"), "newbyteorder"),
        "references out of thin air": (
            name("torchrl_hts.env_state.names", "view") + pickle.MARK
            + call("builtins", "bytearray", 8) + value(0) + array.replace(b"f8", b"O8")
            + value((1,)) + value((8,)) + pickle.TUPLE + pickle.REDUCE,
            "can't be read as one",
        ),
    }  # fmt: skip


ATTACKS = sorted(attacks(""))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_state_of_an_environment(attack: str, tmp_path: Path) -> None:
    """It is refused for what it does, and does nothing."""
    victim = tmp_path / "victim"
    victim.touch()
    contents, said = attacks(str(victim))[attack]
    env = Game()
    env.reset(seed=1)
    state = save_environment(env)
    assert restore_environment(Game(), state) is None
    new = Game()
    before = dict(vars(new))
    with pytest.raises(ValueError, match=f"can't be read here: .*{re.escape(said)}") as e:
        restore_environment(new, forged(state, contents))
    del e
    gc.collect()
    assert victim.exists()
    assert vars(new) == before


def test_what_may_be_named_can_be_read() -> None:
    """The pickles above fail for what they name, not for how they are written."""
    state = save_environment(Game())
    known = name(US, "double"), new(US, "Piece", {"a": 1}), call("numpy", "dtype", "f8", 0, 1)
    listed = pickle.MARK + b"".join(known) + method(value([1]), "copy") + pickle.LIST
    count = len(json.loads(state[state.index(b"{") :].partition(b"\n")[0])["names"][0])
    everything = [value(None)] * count + [listed]
    function, piece, dtype, copy = restore_environment(Game(), forged(state, *everything))
    assert function is double
    assert type(piece) is Piece
    assert piece.a == 1
    assert (dtype, copy()) == (np.dtype("f8"), [1])


@pytest.mark.parametrize("held", [re.compile("a+"), [1].copy, random.Random(3).random])
@pytest.mark.parametrize("late", [False, True])
def test_what_is_saved_can_be_restored(held: Any, late: bool) -> None:
    env, other = (Holder(None if late else copy.deepcopy(held)) for _ in range(2))
    names, others_names = names_of(env), names_of(other)
    env.held = copy.deepcopy(held)
    restore_environment(other, save_environment(env, names=names), names=others_names)
    assert repr(other.held).partition(" at ")[0] == repr(held).partition(" at ")[0]


@pytest.mark.parametrize("held", [np.mean, np.sin, " and ".join, math.sqrt])
def test_what_an_environment_has_when_it_is_new_can_be_restored(held: Any) -> None:
    """Even after it is gone."""
    env, other = Holder(held), Holder(held)
    names = names_of(other)
    other.held = None
    restore_environment(other, save_environment(env, names=names_of(env)), names=names)
    assert other.held.__name__ == held.__name__


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (forget, f"it names {US}.forget"),
        (os, "it names the module.os"),
        (subprocess.Popen, "it names subprocess.Popen"),
        (Closing(), r"Closing.__del__ may undo"),
        ([np.zeros(3).tofile], "it names numpy.ndarray.tofile"),
        (Piece().__init__, f"it names {US}.Piece.__init__"),
    ],
)
def test_what_could_not_be_read_is_not_saved(held: Any, reason: str) -> None:
    env = Game()
    names = names_of(env)
    env.reset(seed=1)
    env.held = Piece(), env.rule, env.bound, env.np_random.normal, [].append
    save_environment(env, names=names)
    env.held = held
    with pytest.raises(CannotSaveError, match=f"'held'.*{re.escape(reason)}"):
        save_environment(env, names=names)


def test_a_checkpoint_with_a_forged_environment(tmp_path: Path) -> None:
    """In the whole collector: the executor refuses it, and says why."""
    victim = tmp_path / "victim"
    victim.touch()
    contents, said = attacks(str(victim))["os"]
    with HTSCollector([Game], marked(), frames_per_batch=4, total_frames=16) as collector:
        next(iter(collector))
        state = collector.state_dict()
    genuine = zlib.decompress(to_bytes(state["environments"][0]))
    state["environments"][0] = to_tensor(zlib.compress(forged(genuine, contents)))
    file = tmp_path / "state.pt"
    torch.save(state, file)
    with HTSCollector([Game], marked(), frames_per_batch=4, total_frames=16) as collector:
        collector.load_state_dict(torch.load(file, weights_only=True))
        with pytest.raises(WorkerError, match=f"(?s)environment 0 failed.*{said}"):
            list(collector)
    assert victim.exists()


class Malicious:
    """Removes a file when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.remove, (str(self.victim),)


def test_a_checkpoint_of_a_recipe(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(1, {"values": torch.arange(3), "more": Malicious(victim)})
    with pytest.raises(RecipeError, match=f"{path.name} is damaged, .* or not only data"):
        checkpoints.load()
    assert victim.exists()
    torch.load(path, weights_only=False)
    assert not victim.exists(), "it does no harm at all"


@pytest.mark.parametrize("storage_dir", [None, "."])
def test_memory_is_the_users_alone(storage_dir: str | None, tmp_path: Path) -> None:
    fd = SharedMemory.create_fd(storage_dir and str(tmp_path))
    status = os.fstat(fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_nlink == 0, "it has no name"
    os.close(fd)
    assert not list(tmp_path.iterdir())


def sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd) if os.path.lexists(fd) else ""
        found |= set(re.findall(r"^socket:\[(\d+)\]$", target))
    return found


def test_no_socket_listens_or_has_a_name() -> None:
    """All are pairs, which nobody else can connect to."""
    before = sockets(os.getpid())
    with HTSCollector([EchoEnv] * 2, marked(), frames_per_batch=8, num_executors=2) as collector:
        next(iter(collector))
        pids = {os.getpid(), *processes_below(os.getpid())}
        # Of other tests, and stay until the end: W&B's, and what forks ranks.
        others = (b"wandb-core", b"multiprocessing.forkserver")
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        pids -= {pid for pid in pids if any(name in commands[pid] for name in others)}
        assert set(collector.worker_pids().values()) < pids
        ours = set().union(*map(sockets, pids)) - before
        assert len(ours) >= 6, "two servers, three workers and both ends"
        rows = {}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *path = line.split()
            rows[inode] = (int(flags, 16), path)
        # Of no other family, neither listening nor named.
        assert [rows.get(inode) for inode in ours] == [(0, [])] * len(ours)
