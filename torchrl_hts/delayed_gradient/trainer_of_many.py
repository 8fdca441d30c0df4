"""TorchRL's trainers as one of many learners, or with a batch that is cut into shards.

`Trainer.optim_steps` takes losses, gradients and a step of the optimizer in one go, of one batch.
Here the losses and gradients are those of all parts of all learners, and each step is taken once
they are averaged. The trainer's own hooks do the rest, at the stages where TorchRL (0.14) has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import SamplerWithoutReplacement
from torchrl.trainers import DefaultOptimizationStepper, LogScalar, OptimizerHook, Trainer
from torchrl.trainers import ReplayBufferTrainer as BufferHook

from torchrl_hts.errors.wrapped import check_unwrapped

__all__ = ["TrainerOfMany"]

_MASK = ("collector", "mask")


class Learners(Protocol):
    """As much of `torchrl_hts.World` as is needed."""

    size: int

    @property
    def is_first(self) -> bool: ...

    @property
    def num_parts(self) -> int: ...

    def any(self, flag: bool) -> bool: ...

    def gather(self, value: Any) -> list[Any]: ...

    def save(
        self, write_part: Callable[[], object], write_marker: Callable[[], object]
    ) -> None: ...

    def parts(self, batch: TensorDictBase) -> list[TensorDictBase]: ...

    def gradients(self, module: nn.Module, data: Any) -> Iterator[TensorDictBase]: ...

    def minibatches(
        self, parts: Sequence[TensorDictBase], count: int, *, seed: int, epoch: int
    ) -> Iterator[list[TensorDictBase]]: ...

    def drawing(
        self, index: int, *words: int, device: torch.device | str = ...
    ) -> AbstractContextManager[None]: ...

    def normalize(self, parts: Sequence[TensorDictBase], key: Any = ...) -> None: ...

    def mean(self, values: Sequence[Tensor]) -> Tensor: ...


class TrainerOfMany:
    """Makes a trainer one of many learners.

    Frames are counted, logged and saved for all learners together, by the first. Hooks are called
    on each learner: those of an epoch once for each part of the batch, as are hooks that make
    minibatches of it. A replay buffer gets a single step: minibatches of its ``batch_size`` are cut
    out of all parts, without replacement.

    Args:
        trainer: whose methods are replaced.
        world: the learners.

    Raises:
        ValueError: if it has something that can't be done by parts; says what to do instead.
    """

    def __init__(self, trainer: Trainer, world: Learners) -> None:
        self._trainer, self._world = trainer, world
        self._save = trainer._save_trainer
        self._check()

    def join(self) -> Callable[[TensorDictBase], None]:
        """Replace the trainer's methods; returns what is to stand for `Trainer.optim_steps`."""
        trainer = self._trainer
        if not self._world.is_first:
            trainer.logger, trainer.progress_bar = None, False
        trainer._pre_steps_log_hook = self._before_steps
        trainer._post_steps_log_hook = self._after_steps
        trainer._save_trainer = self._save_together
        return self.optim_steps

    def _check(self) -> None:
        trainer, loss = self._trainer, self._trainer.loss_module
        if not isinstance(loss, nn.Module):
            raise ValueError(
                "with several learners, or shards, the trainer's loss_module must be a module, got "
                f"{type(loss).__name__}"
            )
        check_unwrapped(loss)
        stepper, ops = trainer.optimization_stepper, [_hook(op) for op, _ in trainer._optimizer_ops]
        one = len(ops) == 1 and isinstance(ops[0], OptimizerHook)
        if type(stepper) is not DefaultOptimizationStepper if stepper is not None else not one:
            raise ValueError(
                "with several learners, or shards, a trainer takes its steps by one optimizer: "
                "give it optimizer, and no stepper but DefaultOptimizationStepper"
            )
        known = {id(parameter) for parameter in loss.parameters()}
        for group in (trainer.optimizer or ops[0].optimizer).param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise ValueError(
                    "the optimizer has parameters that the trainer's loss_module lacks: with "
                    "several learners, or shards, their gradients would not be averaged"
                )
        late = [_hook(op) for op, _ in (*trainer._process_loss_ops, *trainer._post_loss_ops)]
        if any(not isinstance(_owner(hook), BufferHook) for hook in late):
            raise ValueError(
                "hooks of process_loss and post_loss can't be called with several learners, or "
                "shards: put what they do into the loss module"
            )
        if any(isinstance(_owner(_hook(op)), BufferHook) for op, _ in trainer._batch_process_ops):
            raise ValueError(
                "a replay buffer that keeps steps of other rounds can't be used with several "
                "learners, or shards"
            )
        buffer = getattr(trainer, "replay_buffer", None)
        if buffer is not None and not isinstance(buffer.sampler, SamplerWithoutReplacement):
            raise ValueError(
                "with several learners, or shards, the replay buffer's sampler must be a "
                f"SamplerWithoutReplacement, got {type(buffer.sampler).__name__}"
            )
        if getattr(trainer.collector, "split_trajs", False):
            raise ValueError("split_trajs=True can't be used with several learners, or shards")

    # The update.

    def optim_steps(self, batch: TensorDictBase) -> None:
        """All epochs with one batch, in place of `Trainer.optim_steps`."""
        trainer = self._trainer
        self._check()  # also the hooks that were registered since
        trainer._pre_optim_hook()
        parts, steps = self._world.parts(batch), 0
        total: dict[str, Any] = {}
        for epoch in range(trainer.num_epochs):
            self._log_of_all(trainer._pre_epoch_log_ops, batch)
            for minibatch in self._minibatches(self._prepared(parts), epoch):
                steps += 1
                trainer._optim_count += 1
                losses = self._step(minibatch)
                trainer._post_optim_hook()
                if trainer._post_optim_log_ops:
                    trainer._post_optim_log(torch.cat(minibatch))
                total = {key: total.get(key, 0.0) + value for key, value in losses.items()}
            self._log_of_all(trainer._post_epoch_log_ops, batch)
            trainer._post_epoch_hook()
        if steps:
            means = TensorDict({key: value / steps for key, value in total.items()})
            trainer._post_optim_complete_log_hook(trainer._optim_count, means)

    def _prepared(self, parts: list[TensorDictBase]) -> list[TensorDictBase]:
        """What the hooks that begin an epoch, such as GAE, make of the parts."""
        for op, kwargs in self._trainer._pre_epoch_ops:
            hook = _hook(op)
            if isinstance(_owner(hook), BufferHook):
                continue
            estimator = getattr(hook, "value_estimator", hook)
            with _without(estimator, "average_gae") as averages:
                parts = [op(part, **kwargs) for part in parts]
            if averages:
                self._world.normalize(parts, estimator.tensor_keys.advantage)
        return parts

    def _minibatches(
        self, parts: list[TensorDictBase], epoch: int
    ) -> Iterator[list[TensorDictBase]]:
        """A part of every minibatch from each part, as often as the trainer takes steps."""
        trainer, most = self._trainer, self._trainer.optim_steps_per_batch
        ops = trainer._process_optim_batch_ops
        buffer = getattr(trainer, "replay_buffer", None)
        cut: Iterator[list[TensorDictBase]] | None = None
        if buffer is not None:
            if len(buffer) == 0:  # TorchRL's checkpoints can't have an empty one
                buffer.extend(parts[0].reshape(-1)[:1].cpu())
            count = self._count(parts, buffer.batch_size)
            most = count if most is None else min(count, most)
            cut = self._world.minibatches(parts, count, seed=trainer.collector.seed, epoch=epoch)
            ops = [entry for entry in ops if not isinstance(_owner(_hook(entry[0])), BufferHook)]
        for step in range(1 if most is None else most):
            minibatch = parts if cut is None else next(cut)
            yield [
                self._processed(ops, part, (epoch, step, index))
                for index, part in enumerate(minibatch)
            ]

    def _count(self, parts: list[TensorDictBase], size: int | None) -> int:
        """Into how many minibatches of so many steps, of all learners, the parts are cut."""
        total = parts[0].numel() * self._world.num_parts
        size = total if size is None else size
        if total % size or size % self._world.num_parts:
            raise ValueError(
                f"the replay buffer's batch_size {size} must divide the {total} steps of all "
                f"learners' batch, and be a multiple of the {self._world.num_parts} parts"
            )
        return int(total // size)

    def _processed(
        self, ops: list[Any], part: TensorDictBase, place: tuple[int, ...]
    ) -> TensorDictBase:
        """What hooks make of a part; what they draw at random is that part's, whoever has it."""
        if not ops:
            return part
        *at, index = place
        words = self._trainer.collector.seed, int(part["policy_version"].flatten()[0]), *at
        with self._world.drawing(index, *words, device=part.device or "cpu"):
            for op, kwargs in ops:
                out = op(part, **kwargs)
                part = out if isinstance(out, TensorDictBase) else part
        return part

    def _step(self, minibatch: list[TensorDictBase]) -> TensorDictBase:
        """A step of the optimizer; returns losses and the gradient's norm, the same everywhere."""
        trainer, loss_module, stepper = (
            self._trainer,
            self._trainer.loss_module,
            self._trainer.optimization_stepper,
        )
        chosen = (stepper or _hook(trainer._optimizer_ops[0][0])).loss_components
        found = []
        with _without(loss_module, "normalize_advantage") as normalizes:
            if normalizes:
                self._world.normalize(minibatch, loss_module.tensor_keys.advantage)
            for part in self._world.gradients(loss_module, minibatch):
                losses = loss_module(part)
                _total(losses, chosen).backward()  # type: ignore[no-untyped-call]
                found.append(losses.detach())
        keys = [key for key, value in found[0].items() if value.numel() == 1]
        mean = self._world.mean(
            [torch.stack([one[key].reshape(()) for key in keys]) for one in found]
        )
        # The gradients are there. So the trainer's own step is given losses that lead nowhere.
        losses = TensorDict(
            {key: value.clone().requires_grad_() for key, value in zip(keys, mean, strict=True)}
        )
        if stepper is None:
            return trainer._optimizer_hook(losses)
        context = SimpleNamespace(
            compute_loss=lambda batch: losses,
            optimizer=trainer.optimizer,
            clip_grad_norm=trainer.clip_grad_norm,
            clip_norm=trainer.clip_norm,
        )
        return stepper.step(context, None).detach()

    # Around the update.

    def _before_steps(self, batch: TensorDictBase) -> None:
        """Count the frames of the other learners too, and log those of all."""
        trainer = self._trainer
        mask = batch.get(_MASK, None)
        frames = batch.numel() if mask is None else int(mask.sum())
        others = (self._world.size - 1) * frames * trainer.frame_skip
        trainer.collected_frames += others
        if trainer.progress_bar:
            trainer._pbar.update(others)
        self._log_of_all(trainer._pre_steps_log_ops, batch)

    def _after_steps(self, batch: TensorDictBase) -> None:
        """Log, and stop if any learner is to stop."""
        trainer = self._trainer
        self._log_of_all(trainer._post_steps_log_ops, batch)
        if self._world.any(trainer._stop_training) and not trainer._stop_training:
            trainer.request_stop("another learner stops")

    def _log_of_all(self, ops: list[Any], batch: TensorDictBase) -> None:
        """Log; TorchRL's scalars are those of all learners' steps, others of this one's."""
        scalars = {_hook(op).key for op, _ in ops if isinstance(_hook(op), LogScalar)}
        if scalars:
            own = batch.select(*sorted(scalars, key=str), _MASK, strict=False).cpu().clone()
            whole = torch.cat(self._world.gather(own))
        for op, kwargs in ops:
            logged = op(whole if isinstance(_hook(op), LogScalar) else batch, **kwargs)
            if logged is not None:
                self._trainer._log(**logged)

    def _save_together(self) -> None:
        """Have the first learner save, with the collectors' states of all."""
        collector = self._trainer.collector
        states = self._world.gather(collector.state_dict())

        def write() -> None:
            collector.state_dict = lambda: {"learners": states}
            try:
                self._save()
            finally:
                del collector.state_dict

        self._world.save(lambda: None, write)


def _hook(op: Any) -> Any:
    """What was registered: a trainer wraps it in a function that takes its time."""
    return inspect.getclosurevars(op).nonlocals.get("op", op) if inspect.isfunction(op) else op


def _owner(hook: Any) -> Any:
    """The object that a hook is, or is a method of."""
    return getattr(hook, "__self__", hook)


def _total(losses: TensorDictBase, chosen: set[str] | None) -> Tensor:
    """What is minimised, as TorchRL's steppers choose it."""
    terms = [
        value
        for key, value in losses.items()
        if (key.startswith("loss") if chosen is None else key in chosen)
    ]
    total: Tensor = sum(terms[1:], terms[0])
    return total


@contextmanager
def _without(owner: Any, flag: str) -> Iterator[bool]:
    """Switch something off that would be done for each part by itself; yields whether it was on."""
    was = bool(getattr(owner, flag, False))
    if was:
        setattr(owner, flag, False)
    try:
        yield was
    finally:
        if was:
            setattr(owner, flag, True)
