"""Environments that the main process has registered, so that workers can make them by id too.

``gymnasium.make`` finds an environment in a registry that each process has to itself. What the main
process has registered, itself or by importing a package, goes along with each worker. Most of it
is plain data: names of modules and classes, and keyword arguments. What is not, such as a class as
entry point, is unpickled when somebody asks for it: it may need packages that nobody else needs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import pickle
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from types import FrameType, ModuleType
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from torchrl_hts._processes.messages import pickled, unpickled

__all__ = ["Registrations", "explaining_what_is_missing"]


@dataclass(frozen=True)
class Registrations:
    """What one process has registered.

    Attributes:
        own: the pickled attributes of each spec of gymnasium's own environments,
        own_digest: by which a process knows that it has the same.
        plain: the pickled attributes of each other spec that is plain data.
        others: of those left its id and the pickled spec, or, as a str, why it can't be pickled.
    """

    own: bytes
    own_digest: bytes
    plain: bytes
    others: tuple[tuple[str, bytes | str], ...]

    @classmethod
    def here(cls) -> Registrations:
        """Those of this process now."""
        own, plain, others = [], [], []
        for spec in list(registration.registry.values()):
            if _is_gymnasiums(spec):
                own.append(vars(spec))
            elif type(spec) is EnvSpec and _is_plain(spec):
                plain.append(vars(spec))
            else:
                others.append((spec.id, _sent(spec)))
        return cls(pickle.dumps(own), _digest(own), pickle.dumps(plain), tuple(others))

    def take_over(self, started_with: Collection[str]) -> None:
        """Register all of it in this process, in the place of what has the same id here.

        What modules register as they are imported from now on doesn't replace it: the main process
        has imported them as well, before whatever else it has done. What is registered otherwise,
        by a factory, does.

        Args:
            started_with: of no concern here.
        """
        registry = registration.registry
        plain: list[dict[str, Any]] = pickle.loads(self.plain)
        if self.own_digest != _OWN_DIGEST:
            for env_id in [env_id for env_id, spec in registry.items() if _is_gymnasiums(spec)]:
                del registry[env_id]
            plain += pickle.loads(self.own)
        for attributes in plain:
            spec = registry[attributes["id"]] = object.__new__(EnvSpec)
            spec.__dict__ = attributes
        registry.update({env_id: _LateSpec(env_id, sent) for env_id, sent in self.others})
        unsent = {env_id for env_id, sent in self.others if isinstance(sent, str)}
        kept = {attributes["id"] for attributes in plain} | {env_id for env_id, _ in self.others}
        _be_careful(kept - unsent, unsent)


def _digest(specs: list[dict[str, Any]]) -> bytes:
    return hashlib.sha256(repr(specs).encode()).digest()


def _is_plain(spec: EnvSpec) -> bool:
    """Whether what a spec holds is plain data, and means the same in another process."""
    if spec.additional_wrappers or not (spec.kwargs == {} or _is_data(spec.kwargs)):
        return False
    places = (spec.entry_point, spec.vector_entry_point)
    return all(place is None or (isinstance(place, str) and not _is_of(place)) for place in places)


def _is_data(value: object) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(_is_data(k) and _is_data(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_data, value))
    return type(value) in (str, int, float, bool, type(None))


def _is_of(place: str) -> bool:
    """Whether an entry point lies in a module that goes along by value: workers can't import it."""
    module = place.partition(":")[0]
    return module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()


def _is_gymnasiums(spec: EnvSpec) -> bool:
    """Whether it is plain data and makes one of gymnasium's own environments."""
    place = spec.entry_point or spec.vector_entry_point
    is_own = isinstance(place, str) and place.startswith("gymnasium.envs.")
    return is_own and type(spec) is EnvSpec and _is_plain(spec)


# In a worker's server: before anybody has registered anything.
_OWN_DIGEST = _digest(
    [vars(spec) for spec in registration.registry.values() if _is_gymnasiums(spec)]
)


def _sent(spec: EnvSpec) -> bytes | str:
    if isinstance(spec, _LateSpec):  # on to a process that this one has started
        return spec._sent
    try:
        found: dict[str, Any] = {
            name: registration.load_env_creator(place)
            for name in ("entry_point", "vector_entry_point")
            if isinstance(place := getattr(spec, name), str) and _is_of(place)
        }
        wrappers = {  # which gymnasium looks for by their places alone
            wrapper.entry_point: registration.load_env_creator(wrapper.entry_point)
            for wrapper in spec.additional_wrappers
            if _is_of(wrapper.entry_point)
        }
        return pickled((replace(spec, **found) if found else spec, wrappers))
    except Exception as error:  # whatever pickling its parts raises
        return f"{type(error).__name__}: {error}"


class _LateSpec(EnvSpec):
    """A spec that becomes what it stands for when it is asked for more than its name."""

    def __init__(self, env_id: str, sent: bytes | str) -> None:
        self.id, self._sent = env_id, sent
        self.__post_init__()  # its namespace, name and version, by which gymnasium looks for it


def _come_true(spec: EnvSpec) -> None:
    """Make a late spec what it stands for.

    Raises:
        TypeError: if it could not be sent, or what was sent can't be unpickled here.
    """
    sent = vars(spec)["_sent"]
    cause, why = None, sent
    if isinstance(sent, bytes):
        try:
            real, wrappers = unpickled(sent)
        except Exception as error:
            cause, why = error, f"{type(error).__name__}: {error}"
        else:
            for place, wrapper in wrappers.items():
                _put(place, wrapper)
            spec.__dict__, spec.__class__ = vars(real), type(real)
            return
    raise TypeError(
        f"the environment {spec.id!r} is registered in the main process, but can't be sent to this "
        f"one, where it is to be made: {why}. Register it, or import the module that registers it, "
        "inside the factory"
    ) from cause


def _put(place: str, value: object) -> None:
    """Let ``"module:name"`` be found, in a module of the main process if need be."""
    module, _, name = place.partition(":")
    try:
        home = importlib.import_module(module)
    except ImportError:
        home = sys.modules[module] = ModuleType(module)
    if not hasattr(home, name):
        setattr(home, name, value)


def _late(name: str) -> property:
    def get(spec: EnvSpec) -> Any:
        _come_true(spec)
        return getattr(spec, name)

    def set_(spec: EnvSpec, value: Any) -> None:
        _come_true(spec)
        setattr(spec, name, value)

    return property(get, set_)


for _field in fields(EnvSpec):
    if _field.name not in ("id", "namespace", "name", "version"):
        setattr(_LateSpec, _field.name, _late(_field.name))


def _be_careful(kept: Collection[str], given_up: Collection[str]) -> None:
    """Let `gymnasium.register` know what has come from the main process.

    Args:
        kept: ids that an import doesn't register again.
        given_up: ids that stand for what could not be sent.
    """
    register = registration.register
    placed = {*kept, *given_up}

    @functools.wraps(register)
    def register_here(id: str, *args: Any, **kwargs: Any) -> None:
        namespace, name, version = registration.parse_env_id(id)
        namespace = registration.current_namespace or namespace
        full_id = registration.get_env_id(namespace, name, version)
        if full_id in placed:
            if full_id in kept and _in_import():
                return
            placed.discard(full_id)
            del registration.registry[full_id]  # otherwise gymnasium warns of two of them
        register(id, *args, **kwargs)

    for module in (registration, gym.envs, gym):
        setattr(module, register.__name__, register_here)


def _in_import() -> bool:
    """Whether a module is executed, other than the one that this process was started for."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def explaining_what_is_missing() -> Iterator[None]:
    """Let the error of an environment that nobody has registered say what there is to do."""
    try:
        yield
    except gym.error.UnregisteredEnv as error:
        said = str(error)
        error.args = (
            f"{said}{'' if said.endswith(('.', '?')) else '.'} Environments are made in worker "
            "processes, which know those that the main process had registered when it started "
            "them: register it, or import the package that registers it, before that or inside "
            "the factory",
        )
        raise
