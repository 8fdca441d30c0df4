"""Transforms around a batch of environments, made into those of one environment.

Axes: N environments of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torchrl.data import Composite
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv
from torchrl.envs import transforms as known
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_hts._processes.messages import pickled, unpickled
from torchrl_hts._rounds.keys import Key, as_path

__all__ = ["around_one", "around_one_of"]

# Whose state is of the whole batch, or of processes that share it: what to do instead.
_IN_THE_POLICY = ", or normalise in the policy, with torchrl_hts.RunningNorm"
_OF_THE_BATCH: dict[type[Transform], str] = {
    known.VecNorm: _IN_THE_POLICY,
    known.VecNormV2: _IN_THE_POLICY,
    known.BatchSizeTransform: "",
    known.TrajCounter: "; batches of a collector have ('collector', 'traj_ids') already",
}

# What is kept of past steps or of specs, of the batch's shape: attributes that begin so.
_BUFFERS = {known.CatFrames: "_cat_buffers_", known.TimeMaxPool: "_maxpool_buffer_"}

# Tensors that may have a row for each environment.
_ROWS: dict[type[Transform], tuple[str, ...]] = {
    known.ObservationNorm: ("loc", "scale"),
    known.RewardScaling: ("loc", "scale"),
    known.ActionScaling: ("loc", "scale"),
    known.RewardClipping: ("clamp_min", "clamp_max"),
}


def around_one(transform: Transform) -> bytes:
    """A pickled list of a transform's parts, for one environment.

    Raises:
        TypeError: for transforms that can't be put around each environment alone.
    """
    transforms = unpickled(pickled(list(_each(transform))))
    for each in transforms:
        _forget_batch(each)
    return pickled(transforms)


def around_one_of(env: TransformedEnv, batch: BatchedEnvBase) -> list[bytes]:
    """For each of a batch's environments, what is around the whole batch, as a pickled list.

    What transforms have kept of the batch is undone. Tensors with a row for each environment (the
    ``loc`` of an ``ObservationNorm``) are taken apart. `env` is left as it is.

    Args:
        env: the transforms, around a batched environment.
        batch: that batched environment.

    Raises:
        TypeError: for transforms that can't be put around each environment alone, or that give
            other shapes there than around the batch.
    """
    whole = pickled(list(_each(env.transform)))
    own, count = unpickled(whole), batch.num_workers
    for each in own:
        _forget_batch(each, count)
    ndims = _ndims_before(env.base_env, unpickled(whole))
    rows = [_rows(each, ndim, count) for each, ndim in zip(own, ndims, strict=True)]
    if any(rows):
        alone = []
        for index in range(count):
            for each, names in zip(own, rows, strict=True):
                for name, tensor in names.items():
                    setattr(each, name, tensor[index if len(tensor) > 1 else 0].clone())
            alone.append(pickled(own))
    else:
        alone = [pickled(own)] * count
    _check_shapes(env.base_env, whole, alone[0], type(batch).__name__)
    return alone


def _each(transform: Transform) -> Iterator[Transform]:
    """Copies of a transform's parts, which are in no environment."""
    if type(transform) is Compose:  # others of that kind may do more than their parts
        for part in transform:
            yield from _each(part)
    else:
        yield transform.clone()


def _forget_batch(transform: Transform, count: int | None = None) -> None:
    """Take from a transform what it knows of the batch that it was around.

    Args:
        transform: a copy that shares nothing with the one around the batch.
        count: how many environments the batch has; None where it was never put around any.
    """
    for part in transform.modules():
        for kind, advice in _OF_THE_BATCH.items():
            if isinstance(part, kind):
                raise TypeError(
                    f"a {type(part).__name__} around a batched environment works on all of its "
                    "environments together, which step one by one here: put it into the factory "
                    f"of each{advice}"
                )
        if isinstance(part, known.TensorDictPrimer):
            _forget_expansion(part, count)
        for kind, prefix in _BUFFERS.items():
            if isinstance(part, kind):
                _forget_buffers(part, prefix)
        if isinstance(part, known.RandomTruncationTransform):
            part._horizons = part._first_episode = None
            part._initialized = False


def _forget_expansion(primer: known.TensorDictPrimer, count: int | None) -> None:
    """Leave a primer its specs for one environment: with ``expand_specs=False`` they are of all."""
    if count is None:
        return
    specs = primer.primers
    of_all = all(spec.shape[:1] == (count,) for spec in specs.values(True, True))
    if primer.expand_specs is False and not specs.shape and of_all:
        specs.shape = torch.Size([count])
    if primer.primers.shape[:1] == (count,):
        primer.primers = primer.primers[0]
    primer._validated = False


def _forget_buffers(transform: Transform, prefix: str) -> None:
    for name in [*vars(transform), *transform._buffers]:
        if name.startswith(prefix):
            setattr(transform, name, UninitializedBuffer())


def _rows(transform: Transform, ndim: int, count: int) -> dict[str, torch.Tensor]:
    """The tensors of a transform that have the batch's dimension, of length 1 or N; by name.

    Args:
        transform: to look at.
        ndim: dimensions of what it changes, in the batch.
        count: N.
    """
    names = next((names for kind, names in _ROWS.items() if isinstance(transform, kind)), ())
    tensors = {name: getattr(transform, name) for name in names}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor is not None
        and not is_lazy(tensor)
        and tensor.ndim == ndim > 0
        and len(tensor) in (1, count)
    }


class _Specified(EnvBase):  # type: ignore[misc]
    """An environment that has specs, and can't be played."""

    def __init__(self, specs: Composite, device: Any) -> None:
        super().__init__(device=device, batch_size=specs.shape)
        for part in ("input_spec", "output_spec"):
            for name, spec in specs[part].items():
                if spec is not None:
                    setattr(self, name, spec)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        raise NotImplementedError

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError


def _ndims_before(base: EnvBase, transforms: list[Transform]) -> list[int]:
    """For each transform around a batch, the dimensions of what it changes; 0 if nobody knows."""
    ndims = [0] * len(transforms)
    # What raises here does so in the environments too, which say more of it.
    with contextlib.suppress(Exception):
        env = TransformedEnv(_Specified(base.specs.clone(), base.device), Compose())
        for index, transform in enumerate(transforms):
            if any(isinstance(transform, kind) for kind in _ROWS):
                keys = [*(transform.in_keys or ()), *(transform.in_keys_inv or ())]
                ndims[index] = _ndim(env, keys or env.reward_keys)
            env.append_transform(transform)
    return ndims


def _ndim(env: EnvBase, keys: Iterable[Any]) -> int:
    """The least number of dimensions among these entries of an environment; 0 without them."""
    paths = {as_path(key) for key in keys}
    return min((spec.ndim for key, spec in _leaves(env.specs) if key[2:] in paths), default=0)


def _leaves(specs: Composite) -> Iterator[tuple[Key, Any]]:
    for key, spec in specs.items(True, True):
        yield as_path(key), spec


def _check_shapes(base: EnvBase, whole: bytes, alone: bytes, name: str) -> None:
    """Refuse transforms that give one environment something else than each of a batch."""
    around_all = _shapes(lambda: base.specs.clone(), base, whole)
    around_first = _shapes(lambda: base.specs[0].clone(), base, alone)
    if isinstance(around_all, Exception):  # which the environment itself will tell
        return
    if isinstance(around_first, Exception):
        raise _misfit(name, str(around_first)) from around_first
    for key in {**around_all, **around_first}:
        of_all, of_one = around_all.get(key), around_first.get(key)
        wanted = None if of_all is None else (of_all[0][1:], of_all[1])
        if wanted != of_one:
            said = f"{key[-1]!r} is {_said(of_one)}, but one row of the batch is {_said(wanted)}"
            raise _misfit(name, said)


def _misfit(name: str, said: str) -> TypeError:
    return TypeError(
        f"the transforms around this {name} fit its whole batch, but none of its environments "
        f"alone: {said}. If they have seen its whole batch (check_env_specs, a rollout or reading "
        "its specs does that), give the callable that makes it, or a fresh one; if they are made "
        "for the batch, put such as are made for one environment into the factory of each"
    )


def _said(found: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if found is None else f"{found[1]} of shape {list(found[0])}"


_Shapes = dict[Key, tuple[torch.Size, torch.dtype]]


def _shapes(specs: Callable[[], Composite], base: EnvBase, sent: bytes) -> _Shapes | Exception:
    """Shapes and dtypes of what an environment with these specs gives with transforms."""
    try:
        env = TransformedEnv(_Specified(specs(), base.device), Compose(*unpickled(sent)))
        return {key: (spec.shape, spec.dtype) for key, spec in _leaves(env.specs)}
    except Exception as error:
        return error
