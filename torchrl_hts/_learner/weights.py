"""Which parameters the next round acts with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_hts._policy.compiled import plain_name
from torchrl_hts._rounds.slots import policy_tensors

__all__ = ["WeightSource", "tensors_in"]


class WeightSource:
    """The newest parameters and buffers of a policy, as the user wants them.

    They are the live values of the policy when a round opens, unless `stage` puts others in their
    place, as ``update_policy_weights_`` asks.

    Args:
        policy: the policy that the collector was given.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        tensors = policy_tensors(policy)
        self._names = [name for name, _ in tensors]
        # By names that don't change where a part is compiled later.
        self._kinds = _kinds({plain_name(name): tensor for name, tensor in tensors})
        self._staged: list[Tensor] | None = None

    def _by_first_name(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same, without the further names of parameters that a policy uses several times.

        Whether it was compiled or not makes no difference to the names.
        Where they differ the last one counts, as in `torch.nn.Module.load_state_dict`.
        """
        names = {plain_name(alias): name for alias, name in _aliases(self.policy).items()}
        return {names.get(plain_name(name), name): tensor for name, tensor in given.items()}

    def _with_prefix(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The names of a plain module's tensors as those of the module that was put around it."""
        for prefix in ("module.", "function."):
            if given and all(prefix + name in self._names for name in given):
                return {prefix + name: tensor for name, tensor in given.items()}
        return given

    def _named(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """By the policy's own names, before which `AveragedModel` and others put a level."""
        named, known = self._by_first_name(self._with_prefix(given)), set(self._names)
        if named.keys() <= known:
            return named
        level, count = "module.", "n_averaged"
        inner = {name.removeprefix(level): given[name] for name in given if name != count}
        inner = self._by_first_name(self._with_prefix(inner))
        return min((named, inner), key=lambda form: len(form.keys() - known))

    def live(self) -> list[Tensor]:
        """The policy's own tensors.

        Raises:
            RuntimeError: if there are others than there were, or of other shapes or data types.
        """
        tensors = {plain_name(name): tensor for name, tensor in policy_tensors(self.policy)}
        if (kinds := _kinds(tensors)) != self._kinds:
            changed = sorted({name for name, _ in kinds.items() ^ self._kinds.items()})
            raise RuntimeError(
                "parameters or buffers of the policy were added, removed, resized or made of "
                f"another data type since the collector was made ({', '.join(changed[:5])}"
                f"{', ...' if len(changed) > 5 else ''}): write values in place (copy_, "
                "load_state_dict), or make a new collector"
            )
        return [tensors[name] for name in self._kinds]

    def generic(self) -> list[Tensor]:
        """The live values with some noise, to calibrate with.

        A layer that starts with zeros gives zeros at every batch size, and so hides what its later
        values will show.
        """
        generator = torch.Generator().manual_seed(0)
        parameters = len(list(self.policy.parameters()))
        values = [tensor.to("cpu", copy=True) for tensor in self.live()]
        for value in values[:parameters]:
            if value.is_floating_point() and value.numel():
                scale = 0.05 if value.ndim < 2 else value[0].numel() ** -0.5
                value += scale * torch.randn(value.shape, generator=generator).to(value.dtype)
        return values

    def state_dict(self) -> dict[str, Any]:
        """What is staged, by name; None where it is the live values."""
        staged = None
        if self._staged is not None:
            staged = {n: t.clone() for n, t in zip(self._names, self._staged, strict=True)}
        return {"values": staged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stage what was staged when the state was taken."""
        # Older states have the policy's own values there too, which were not to be kept.
        values = state["values"] if state.get("keep", True) else None
        self._staged = None if values is None else [values[name].clone() for name in self._names]

    def others(self) -> Sequence[Tensor]:
        """What is staged in place of the policy's own values, its parameters first; else ()."""
        return self._staged or ()

    def for_next_round(self) -> list[Tensor]:
        """The values for the round that opens now."""
        return self.live() if self._staged is None else self._staged

    @torch.no_grad()
    def stage(self, weights: nn.Module | TensorDictBase | Mapping[str, Any] | None) -> None:
        """Choose the values for the rounds that open until the next call.

        Args:
            weights: None for the policy's live values, as are tensors in its own memory, under any
                names. Or a module, a TensorDict or a dict of tensors by name, or what wraps the
                policy: their present values.

        Raises:
            TypeError: for weights of another kind.
            KeyError: for a name that the policy doesn't have.
            ValueError: for a tensor of another shape than the policy's.
        """
        given = {} if weights is None else self._named(_by_name(weights))
        unknown = sorted(given.keys() - set(self._names))
        if unknown:
            if self._are_its_own(given.values()):  # those of a part of it, as a loss has them
                self._staged = None
                return
            known = ", ".join(self._names[:5]) + (", ..." if len(self._names) > 5 else "")
            raise KeyError(
                f"the policy has no parameter or buffer {unknown[0]!r}; it has {known or 'none'}"
            )
        own = dict(zip(self._names, self.live(), strict=True))
        for name, tensor in own.items():
            shape = given.get(name, tensor).shape
            if shape != tensor.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)}; the policy's has {tuple(tensor.shape)}"
                )
        are_others = not all(_is(tensor, own[name]) for name, tensor in given.items())
        self._staged = None
        if are_others:
            self._staged = [torch.empty_like(tensor, device="cpu") for tensor in own.values()]
            for target, (name, tensor) in zip(self._staged, own.items(), strict=True):
                target.copy_(given.get(name, tensor))

    def _are_its_own(self, tensors: Iterable[Tensor]) -> bool:
        own = self.live()
        return all(any(_is(tensor, other) for other in own) for tensor in tensors)


def _is(tensor: Tensor, own: Tensor) -> bool:
    """Whether a tensor is a view of the same values in the same order."""
    if tensor.shape != own.shape or tensor.data_ptr() != own.data_ptr():
        return False
    steps = zip(tensor.stride(), own.stride(), own.shape, strict=True)
    return all(one == other for one, other, size in steps if size > 1)


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and data type of each, by name."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _aliases(policy: nn.Module) -> dict[str, str]:
    """For each name of a tensor, as state dicts have them all, the one that it goes by here."""
    named = [
        *policy.named_parameters(remove_duplicate=False),
        *policy.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def tensors_in(
    weights: nn.Module | TensorDictBase | Mapping[str, Any] | None,
) -> Iterator[Tensor]:
    """The tensors of what `WeightSource.stage` takes."""
    yield from () if weights is None else _by_name(weights).values()


def _by_name(weights: nn.Module | TensorDictBase | Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(weights, nn.Module):
        return dict(policy_tensors(weights))
    if not isinstance(weights, TensorDictBase):
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
            raise TypeError(
                "weights must be a module, a TensorDict, or a dict of tensors by name, the same "
                f"for all actors; got {weights!r}"
            )
        weights = TensorDict(dict(weights), [])
    flat: dict[str, Tensor] = weights.flatten_keys(".").to_dict()
    return {name: torch.as_tensor(tensor) for name, tensor in flat.items()}
