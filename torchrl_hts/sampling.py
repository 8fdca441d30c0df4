"""A policy whose actions depend on nothing but its parameters, its input and counter-based noise.

A policy draws its actions from torch's global generator, whose state depends on who was served
first. `CounterPolicy` runs any TensorDict policy with each row's own random words instead (I6).

Axes: m rows of a batch, W words per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.common import _OutKeysSelect
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, SafeProbabilisticModule
from torchrl.modules import distributions as rl_dist
from torchrl.modules.distributions.utils import sample_and_log_prob

from torchrl_hts.draws import CounterNoise, Words, WordStream, bind, draw_categorical
from torchrl_hts.errors import PolicyError
from torchrl_hts.invariance import check_modules, row_bits, unchanged_buffers

__all__ = ["CounterPolicy"]


_Step = Callable[[dict[Any, Any], WordStream], None]
_LOC_SCALE = {"loc", "scale"}


class CounterPolicy:
    """Runs a TensorDict policy so that a row's sample depends on that row's words alone.

    Under ``ExplorationType.RANDOM`` the distributions that TorchRL's actors commonly use are
    sampled for all rows at once. A module with any other distribution is run row by row, each row
    under torch's generator seeded with its word; so is the whole policy if it draws from that
    generator elsewhere (`row_by_row`). Under the other exploration types it runs as it is.
    Policies of plain TensorDictModules and probabilistic modules in sequence skip TensorDict's
    bookkeeping, if a trial shows that this leaves every bit of the outputs as it was.

    Between calls the policy is as it was found; torch's global generators always are. TorchRL
    turns the validation of distributions' arguments off, so look for NaN in the outputs.

    Args:
        policy: the policy, on its device, its lazy modules initialised.
        exploration_type: the exploration type to run it under.

    Attributes:
        width: W, the words per row that a call needs; 0 before `prepare`.
        row_by_row: whether each row is run alone.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import ProbabilisticActor
        >>> net = TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(net, ["logits"], distribution_class=D.Categorical)
        >>> policy = CounterPolicy(actor, ExplorationType.RANDOM)
        >>> rows = TensorDict({"observation": torch.zeros(4, 3)}, [4])
        >>> policy.prepare(rows)
        >>> words = CounterNoise(0, num_envs=4, sync_interval=1, width=policy.width).round(0)[:, 0]
        >>> policy(rows, words)["action"].shape
        torch.Size([4])
    """

    def __init__(self, policy: TensorDictModuleBase, exploration_type: ExplorationType) -> None:
        self.policy = policy
        self.exploration_type = exploration_type
        self.width = 0
        self.row_by_row = False
        self._in_keys = list(policy.in_keys)
        self._out_keys = [key for key in policy.out_keys if key != "_"]
        self._device = torch.device("cpu")
        self._noise = WordStream(0, None, self._device)
        self._steps: list[_Step] | None = None
        self._unknown: list[ProbabilisticTensorDictModule] = []
        # What is put over a module's own attribute while the policy runs.
        self._hooks: list[tuple[nn.Module, str, Any]] = []
        for module in policy.modules():
            if isinstance(module, ProbabilisticTensorDictModule):
                # A generator of the module's own would be a stream: served in order of arrival.
                self._hooks.append((module, "_resolve_generator", lambda td: (None, None)))
                if exploration_type is ExplorationType.RANDOM:
                    self._hooks.append((module, "get_dist", self._bound_dist(module)))

    def prepare(self, example: TensorDictBase) -> None:
        """Run the policy on `example` ``[m]``, with its `in_keys`, to learn how it draws.

        Sets `width` and `row_by_row`. To be called once, before the first call.

        Raises:
            PolicyError: if the policy has lazy or dropout modules, changes a buffer, does not
                return its rows, or gives other outputs for the same inputs and words.
        """
        check_modules(self.policy)
        inputs = [example.get(key, None) for key in self._in_keys]
        self._device = next((x.device for x in inputs if x is not None), self._device)
        with unchanged_buffers(self.policy):
            drawn = self._trial(example)
        if self._unknown:
            self._hooks += [(m, "forward", self._forward_rows(m)) for m in self._unknown]
            drawn = self._trial(example)
        if drawn:
            self.row_by_row, self.width = True, 1
            self._hooks = [hook for hook in self._hooks if hook[1] == "_resolve_generator"]
        words = CounterNoise(0, example.batch_size[0], 1, self.width).round(0)[:, 0]

        def output_bits() -> dict[Any, bytes]:
            out = self(example.copy(), words).select(*self._out_keys, strict=False)
            return {key: row_bits([value]).tobytes() for key, value in out.items(True, True)}

        expected = output_bits()
        if output_bits() != expected:
            raise PolicyError(
                "the policy's outputs change from call to call, for the same inputs, parameters "
                "and noise. Keep what it remembers in its inputs and outputs, and draw random "
                "numbers from torch's default generator"
            )
        modules = None if self.row_by_row or self._unknown else _flatten(self.policy)
        if modules is not None:
            steps = self._steps = [_step(module, self.exploration_type) for module in modules]
            try:
                equal = all(output_bits() == expected for _ in range(2))
            except Exception:  # whatever the short cut stumbles over, the policy itself ran
                equal = False
            # Categorical draws are rounded otherwise in numpy: so they come in after the trial,
            # on whose bits, and so on the parameters, they are not to depend.
            self._steps = None
            if equal:
                quick = [_categorical_step(module, self.exploration_type) for module in modules]
                self._steps = [a or b for a, b in zip(quick, steps, strict=True)]

    def __call__(self, td: TensorDictBase, words: Words) -> TensorDictBase:
        """Run the policy on `td`, ``[m]`` with its `in_keys`, and write its `out_keys` there.

        Args:
            td: the rows, on the policy's device; returned.
            words: the noise of each row, uint64 ``[m, W]``.

        Raises:
            PolicyError: if the policy draws more than in its trial run.
        """
        if self._steps is not None:
            with torch.inference_mode():
                values = self.compute({key: td.get(key) for key in self._in_keys}, words)
            return td.update({key: values[key] for key in self._out_keys})
        noise = WordStream(len(words), words, self._device)
        with (
            torch.inference_mode(),
            set_exploration_type(self.exploration_type),
            self._hooked(noise),
        ):
            if self.row_by_row:
                return self._each_row(self.policy, self._out_keys, td, noise.seeds())
            out = self.policy(td)
            return td if out is td else td.update(out.select(*self._out_keys, strict=False))

    @property
    def short_cut(self) -> bool:
        """Whether `compute` serves, which saves what TensorDicts cost."""
        return self._steps is not None

    def compute(self, values: dict[Any, Tensor], words: Words) -> dict[Any, Tensor]:
        """Run the policy on the tensors of its `in_keys`; adds all that it writes, and returns it.

        Only where `short_cut` says so, and in inference mode. The bits are those of calling this.
        """
        noise = WordStream(len(words), words, self._device)
        for step in self._steps or ():
            step(values, noise)
        return values

    @contextmanager
    def _hooked(self, noise: WordStream) -> Iterator[None]:
        """Inside, the policy's modules draw from `noise`."""
        self._noise = noise
        found = [module.__dict__.get(name) for module, name, _ in self._hooks]
        try:
            for module, name, hook in self._hooks:
                module.__dict__[name] = hook
            yield
        finally:
            for (module, name, _), value in zip(self._hooks, found, strict=True):
                module.__dict__[name] = value
                if value is None:
                    del module.__dict__[name]

    def _trial(self, example: TensorDictBase) -> bool:
        """Run once, counting the words; returns whether torch's generator was drawn from."""
        noise = WordStream(example.batch_size[0], None, self._device)
        with (
            _forked_generator(self._device),
            torch.inference_mode(),
            set_exploration_type(self.exploration_type),
        ):
            before = _generator_state(self._device)
            with self._hooked(noise):
                out = self.policy(example.copy())
            drawn = not torch.equal(before, _generator_state(self._device))
        got = out.batch_size if isinstance(out, TensorDictBase) else type(out).__name__
        if got != example.batch_size:
            raise PolicyError(
                f"expected the policy to return a TensorDict of batch size "
                f"{list(example.batch_size)}, as it was given, got {got}"
            )
        self.width = noise.used
        return drawn

    def _bound_dist(self, module: ProbabilisticTensorDictModule) -> Callable[[Any], Any]:
        get_dist = module.get_dist

        def bound_dist(td: TensorDictBase) -> D.Distribution:
            dist: D.Distribution = get_dist(td)
            if module not in self._unknown and not bind(dist, self._noise):
                self._unknown.append(module)
            return dist

        return bound_dist

    def _forward_rows(self, module: ProbabilisticTensorDictModule) -> Callable[..., Any]:
        forward = module.forward

        def forward_rows(
            td: TensorDictBase, tensordict_out: Any = None, _requires_sample: bool = True
        ) -> Any:
            if not _requires_sample:
                return forward(td, tensordict_out, _requires_sample=False)
            out = self._each_row(forward, module.out_keys, td, self._noise.seeds())
            return out if tensordict_out is None else tensordict_out.update(out)

        return forward_rows

    def _each_row(
        self, call: Callable[..., Any], keys: list[Any], td: TensorDictBase, seeds: list[int]
    ) -> TensorDictBase:
        """Call with each row of `td` alone, torch's generator seeded for it; write `keys` there."""
        rows = []
        with _forked_generator(self._device):
            for i, seed in enumerate(seeds):
                torch.default_generator.manual_seed(seed)
                if self._device.type == "cuda":
                    torch.cuda.default_generators[self._device.index].manual_seed(seed)
                rows.append(call(td[i : i + 1]).select(*keys, strict=False))
        return td.update(torch.cat(rows))


# --- The short cut: a dict in place of a TensorDict, where that is all a module needs.


def _flatten(module: Any) -> list[Any] | None:
    """The modules of nested sequences in order; None if one isn't of TensorDict's plain kinds."""
    forward = type(module).forward
    # What select_out_keys() hooks in only leaves keys out, which the caller does as well.
    hooks = [h for h in module._forward_hooks.values() if not isinstance(h, _OutKeysSelect)]
    if hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return None
    if forward in (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward):
        flat: list[Any] = []
        for part in module._module_iter():
            modules = _flatten(part)
            if modules is None:
                return None
            flat += modules
        return flat
    if forward is TensorDictModule.forward:
        return None if module._kwargs or module.method or module.method_kwargs else [module]
    sampling = (ProbabilisticTensorDictModule.forward, SafeProbabilisticModule.forward)
    return [module] if forward in sampling and len(module.dist_sample_keys) == 1 else None


def _layers(net: nn.Module) -> list[nn.Module] | None:
    """The layers of nested plain sequences in order; None if calling them isn't all that is done.

    A small layer costs less than what `nn.Module` does to call it.
    """
    plain = type(net).__call__ is nn.Module.__call__ and "forward" not in net.__dict__
    if not plain or net._forward_hooks or net._forward_pre_hooks:
        return None
    forward = type(net).forward
    if forward is nn.Sequential.forward or (forward is MLP.forward and not net._reshape_out):
        parts = [_layers(part) for part in net._modules.values() if part is not None]
        flat = [layer for part in parts for layer in part or ()]
        return flat if all(parts) else None
    return [net]


def _call(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    if type(layer) is nn.Linear:
        parameters: Any = layer._parameters  # an nn.Module's attributes are slow to look up
        return lambda x: F.linear(x, parameters["weight"], parameters["bias"])
    forward: Callable[[Tensor], Tensor] = layer.forward
    return forward


def _step(module: Any, kind: ExplorationType) -> _Step:
    if isinstance(module, TensorDictModule):
        net, in_keys, out_keys = module.module, module.in_keys, module.out_keys_source
        layers = _layers(net) if len(in_keys) == len(out_keys) == 1 else None
        if layers:
            (in_key,), (out_key,) = in_keys, out_keys
            calls = [_call(layer) for layer in layers]
            leaves = [layer for layer in layers if not layer._modules]
            hooks = leaves[0]._forward_hooks if leaves else {}

            def compute_layers(env: dict[Any, Any], noise: WordStream) -> None:
                value = env[in_key]
                if hooks:  # the calibration looks into all the leaves
                    value = net(value)
                else:
                    for call in calls:
                        value = call(value)
                env[out_key] = value

            return compute_layers

        def compute(env: dict[Any, Any], noise: WordStream) -> None:
            out = net(*[env[key] for key in in_keys])
            env.update(zip(out_keys, out if isinstance(out, tuple) else (out,), strict=True))

        return compute

    (key,) = module.dist_sample_keys
    score = module.log_prob_key if module.return_log_prob else None
    random = kind is ExplorationType.RANDOM
    reused: dict[torch.Size, Any] = {}
    reuse = module.distribution_class is rl_dist.TanhNormal and {*module.dist_keys} == _LOC_SCALE

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


def _categorical_step(module: Any, kind: ExplorationType) -> _Step | None:
    """The step of a module that does nothing but draw from ``Categorical(logits=...)``, or None."""
    if (
        kind is not ExplorationType.RANDOM
        or isinstance(module, TensorDictModule)
        or module.distribution_class is not D.Categorical
        or [*module.dist_keys] != ["logits"]
        or module.distribution_kwargs
        or module.num_samples is not None
    ):
        return None
    general = _step(module, kind)
    (logits_key,) = module.in_keys
    (key,) = module.dist_sample_keys
    score = module.log_prob_key if module.return_log_prob else None

    def categorical(env: dict[Any, Any], noise: WordStream) -> None:
        logits = env[logits_key]
        if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
            return general(env, noise)
        index, log_prob = draw_categorical(logits.numpy(), noise.uniform_array(logits.shape[:-1]))
        env[key] = torch.from_numpy(index)
        if score:
            env[score] = torch.from_numpy(log_prob)
        return None

    return categorical


def _generator_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    return state if device.type != "cuda" else torch.cat([state, torch.cuda.get_rng_state(device)])


def _forked_generator(device: torch.device) -> Any:
    """A context that puts torch's generators, those that `device` needs, back as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
