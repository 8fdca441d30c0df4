"""Episode returns and lengths, and what environments say of episodes, out of batches ``[N, T]``."""

# Axes: N environments, T steps of one batch.

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from math import isnan, nan
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_hts._executor.info import InfoKey, check_info_keys
from torchrl_hts._rounds.keys import as_written
from torchrl_hts.errors.batches import check_batch
from torchrl_hts.errors.checks import check_flags, check_integer, check_state

__all__ = ["EpisodeReturns"]

_TRAJECTORY = ("collector", "traj_ids")

# Of a state dict; older ones have no "infos".
_ENTRIES = ("count", "returns", "lengths", "open_return", "open_length", "trajectory")


class EpisodeReturns:
    """Adds up the reward of each episode, across batches, for all environments at once.

    Feed it every batch of a collector, in order and before rewards are clipped. Row ``n`` must
    be the same environment in each batch, with its steps in time order: what `HTSCollector` and
    TorchRL's ``Collector`` yield. Where ``("collector", "traj_ids")`` says that another episode
    has begun although the one before did not end, what was added up is dropped.

    What an environment says of an episode in its ``info`` (a raw return, whether it was a success)
    is kept too, where batches carry it (`HTSCollector`'s ``info_keys``).

    Args:
        window: how many of the most recent episodes the averages are over.
        info_keys: names below ``"next"`` of one number per step, NaN where there is none: those of
            the collector, or some of them. Of each episode its last number counts.
        set_truncated: whether the collector was given ``set_truncated=True``, which marks the last
            step of each row as an end. The next batch then tells, by ``("collector", "traj_ids")``,
            whether the episode had been truncated there, and it counts with that batch.

    Raises:
        TypeError: for an argument of another kind.
        ValueError: for a window below 1, or info_keys that lie within each other.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> reward = torch.ones(2, 3, 1)  # two environments, three steps
        >>> done = torch.zeros(2, 3, 1, dtype=torch.bool)
        >>> done[0, 1] = True  # the first one ends at its second step
        >>> batch = TensorDict({"next": {"reward": reward, "done": done}}, batch_size=[2, 3])
        >>> returns = EpisodeReturns()
        >>> returns.update(batch)
        [2.0]
        >>> returns.mean, returns.mean_length, returns.count
        (2.0, 2.0, 1)
    """

    def __init__(
        self,
        window: int = 100,
        info_keys: Sequence[str | InfoKey] = (),
        *,
        set_truncated: bool = False,
    ) -> None:
        window = check_integer("window", window)
        check_flags(set_truncated=set_truncated)
        self.count = 0
        self._set_truncated = set_truncated
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self._open_return: Tensor | None = None  # [N] float64, episodes that have not ended yet
        self._open_length: Tensor | None = None  # [N] int64
        self._trajectory: Tensor | None = None  # [N] int64, of the last step
        self._infos = {key: _LastNumbers(key, window) for key in check_info_keys(info_keys)}

    def update(self, batch: TensorDictBase) -> list[float]:
        """Takes in a batch; returns the returns of the episodes that ended in it.

        Episodes come out in order of the step at which they ended, and by environment within
        one step, so the result is the same whatever the timing of the workers. What is refused
        has changed nothing.

        Args:
            batch: ``[N, T]`` with ``("next", "reward")`` and ``("next", "done")``, each
                ``[N, T, 1]``; of one environment also ``[T]``. It is only read.

        Raises:
            TypeError: it is no batch.
            KeyError: it lacks one of ``info_keys``.
            ValueError: the batch is neither ``[N, T]`` nor of one environment, N is not as before,
                a step has several rewards or flags, or trajectories have been split. With
                ``set_truncated`` also if there are no ``("collector", "traj_ids")``.
        """
        batch = _with_rows(batch, self._trajectory)
        reward, done = _checked(batch)
        trajectory = batch.get(_TRAJECTORY, None)  # [N, T]
        if self._set_truncated:
            if trajectory is None:
                raise ValueError(
                    "set_truncated=True needs ('collector', 'traj_ids') in the batch, by which "
                    "the next batch tells what had ended"
                )
            done = done.clone()
            done[:, -1] = batch["next", "terminated"].detach().cpu().flatten(1)[:, -1]
        infos = [(numbers, numbers.read(batch)) for numbers in self._infos.values()]
        num_envs, num_steps = done.shape
        if self._open_return is None or self._open_length is None:
            self._open_return = torch.zeros(num_envs, dtype=torch.float64)
            self._open_length = torch.zeros(num_envs, dtype=torch.int64)
        if len(self._open_return) != num_envs:
            raise ValueError(
                f"expected a batch of {len(self._open_return)} environments as before, "
                f"and got {num_envs}: use one EpisodeReturns for each collector"
            )

        ended: list[float] = []
        if trajectory is not None:
            if self._trajectory is not None:
                ended += self._begin_anew(trajectory[:, 0].cpu() != self._trajectory)
            self._trajectory = trajectory[:, -1].cpu().clone()

        cursor = 0  # the first step that is not added up yet
        for step in torch.nonzero(done.any(0)).flatten().tolist():  # few steps see an end
            self._open_return += reward[:, cursor : step + 1].sum(1)
            self._open_length += step + 1 - cursor
            cursor = step + 1
            at_end = done[:, step]
            ended += self._open_return[at_end].tolist()
            self._lengths += self._open_length[at_end].tolist()
            self._open_return[at_end] = 0.0
            self._open_length[at_end] = 0
        self._open_return += reward[:, cursor:].sum(1)
        self._open_length += num_steps - cursor
        for numbers, values in infos:
            numbers.update(values, done)
        self._returns += ended
        self.count += len(ended)
        return ended

    def _begin_anew(self, rows: Tensor) -> list[float]:
        """Close the episodes of rows ``[N]`` that are True; returns what counts of them."""
        assert self._open_return is not None
        assert self._open_length is not None
        ended = torch.zeros_like(rows)
        if self._set_truncated:  # their last step was marked, and it was an end indeed
            ended = rows & (self._open_length > 0)
        returns: list[float] = self._open_return[ended].tolist()
        self._lengths += self._open_length[ended].tolist()
        self._open_return[rows] = 0.0
        self._open_length[rows] = 0
        for numbers in self._infos.values():
            numbers.close(rows, ended)
        return returns

    def state_dict(self) -> dict[str, Any]:
        """All that the coming averages depend on."""
        return {
            "count": self.count,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "open_return": None if self._open_return is None else self._open_return.clone(),
            "open_length": None if self._open_length is None else self._open_length.clone(),
            "trajectory": None if self._trajectory is None else self._trajectory.clone(),
            "infos": [[list(key), numbers.state()] for key, numbers in self._infos.items()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            TypeError, ValueError: if it is no such state, or an entry is missing.
        """
        check_state(state_dict, _ENTRIES)
        self.count = check_integer("state_dict['count']", state_dict["count"], least=0)
        self._returns = deque(state_dict["returns"], self._returns.maxlen)
        self._lengths = deque(state_dict["lengths"], self._lengths.maxlen)
        for name in ("open_return", "open_length", "trajectory"):
            value = state_dict[name]
            setattr(self, f"_{name}", None if value is None else value.cpu().clone())
        for key, state in state_dict.get("infos", []):
            if tuple(key) in self._infos:
                self._infos[tuple(key)].load(state)

    @property
    def info_means(self) -> dict[str | InfoKey, float]:
        """Mean of each of ``info_keys``, over those of the most recent episodes that had a number.

        NaN where none had one. Of numbers that are 0 or 1, such as ``"is_success"``, it is a rate.
        """
        return {as_written(key): numbers.mean for key, numbers in self._infos.items()}

    @property
    def mean(self) -> float:
        """Mean return of the most recent episodes; NaN before the first has ended."""
        return _mean(self._returns)

    @property
    def min(self) -> float:
        """Lowest return of the most recent episodes; NaN before the first has ended."""
        return min(self._returns, default=float("nan"))

    @property
    def max(self) -> float:
        """Highest return of the most recent episodes; NaN before the first has ended."""
        return max(self._returns, default=float("nan"))

    @property
    def mean_length(self) -> float:
        """Mean number of steps of the most recent episodes; NaN before the first has ended."""
        return _mean(self._lengths)

    @property
    def min_length(self) -> float:
        """Length of the shortest of the most recent episodes; NaN before the first has ended."""
        return min(self._lengths, default=float("nan"))

    @property
    def max_length(self) -> float:
        """Length of the longest of the most recent episodes; NaN before the first has ended."""
        return max(self._lengths, default=float("nan"))


def _with_rows(batch: TensorDictBase, last: Tensor | None) -> TensorDictBase:
    """A batch ``[N, T]``, where ``[T]`` is of one environment.

    Several in a row are told by their trajectories, which one environment numbers one by one.

    Args:
        batch: the batch.
        last: the trajectories of the last step of the batch before, ``[N]``.
    """
    check_batch(batch)
    trajectory, done = (batch.get(key, None) for key in (_TRAJECTORY, ("next", "done")))
    if batch.ndim == 1 and trajectory is not None and done is not None:
        begins, ends = trajectory.diff(), done.reshape(len(batch), -1).any(-1)[:-1]
        goes_on = last is None or (len(last) == 1 and bool(trajectory[0].cpu() >= last[0]))
        if goes_on and ((begins == 0) | ((begins == 1) & ends)).all():
            return batch.unsqueeze(0)
    if batch.ndim != 2:
        remedy = ": batch.unsqueeze(0) is of one environment" if batch.ndim == 1 else ""
        raise ValueError(
            f"expected a batch [environments, steps], and got {list(batch.batch_size)}{remedy}"
        )
    return batch


def _checked(batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Rewards and flags of ends, ``[N, T]``, on the CPU."""
    if batch.get(("collector", "mask"), None) is not None:
        raise ValueError(
            "the batch holds split trajectories. Leave split_trajs out, give the batch to update, "
            "and split it then: torchrl.collectors.utils.split_trajectories(batch, "
            "prefix='collector')"
        )
    found = {name: batch.get(("next", name), None) for name in ("reward", "done")}
    for name, value in found.items():
        if value is None or value.numel() != batch.numel():
            what = "none at ('next', ...)" if value is None else str(list(value.shape))
            raise ValueError(
                f"expected one {name} of each step, [N, T, 1], and got {what}: of several "
                "objectives or agents, add them up before"
            )
    reward, done = (value.detach().cpu().flatten(1) for value in found.values())
    return reward.double(), done.bool()


def _mean(values: Collection[float]) -> float:
    """NaN of none."""
    try:
        return fmean(values) if values else nan
    except (ValueError, OverflowError):  # of both infinities, or beyond the largest number
        return sum(values) / len(values)


class _LastNumbers:
    """The last number, by one key, of each episode.

    Args:
        key: below ``"next"``, as a tuple.
        window: how many episodes are kept.
    """

    def __init__(self, key: InfoKey, window: int) -> None:
        self._key = ("next", *key)
        self._ended: deque[float] = deque(maxlen=window)  # NaN of an episode without any
        self._open: Tensor | None = None  # [N] float64, NaN of those without any so far

    def close(self, rows: Tensor, ended: Tensor) -> None:
        """Forget the open episodes of some rows ``[N]``, but for those that have ended."""
        if self._open is not None:
            self._ended += self._open[ended].tolist()
            self._open[rows] = nan

    def read(self, batch: TensorDictBase) -> Tensor:
        """The numbers of a batch, ``[N, T]`` float64; NaN where there is none."""
        values: Tensor | None = batch.get(self._key, None)
        if values is None:
            raise KeyError(
                f"the batch has no {self._key}: give the collector info_keys with what follows "
                "'next', too"
            )
        return values.detach().cpu().reshape(batch.shape).double()

    def update(self, values: Tensor, done: Tensor) -> None:
        """Take in what was read of a batch; episodes end where ``done`` ``[N, T]`` is True."""
        if self._open is None:
            self._open = torch.full(done.shape[:1], nan, dtype=torch.float64)
        known = ~values.isnan()
        for step in torch.nonzero((known | done).any(0)).flatten().tolist():
            self._open = torch.where(known[:, step], values[:, step], self._open)
            at_end = done[:, step]
            self._ended += self._open[at_end].tolist()
            self._open[at_end] = nan

    @property
    def mean(self) -> float:
        """Over the episodes that had a number; NaN if none had one."""
        return _mean([value for value in self._ended if not isnan(value)])

    def state(self) -> dict[str, Any]:
        """All that the coming means depend on."""
        return {
            "ended": list(self._ended),
            "open": None if self._open is None else self._open.clone(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was called."""
        self._ended = deque(state["ended"], self._ended.maxlen)
        self._open = None if state["open"] is None else state["open"].cpu().clone()
