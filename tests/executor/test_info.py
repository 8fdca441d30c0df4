"""Numbers of a step's info that batches carry, and what `EpisodeReturns` makes of them."""

from __future__ import annotations

import math
from decimal import Decimal
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collectors import start
from environments import EchoEnv
from gymnasium.wrappers import NormalizeReward, RecordEpisodeStatistics
from policies import categorical
from torchrl.envs import GymWrapper, default_info_dict_reader

from torchrl_hts import EpisodeReturns
from torchrl_hts._executor.info import check_info_keys, info_number
from torchrl_hts.errors import Failure, InvalidValueError, WorkerError

pytestmark = pytest.mark.usefixtures("collectors_end")

KEYS = ["won", ("deep", "er", "number")]


class Informs(EchoEnv):
    """Tells, after every second step, how many there were; at an end, whether that is even."""

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        info: dict[str, Any] = {"ignored": "text", "deep": {"other": None}}
        if self.t % 2 == 0:
            info["deep"] = {"er": {"number": np.int64(self.t + 2**40)}}
        if rest[2]:
            info["won"] = self.t % 2 == 0
        return *rest, info


class Says(EchoEnv):
    """Tells what it is given."""

    def __init__(self, info: Any) -> None:
        super().__init__()
        self.info = info

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, self.info


def test_they_lie_below_next_with_nan_where_there_are_none() -> None:
    """Also where a slot held others before, however many executors there are."""
    nan, big = math.nan, 2**40
    expected_won = torch.tensor([[nan, nan, 0, nan, nan, 0, nan, nan]] * 2, dtype=torch.float64)
    numbers = [nan, big + 2, nan, nan, big + 2, nan, nan, big + 2]
    expected = torch.tensor([numbers] * 2, dtype=torch.float64)
    for executors in (1, 2):
        collector = start(
            [partial(Informs, (3,))] * 2, info_keys=KEYS, num_executors=executors, lag=0
        )
        rounds = iter(collector)
        first, second = next(rounds), next(rounds)
        both = torch.cat([first, second], 1)
        assert both["next", "won"].shape == (2, 8, 1)
        torch.testing.assert_close(
            both["next", "won"].squeeze(-1), expected_won, rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            both["next", "deep", "er", "number"].squeeze(-1),
            expected,
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        assert "ignored" not in both["next"].keys()
        assert "won" not in both.keys()
        collector.shutdown()


def test_batches_are_as_ever_without_them() -> None:
    make_env = partial(Informs, (3,))
    plain = next(iter(start([make_env])))
    more = next(iter(start([make_env], info_keys=KEYS, compact_obs=False)))
    assert (plain == more.select(*plain.keys(True, True))).all()
    added = set(more.keys(True, True)) - set(plain.keys(True, True))
    assert {key for key in added if more.get(key) is not None} >= {("next", "won")}
    compact = next(iter(start([make_env], info_keys=KEYS, compact_obs=True)))
    assert ("next", "observation") not in compact.keys(True)
    assert ("next", "won") in compact.keys(True)


def test_raw_returns_behind_normalised_rewards() -> None:
    def make_env() -> Any:
        return NormalizeReward(RecordEpisodeStatistics(EchoEnv((3, 5))))

    collector = start([make_env] * 2, info_keys=[("episode", "r"), ("episode", "l")])
    returns = EpisodeReturns(info_keys=[("episode", "r"), ("episode", "l")])
    rounds = iter(collector)
    for _ in range(4):
        returns.update(next(rounds))
    assert returns.count == 8  # 1 + 2 + 3 and 1 + ... + 5, twice each in both
    assert returns.info_means["episode", "r"] == (6 + 15) / 2
    assert returns.info_means["episode", "l"] == returns.mean_length == 4
    assert returns.mean != pytest.approx((6 + 15) / 2, rel=0.1)


def test_a_resumed_run_has_the_same() -> None:
    def gather(collector: Any) -> Any:
        return next(iter(collector))["next", "deep", "er", "number"]

    make_env = partial(Informs, (3,))
    collector = start([make_env], info_keys=KEYS)
    gather(collector)
    state = collector.state_dict()
    expected = [gather(collector) for _ in range(3)]
    again = start([make_env], info_keys=KEYS)
    again.load_state_dict(state)
    for one in expected:
        torch.testing.assert_close(gather(again), one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((True, 1.0), (np.False_, 0.0), (3, 3.0), (np.float32(0.5), 0.5), (np.array([7]), 7.0)),
        *((np.array(True), 1.0), (torch.tensor(2.5), 2.5), (math.inf, math.inf), (2**53, 2.0**53)),
    ],
)
def test_what_is_one_number(value: Any, number: float) -> None:
    assert info_number({"a": {"b": value}}, ("a", "b")) == number


@pytest.mark.parametrize("info", [{}, {"a": None}, {"a": {}}, {"a": {"b": None}}])
def test_what_is_none(info: Any) -> None:
    assert math.isnan(info_number(info, ("a", "b")))


@pytest.mark.parametrize(
    "value",
    ["1.0", 1j, [1, 2], np.zeros(2), {"c": 1}, np.ma.masked, b"1", Decimal(1), object(), []],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"info\['a'\]\['b'\] = .*one number or bool"):
        info_number({"a": {"b": value}}, ("a", "b"))


def test_what_is_no_dict() -> None:
    said = r"info\['a'\] = 3, in which info_keys looks for 'b': expected a dict"
    with pytest.raises(InvalidValueError, match=said):
        info_number({"a": 3}, ("a", "b"))
    with pytest.raises(WorkerError, match=r"info = None, in which .*'won': expected a dict") as e:
        next(iter(start([partial(Says, None)], info_keys=["won"])))
    assert e.value.failure is Failure.INVALID


def test_a_value_that_is_no_number_is_named_with_its_key() -> None:
    collector = start([partial(Says, {"won": "yes"})], info_keys=["won"])
    with pytest.raises(WorkerError, match=r"info\['won'\] = 'yes'; info_keys takes") as error:
        next(iter(collector))
    assert error.value.failure is Failure.INVALID
    assert (error.value.round, error.value.step) == (0, 0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("won", r"must be a list of names and tuples of names"),
        (3, r"must be a list of names"),
        ([3], r"the entry 3; expected a name"),
        ([()], r"the entry \(\); expected a name"),
        ([("a", 3)], r"the entry \('a', 3\)"),
        ([""], r"the entry ''"),
    ],
)
def test_keys_that_are_none(keys: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        start([EchoEnv], info_keys=keys)


def test_keys_that_lie_within_each_other() -> None:
    with pytest.raises(ValueError, match=r"has 'a' and, within it, \('a', 'b'\)"):
        check_info_keys([("a", "b"), "a"])
    assert check_info_keys(["a", ("a",), ["b", "c"]]) == (("a",), ("b", "c"))  # lists of YAML
    assert check_info_keys(None) == ()


@pytest.mark.parametrize(
    "key",
    [
        *("reward", "observation", "done", "action", "action_log_prob", "collector", "step_count"),
        *(("observation", "x"), "policy_version"),
    ],
)
def test_names_that_batches_have_already(key: Any) -> None:
    with pytest.raises(ValueError, match=r"info_keys has .*already.* rename the info's entry"):
        start([EchoEnv], info_keys=[key], compact_obs=True)


class _Renamed(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {"raw_reward": info["reward"]}


def test_renaming_it_works() -> None:
    """As the message advises."""
    batch = next(iter(start([lambda: _Renamed(Says({"reward": 3}))], info_keys=["raw_reward"])))
    assert batch["next", "raw_reward"].unique().tolist() == [3.0]


def _torchrl_env(reads: bool) -> Any:
    env = GymWrapper(Says({"won": np.float32(1)}), categorical_action_encoding=True)
    return env.set_info_dict_reader(default_info_dict_reader(["won"])) if reads else env


def test_torchrl_environments_read_their_info_themselves() -> None:
    """As the message that refuses the argument advises."""
    said = r"env\.set_info_dict_reader\(torchrl\.envs\.default_info_dict_reader"
    with pytest.raises(ValueError, match=said):
        start([partial(_torchrl_env, False)], info_keys=["won"])
    batch = next(iter(start([partial(_torchrl_env, True)], categorical())))
    assert batch["next", "won"].unique().tolist() == [1.0]
