"""Values that don't fit are refused, with the value and its key; what loses nothing is taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import Scripted, play

from torchrl_hts._executor.gym_actions import action_reader
from torchrl_hts.errors import InvalidValueError

S = gym.spaces


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Numpy has nothing to say of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def box(dtype: Any, n: int = 2) -> gym.Space[Any]:
    info: Any = np.finfo(dtype) if np.dtype(dtype).kind == "f" else np.iinfo(dtype)
    return S.Box(info.min, info.max, (n,), dtype)


F16, F32, F64 = box(np.float16), box(np.float32), box(np.float64)
U8, I32, I64 = box(np.uint8), box(np.int32), box(np.int64)
BOOLS = S.Box(0, 1, (2,), bool)
MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (BOOLS, np.array([0, 1], np.uint8)),
        (BOOLS, [1, 0]),
        (BOOLS, np.array([True, False])),
        (U8, np.array([True, False])),
        (F32, np.array([True, False])),
        (F32, np.array([MOST, -MOST])),
        (F32, np.array([1e30, -1e30], np.float32)),
        (F32, np.array([np.inf, -np.inf])),
        (F16, np.array([65504.0, np.inf])),
        (F16, np.array([65504, -3])),
        (F64, np.array([1e300, -1e300])),
        (I32, np.array([2**31 - 1, -(2**31)])),
        (I64, np.array([2**63 - 1, 0], np.uint64)),
        (F32, np.ma.array([1.0, 2.0], mask=[False, False])),
        (F32, torch.tensor([1.0, 2.0])),
    ],
    ids=repr,
)
def test_what_keeps_its_meaning(space: gym.Space[Any], observation: Any, memory_fd: int) -> None:
    written = play(Scripted(space, observation), memory_fd)
    for key in (("observation",), ("next", "observation")):
        assert written[key][0, 0].tolist() == np.asarray(observation).tolist()


def test_rounding_is_no_loss(memory_fd: int) -> None:
    numbers = np.array([0.1, 1e-50])
    written = play(Scripted(F32, numbers), memory_fd)["observation",][0, 0]
    assert written.tolist() == numbers.astype(np.float32).tolist()


@pytest.mark.parametrize(
    ("space", "observation", "said"),
    [
        (F32, np.array([0, 1e39]), "the value 1e\\+39; .* float32, which ends at 3.4028e\\+38"),
        (F32, [0.0, -1e39], "the value -1e\\+39"),
        (F16, np.array([0, 65520.0]), "the value 65520.0; .* float16, which ends at 65504"),
        (F16, np.array([70000, 0]), "the value 70000; .* float16"),
        (F64, np.array([0, np.longdouble("1e400")]), r"the value 1e\+400; .* float64"),
        (I32, np.array([0, 2**31]), "int64 with values from 0 to 2147483648; .* says int32"),
        (I64, np.array([0, 2**63], np.uint64), "to 9223372036854775808; .* says int64"),
        (U8, np.array([-1, 3]), "int64 with values from -1 to 3; .* says uint8"),
        (U8, np.array([1.0, 2.0]), "data type float64; .* says uint8"),
        (BOOLS, np.array([0, 2], np.uint8), "uint8 with values from 0 to 2; .* says bool"),
        (BOOLS, np.array([0.0, 1.0]), "data type float64; .* says bool"),
        (F32, np.array([1, 2j]), "data type complex128"),
        (F32, np.array([1.0, 2.0], object), "data type object"),
        (I64, [0, 2**70], "data type object"),
        (F32, ["1", "2"], "data type <U1"),
        (F32, [[1.0], [1.0, 2.0]], "as a list that is no array"),
        (F32, torch.ones(2, requires_grad=True), "as a Tensor that is no array"),
        (F32, np.ma.array([1.0, 2.0], mask=[False, True]), "with masked elements"),
    ],
    ids=repr,
)
def test_what_does_not(space: gym.Space[Any], observation: Any, said: str, memory_fd: int) -> None:
    with pytest.raises(InvalidValueError, match=f"returned 'observation' .*{said}") as refused:
        play(Scripted(space, observation), memory_fd)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("reward", "written"),
    [
        (MOST, MOST),
        (3.4028235e38, MOST),  # nearer to the largest number than to what would be the next
        (float("inf"), float("inf")),
        (-np.inf, -np.inf),
        (np.float64(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (10**30, float(np.float32(1e30))),
        (True, 1.0),
        (np.array([[2]]), 2.0),
        (torch.tensor(3.0), 3.0),
        (torch.tensor([3], dtype=torch.int32), 3.0),
    ],
    ids=repr,
)
def test_rewards_that_fit(reward: Any, written: float, memory_fd: int) -> None:
    env = Scripted(F32, np.zeros(2, np.float32), reward)
    assert play(env, memory_fd)["next", "reward"].item() == written


@pytest.mark.parametrize(
    "reward",
    [
        1e39, -1e39, np.float64(1e39), np.array(1e39), 10**39, -(10**400), np.longdouble("1e400"),
        torch.tensor(1e39, dtype=torch.float64), Decimal("1e400"),
    ],
    ids=lambda reward: repr(reward)[:20],
)  # fmt: skip
def test_rewards_that_are_too_large(reward: Any, memory_fd: int) -> None:
    env = Scripted(F32, np.zeros(2, np.float32), reward)
    with pytest.raises(InvalidValueError, match=r"the reward .*1.*expected one number") as refused:
        play(env, memory_fd)
    assert "float32" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("reward", [1j, np.array(1j), "1.5", np.array("1.5"), b"1", [1, 2], {}])
def test_rewards_that_are_no_number(reward: Any, memory_fd: int) -> None:
    env = Scripted(F32, np.zeros(2, np.float32), reward)
    with pytest.raises(InvalidValueError, match=r"the reward .*; expected one number"):
        play(env, memory_fd)


def read(space: gym.Space[Any], action: Any) -> Any:
    """What the environment is given for an action."""
    action = np.asarray(action)
    return action_reader(space, ("action",), lambda *_: [action[None]])(0, 0)


@pytest.mark.parametrize(
    ("space", "action", "given"),
    [
        (S.Discrete(3), 2, 2),
        (S.Discrete(3, start=5), 2, 7),
        (S.Discrete(3), 2.0, 2),
        (S.Discrete(3), [0.0, 0.0, 1.0], 2),
        (S.Discrete(2), True, 1),
        (S.Discrete(1, start=4), [1], 4),
        (S.Discrete(1, start=4), 0, 4),
        (S.MultiDiscrete([2, 3]), [1, 2], [1, 2]),
        (S.MultiDiscrete([2, 3], start=[5, 6]), [1.0, 2.0], [6, 8]),
        (S.MultiDiscrete([2, 3]), [0, 1, 0, 0, 1], [1, 2]),
        (U8, [3, 255], [3, 255]),
        (U8, [3.0, 255.0], [3, 255]),
        (F32, [0.1, 1e-50], np.array([0.1, 1e-50], np.float32).tolist()),
        (F32, [np.inf, 0], [np.inf, 0]),
        (S.MultiBinary(2), np.array([1, 0], np.float32), [1, 0]),
    ],
)
def test_actions_that_fit(space: gym.Space[Any], action: Any, given: Any) -> None:
    made = read(space, action)
    assert np.asarray(made).tolist() == given
    assert not isinstance(made, float)


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (S.Discrete(3), 3, r"the value 3; .*Discrete\(3\) takes the indices 0 to 2"),
        (S.Discrete(3), -1, "the value -1"),
        (S.Discrete(3), 1.5, "the value 1.5"),
        (S.Discrete(3, start=5), 5, "the value 5; .*start=5.* takes the indices 0 to 2"),
        (S.MultiDiscrete([2, 3]), [1, 3], r"array\(\[1, 3\]\).* indices 0 to \[1, 2\]"),
        (S.MultiDiscrete([2, 3]), [0.5, 0], "indices"),
        (U8, [3, 256], "the value 256, .* data type is uint8"),
        (U8, [3, -1], "the value -1"),
        (U8, [0.5, 1], "the value 0.5"),
        (F32, [1e39, 0], r"the value 1e\+39, .* data type is float32"),
        (S.MultiBinary(2), [1, 2], r"the value 2; .* is MultiBinary\(2\), which takes 0 and 1"),
        (S.MultiBinary(2), [-1, 0], "the value -1"),
        (S.MultiBinary(2), [0.5, 0], "the value 0.5"),
    ],
)
def test_actions_that_do_not(space: gym.Space[Any], action: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=f"the policy wrote 'action' with .*{said}"):
        read(space, action)
