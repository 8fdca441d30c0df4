"""A policy whose actions depend on nothing but its parameters, its input and counter-based noise.

A policy draws its actions from torch's global generator, whose state depends on who was served
first. `CounterPolicy` runs any TensorDict policy with each row's own random words instead (I6).

Axes: m rows of a batch, W words per row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    TensorDictModuleBase,
)
from torch import Tensor, nn
from torch import distributions as D
from torch._C._functorch import is_functorch_wrapped_tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_hts._policy.draws import CounterNoise, Words, WordStream, bind, uniforms_of
from torchrl_hts._policy.exploration import exploring
from torchrl_hts._policy.module_checks import (
    check_modules,
    refused_dropout,
    unchanged_buffers,
)
from torchrl_hts._policy.numpy_steps import Array, ArrayStep, array_steps
from torchrl_hts._policy.row_bits import row_bits
from torchrl_hts._policy.steps import Step, exact_step, flatten, quick_step
from torchrl_hts._world.generators import forked_generators, seed_generators
from torchrl_hts.errors import PolicyError

__all__ = ["CounterPolicy", "generator_states", "inference", "no_generator"]


@contextmanager
def inference(exploration_type: ExplorationType) -> Iterator[None]:
    """Inside, policies run: without gradients, and NaN is looked for, not warned of.

    Attention runs layer by layer. Torch's fused path gives it up where somebody watches the layers,
    as calibration does, and has bits of its own.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.inference_mode(),
            set_exploration_type(exploration_type),
            np.errstate(all="ignore"),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class CounterPolicy:
    """Runs a TensorDict policy so that a row's sample depends on that row's words alone.

    Under ``ExplorationType.RANDOM`` the distributions that TorchRL's actors commonly use are
    sampled for all rows at once, and so is the noise of modules for exploration (`exploring`). A
    module with any other distribution is run row by row, each row under torch's generator seeded
    with its word. So is the whole policy if it draws from that generator elsewhere (`row_by_row`).
    Under the other exploration types it runs as it is. Policies of plain TensorDictModules and
    probabilistic modules in sequence skip TensorDict's bookkeeping, if a trial shows that this
    leaves every bit of the outputs as it was. A Categorical of logits is then drawn and scored in
    numpy, to which the logits of another device come, since actors want the outputs on the CPU
    anyway. If there are but small dense layers beside it, on the CPU and over inputs ``[m, n]``, so
    are these run: numpy rounds otherwise.

    Between calls the policy is as it was found; torch's global generators always are. TorchRL
    turns the validation of distributions' arguments off, so look for NaN in the outputs. Parameters
    are to be changed in place.

    Args:
        policy: the policy, on its device, its lazy modules initialised.
        exploration_type: the exploration type to run it under.
        undeclared: what it writes besides its `out_keys`, and is wanted.
        groups: see `Layout.groups`; so are the TensorDicts that it is given.

    Attributes:
        width: W, the words per row that a call needs; 0 before `prepare`.
        row_by_row: whether each row is run alone.
        takes_arrays: whether `run` takes and returns arrays rather than tensors.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
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

    def __init__(
        self,
        policy: TensorDictModuleBase,
        exploration_type: ExplorationType,
        undeclared: Sequence[Any] = (),
        groups: Sequence[tuple[Any, tuple[int, ...]]] = (),
    ) -> None:
        self.policy = policy
        self._groups = groups
        self.exploration_type = exploration_type
        self.width = 0
        self.row_by_row = False
        self._in_keys = list(policy.in_keys)
        self._out_keys = [key for key in policy.out_keys if key != "_"]
        self._out_keys += [key for key in undeclared if key not in self._out_keys]
        self._device = torch.device("cpu")
        self._noise = WordStream(0, None, self._device)
        self._steps: list[Step] | list[ArrayStep] | None = None
        self.takes_arrays = False
        self._unknown: list[ProbabilisticTensorDictModule] = []
        # What is put over a module's own attribute while the policy runs.
        self._hooks: list[tuple[nn.Module, str, Any]] = []
        for module in policy.modules():
            explore = exploring(module, lambda: self._noise)
            if explore is not None and exploration_type is ExplorationType.RANDOM:
                self._hooks.append((module, "forward", explore))
            if isinstance(module, ProbabilisticTensorDictModule):
                # A generator of the module's own would be a stream: served in order of arrival.
                self._hooks.append((module, "_resolve_generator", no_generator))
                if exploration_type is ExplorationType.RANDOM:
                    self._hooks.append((module, "get_dist", self._bound_dist(module)))

    def prepare(self, example: TensorDictBase, other: TensorDictBase | None = None) -> None:
        """Run the policy on `example` ``[m]``, with its `in_keys`, to learn how it draws.

        Sets `width`, `row_by_row` and `takes_arrays`. To be called once, before the first call.

        Args:
            example: its inputs, as they will be.
            other: some that it may refuse; if it doesn't, a short cut has to serve them too.

        Raises:
            PolicyError: if the policy has lazy modules, drops activations, changes a buffer, does
                not return its rows, or gives other outputs for the same inputs and words.
        """
        check_modules(self.policy)
        example = self._in_groups(example)
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

        def output_bits(td: TensorDictBase) -> dict[Any, bytes]:
            out = self(td.clone(), words).select(*self._out_keys, strict=False)
            return {key: row_bits([value]).tobytes() for key, value in out.items(True, True)}

        expected = [(example, output_bits(example))]
        if output_bits(example) != expected[0][1]:
            raise PolicyError(
                "the policy's outputs change from call to call, for the same inputs, parameters "
                "and noise. Keep what it remembers in its inputs and outputs, and draw random "
                "numbers from torch's default generator"
            )
        whole = any(isinstance(x, TensorDictBase) for x in inputs)  # `run` is given leaves
        modules = None if self.row_by_row or self._unknown or whole else flatten(self.policy)
        if modules is None:
            return
        if other is not None:
            with suppress(Exception):
                expected.append((other, output_bits(other)))
        kind = self.exploration_type
        steps = self._steps = [exact_step(module, kind) for module in modules]
        try:
            equal = all(output_bits(td) == bits for td, bits in 2 * expected)
        except Exception:  # whatever the short cut stumbles over, the policy itself ran
            equal = False
        if not equal:
            self._steps = None
            return
        # Numpy rounds otherwise: so it comes in after the trial, on whose bits, and so on the
        # parameters, it is not to depend.
        if all(x is not None and x.ndim == 2 and x.dtype is not torch.bfloat16 for x in inputs):
            self._array_steps = partial(array_steps, modules, kind, example.batch_size[0])
            self._steps = self._array_steps()
            self.takes_arrays = self._steps is not None
        if not self.takes_arrays:
            self._steps = [
                self._quick_step(modules, index) or step for index, step in enumerate(steps)
            ]

    def block(self, blocked: bool) -> None:
        """Have numpy multiply in blocks of rows from now on, or not; see `array_steps`."""
        if self.takes_arrays:
            self._array_steps = partial(self._array_steps, blocked=blocked)
            self._steps = self._array_steps()

    def __call__(self, td: TensorDictBase, words: Words) -> TensorDictBase:
        """Run the policy on `td`, ``[m]`` with its `in_keys`, and write its `out_keys` there.

        Args:
            td: the rows, on the policy's device; returned.
            words: the noise of each row, uint64 ``[m, W]``.

        Raises:
            PolicyError: if the policy draws more than in its trial run.
        """
        with inference(self.exploration_type):
            if self._steps is not None:
                inputs = self.inputs_of({key: td.get(key) for key in self._in_keys})
                values = self.run(inputs, self.noise_of(words))
                return td.update({key: torch.as_tensor(values[key]) for key in self._out_keys})
            noise = WordStream(len(words), words, self._device)
            with self._hooked(noise):
                if self.row_by_row:
                    return self._each_row(self.policy, self._out_keys, td, noise.seeds())
                out = self.policy(td)
                return td if out is td else td.update(out.select(*self._out_keys, strict=False))

    def inputs_of(self, tensors: dict[Any, Tensor]) -> dict[Any, Any]:
        """Tensors as `run` takes them, or arrays over their memory."""
        if not self.takes_arrays:
            return tensors
        return {key: tensor.numpy() for key, tensor in tensors.items()}

    def noise_of(self, words: Words) -> Words:
        """Words as `run` takes them, of the same shape and type.

        Their rows may be selected afterwards: it is cheaper for all steps of a round at once.
        """
        return words if self._steps is None else uniforms_of(words).view(np.uint64)

    def run(self, values: dict[Any, Any], noise: Words) -> Mapping[Any, Tensor | Array]:
        """Run the policy as calling it does, with less around it; only inside `inference`.

        Args:
            values: its inputs ``[m, ...]`` by its `in_keys`, of what `inputs_of` returns. May be
                added to.
            noise: ``[m, W]`` of what `noise_of` returns.

        Returns:
            All that it writes.
        """
        if self._steps is None:
            td: Mapping[Any, Any] = self(self._in_groups(TensorDict(values, [len(noise)])), noise)
            return td
        uniforms = noise.view(np.float64)
        stream: Any = uniforms
        if not self.takes_arrays:
            stream = WordStream(len(noise), uniforms, self._device)
        for step in self._steps:
            step(values, stream)
        return values

    def _in_groups(self, td: TensorDictBase) -> TensorDictBase:
        """The same, where what holds the values of a group's agents has a batch size for them."""
        for key, size in self._groups:
            held = td.get(key, None)
            if held is not None:
                held.batch_size = [*td.batch_size, *size]
        return td

    def _quick_step(self, modules: Sequence[Any], index: int) -> Step | None:
        """The quick step of a module, whose draws lie on the CPU, unless others need them."""
        if self._device.type != "cpu":
            drawn = set(modules[index].out_keys)
            if any(drawn & set(later.in_keys) for later in modules[index + 1 :]):
                return None
        return quick_step(modules[index], self.exploration_type)

    @contextmanager
    def watched(self, keep: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside, `keep` is called with each tensor that a layer of the policy passes on."""

        def keep_all(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in _flat(output):
                keep(tensor)

        steps = self._steps
        if self.takes_arrays:
            self._steps = self._array_steps(lambda value: keep(torch.from_numpy(value)))
        leaves = [m for m in self.policy.modules() if not list(m.children())]
        hooks = [] if self.takes_arrays else [m.register_forward_hook(keep_all) for m in leaves]
        try:
            yield
        finally:
            self._steps = steps
            for hook in hooks:
                hook.remove()

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
        with forked_generators(self._device), inference(self.exploration_type):
            torchs, others = generator_states(self._device)
            with self._hooked(noise), refused_dropout(self.policy):
                out = self.policy(example.clone())
            torchs_after, others_after = generator_states(self._device)
        drawn = torchs_after != torchs
        if others_after != others:
            raise PolicyError(
                "the policy draws from Python's or numpy's generator, which batch-mates share: "
                "draw from torch's default generator"
            )
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
        with forked_generators(self._device):
            for i, seed in enumerate(seeds):
                seed_generators(seed, self._device)
                rows.append(call(td[i : i + 1]).select(*keys, strict=False))
        return td.update(torch.cat(rows))


def _flat(output: object) -> list[Tensor]:
    """The tensors in what a module returns."""
    if isinstance(output, Tensor):  # but for those inside torch.vmap, which must not get out
        return [] if is_functorch_wrapped_tensor(output) else [output]
    if isinstance(output, tuple | list):
        return [tensor for part in output for tensor in _flat(part)]
    return []


def no_generator(td: TensorDictBase) -> tuple[None, None]:
    """In the place of a probabilistic module's ``_resolve_generator``: it draws from torch's."""
    return None, None


def generator_states(device: torch.device) -> tuple[bytes, tuple[bytes, object]]:
    """Of torch's default generators, of a GPU too; and of numpy's and Python's."""
    torchs = torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        torchs += torch.cuda.get_rng_state(device).numpy().tobytes()
    numpys: Any = np.random.get_state(legacy=False)
    key = numpys["state"]["key"].tobytes() + str(numpys["state"]["pos"]).encode()
    return torchs, (key, random.getstate())
