"""What TorchRL environments return, kept from what would change it without a word.

``GymWrapper`` and its like turn what their environment returns into the data types of their specs:
1e39 becomes infinite, and 256 zero where the spec is of uint8. And an environment may hand out
tensors of its own, in which its next reset writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, MultiOneHot, NonTensor, OneHot, TensorSpec
from torchrl.envs import EnvBase, GymLikeEnv, TransformedEnv

from torchrl_hts._executor.values import FLOAT32_MAX, checked_reward, converted
from torchrl_hts._rounds.keys import as_path
from torchrl_hts._rounds.shared_memory import Field

__all__ = ["guard_conversions", "guard_memory"]

_OTHERWISE = (OneHot, MultiOneHot, NonTensor)  # specs that encode what they are given


def guard_conversions(env: EnvBase) -> None:
    """Let an environment raise InvalidValueError where it would convert away what a value says.

    Looked at are rewards and observations of a ``GymLikeEnv``, with any transforms.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if not isinstance(env, GymLikeEnv):
        return
    base, read_reward, read_obs = env, env.read_reward, env.read_obs

    def guarded_reward(reward: Any) -> Any:
        _check_reward(reward)
        return read_reward(reward)

    def guarded_obs(observations: Any) -> Any:
        spec = base.observation_spec
        if isinstance(observations, Mapping):
            _check_observations(observations, spec, ())
        else:  # is for the first of the specs; the others are of what is read out of infos
            key = next(iter(spec.keys(True, True)), None)
            if key is not None:
                _check_observation(observations, spec[key], as_path(key))
        return _own(read_obs(observations))  # or the next step shows in what was before it

    base.read_reward, base.read_obs = guarded_reward, guarded_obs


def guard_memory(env: EnvBase) -> None:
    """Let what an environment's step has returned stay as it is while what has ended is reset.

    TorchRL resets it before anybody sees the step, and the reset may write where that lies.
    """
    step, reset = env.step, env.reset
    last: list[TensorDictBase] = []

    def guarded_step(tensordict: TensorDictBase) -> TensorDictBase:
        last[:] = [step(tensordict)]
        return last[0]

    def guarded_reset(tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if last and kwargs.get("select_reset_only"):  # as `EnvBase.maybe_reset` does
            last[0].set("next", last[0].get("next").clone())
        last.clear()
        return reset(tensordict, **kwargs)

    env.step, env.reset = guarded_step, guarded_reset


def _own(value: Any) -> Any:
    """The same in memory of its own."""
    if isinstance(value, Tensor | TensorDictBase):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: _own(part) for name, part in value.items()}
    return value


def _check_reward(reward: Any) -> None:
    if type(reward) is float and -FLOAT32_MAX <= reward <= FLOAT32_MAX:
        return
    if isinstance(reward, Tensor):
        return
    for number in np.asarray(reward).ravel().tolist():  # there may be several
        if isinstance(number, int | float) and number == number:
            checked_reward(number)


def _check_observations(values: Mapping[Any, Any], spec: Composite, path: tuple[str, ...]) -> None:
    for name, value in values.items():
        below = spec.get(name, None)
        if isinstance(below, Composite) and isinstance(value, Mapping):
            _check_observations(value, below, (*path, name))
        elif below is not None and not isinstance(below, Composite):
            _check_observation(value, below, (*path, name))


def _check_observation(value: Any, spec: TensorSpec, path: tuple[str, ...]) -> None:
    if isinstance(value, Tensor) or isinstance(spec, _OTHERWISE):
        return
    name = str(spec.dtype).removeprefix("torch.")
    found = np.asarray(value)
    if found.dtype == name or found.dtype.kind not in "iuf" or name == "bfloat16":
        return
    if found.dtype.kind == "f" and np.dtype(name).kind in "iub":
        with np.errstate(invalid="ignore"):
            if (found.astype(name) == found).all():  # whole numbers
                return
    converted(found, Field(path, (), name))
