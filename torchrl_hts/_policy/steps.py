"""A policy without TensorDict's and nn.Module's bookkeeping, where that is all a module adds.

On the few rows of an actor's batch a small network costs less than what surrounds it. A policy of
plain modules in sequence comes down to steps, functions over a dict of its tensors. Whether the
steps give the policy's own bits is for `CounterPolicy` to try out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.common import _OutKeysSelect
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, SafeProbabilisticModule
from torchrl.modules import distributions as rl_dist
from torchrl.modules.distributions.utils import sample_and_log_prob

from torchrl_hts._policy.array_draws import are_fixed, array_draw
from torchrl_hts._policy.draws import WordStream, bind
from torchrl_hts._policy.numpy_layers import FLOATS, NumpyTanh

__all__ = ["Step", "exact_step", "flatten", "plain_layers", "quick_step"]

Step = Callable[[dict[Any, Any], WordStream], None]
_LOC_SCALE = {"loc", "scale"}


def flatten(module: Any) -> list[Any] | None:
    """The modules of nested sequences in order; None if one isn't of TensorDict's plain kinds."""
    forward = type(module).forward
    # What select_out_keys() hooks in only leaves keys out, which the caller does as well.
    hooks = [h for h in module._forward_hooks.values() if not isinstance(h, _OutKeysSelect)]
    if hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return None
    if forward in (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward):
        flat: list[Any] = []
        for part in module._module_iter():
            modules = flatten(part)
            if modules is None:
                return None
            flat += modules
        return flat
    if forward is TensorDictModule.forward:
        return None if module._kwargs or module.method or module.method_kwargs else [module]
    sampling = (ProbabilisticTensorDictModule.forward, SafeProbabilisticModule.forward)
    return [module] if forward in sampling and len(module.dist_sample_keys) == 1 else None


def plain_layers(net: nn.Module) -> list[nn.Module] | None:
    """The layers of nested plain sequences in order; None if calling them isn't all that is done.

    A small layer costs less than what `nn.Module` does to call it.
    """
    plain = type(net).__call__ is nn.Module.__call__ and "forward" not in net.__dict__
    if not plain or net._forward_hooks or net._forward_pre_hooks:
        return None
    forward = type(net).forward
    if forward is nn.Sequential.forward or (forward is MLP.forward and not net._reshape_out):
        parts = [plain_layers(part) for part in net._modules.values() if part is not None]
        flat = [layer for part in parts for layer in part or ()]
        return flat if all(parts) else None
    return [net]


def _call(layer: nn.Module, before: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """How a layer is computed of what the one before it has made."""
    if type(layer) is NumpyTanh and type(before) is nn.Linear:
        return layer.overwrite
    if type(layer) is nn.Linear:
        parameters: Any = layer._parameters  # an nn.Module's attributes are slow to look up
        return lambda x: F.linear(x, parameters["weight"], parameters["bias"])
    forward: Callable[[Tensor], Tensor] = layer.forward
    return forward


def exact_step(module: Any, kind: ExplorationType) -> Step:
    """The step of a module that `flatten` returned: the same operations, so the same bits."""
    if isinstance(module, TensorDictModule):
        net, in_keys, out_keys = module.module, module.in_keys, module.out_keys_source
        layers = plain_layers(net) if len(in_keys) == 1 else None
        if layers:
            (in_key,) = in_keys
            calls = [*map(_call, layers, [None, *layers[:-1]])]
            leaves = [layer for layer in layers if not layer._modules]
            hooks = leaves[0]._forward_hooks if leaves else {}

            def compute_layers(env: dict[Any, Any], noise: WordStream) -> None:
                value = env[in_key]
                if hooks:  # the calibration looks into all the leaves
                    value = net(value)
                else:
                    for call in calls:
                        value = call(value)
                _write(env, out_keys, value)

            return compute_layers

        def compute(env: dict[Any, Any], noise: WordStream) -> None:
            _write(env, out_keys, net(*[env[key] for key in in_keys]))

        return compute

    (key,) = module.dist_sample_keys
    score = module.log_prob_key if module.return_log_prob else None
    random = kind is ExplorationType.RANDOM
    reused: dict[torch.Size, Any] = {}
    reuse = module.distribution_class is rl_dist.TanhNormal and {*module.dist_keys} == _LOC_SCALE
    reuse = reuse and are_fixed(module.distribution_kwargs)

    def distribution(env: dict[Any, Any]) -> Any:
        """As the module makes it; a TanhNormal, slow to make, is updated instead."""
        if not reuse:
            return module.get_dist(env)
        params = {name: env[at] for name, at in zip(module.dist_keys, module.in_keys, strict=True)}
        dist = reused.get(params["loc"].shape)
        if dist is None:
            return reused.setdefault(params["loc"].shape, module.get_dist(env))
        dist.update(**params)
        return dist

    # TorchRL's module scores a fresh draw before it is rounded where it can, tensordict's doesn't.
    at_once = score and random and isinstance(module, SafeProbabilisticModule)

    def sample(env: dict[Any, Any], noise: WordStream) -> None:
        dist = distribution(env)
        if random:
            bind(dist, noise)
        if at_once:
            env[key], env[score] = sample_and_log_prob(dist, reparameterize=dist.has_rsample)
            return
        env[key] = module._dist_sample(dist, interaction_type=kind)
        if score:
            env[score] = dist.log_prob(env[key])

    return sample


def _write(env: dict[Any, Any], keys: Sequence[Any], out: Any) -> None:
    env.update(zip(keys, out if isinstance(out, tuple) else (out,), strict=True))


def quick_step(module: Any, kind: ExplorationType) -> Step | None:
    """The step of a module that is drawn on arrays (`array_draw`), or None.

    What it writes is on the CPU, where an actor wants it, wherever its parameters are.
    """
    found = array_draw(module, kind)
    if found is None:
        return None
    general = exact_step(module, kind)

    def draw(env: dict[Any, Any], noise: WordStream) -> None:
        tensors = [env[key].cpu() for key in found.in_keys]
        if any(tensor.dtype not in FLOATS for tensor in tensors):
            return general(env, noise)
        arrays = [tensor.numpy() for tensor in tensors]
        if not found.kind.accepts(arrays):
            return general(env, noise)
        drawn = found.kind.draw(arrays, noise.uniform_array(found.kind.shape(arrays)))
        env.update(zip(found.out_keys, map(torch.from_numpy, drawn), strict=False))
        return None

    return draw
