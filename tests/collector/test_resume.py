"""A collector goes on from its state dict bit for bit, in another process as well."""

from __future__ import annotations

import array
import io
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environments import EchoEnv
from policies import categorical, marked
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import GymEnv, GymWrapper
from torchrl.modules import LSTMModule

from torchrl_hts import DelayedGradient, HTSCollector
from torchrl_hts.errors import WorkerError
from torchrl_hts.testing import digest

pytestmark = pytest.mark.usefixtures("nothing_left")

CARTPOLE = partial(gym.make, "CartPole-v1")


class Training:
    """A collector with a learner that needs each batch and each parameter to be the right one."""

    def __init__(self, *, lag: int, make_env: Callable[[], Any] = CARTPOLE, **options: Any) -> None:
        self.policy: nn.Module = categorical(num_actions=2)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.03)
        self.delayed = DelayedGradient(self.policy, lag=lag)
        options = {"frames_per_batch": 3 * 7, "total_frames": 3 * 7 * 12, "seed": 1, **options}
        self.collector = HTSCollector([make_env] * 3, self.policy, lag=lag, **options)

    def step(self, batch: TensorDictBase) -> str:
        """One update; returns a digest of the batch and of what was learned from it."""
        with self.delayed(batch):
            log_prob = self.policy.get_dist(batch.clone()).log_prob(batch["action"])
            (log_prob * batch["next", "reward"].squeeze(-1).cumsum(1)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return digest(batch) + digest(list(self.policy.parameters()))

    def state(self) -> dict[str, Any]:
        parts = (self.collector, self.optimizer, self.delayed)
        file = io.BytesIO()  # the way that a checkpoint takes
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state: Any) -> None:
        for part, own in zip((self.collector, self.optimizer, self.delayed), state, strict=True):
            part.load_state_dict(own)


STOCK = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)


@pytest.mark.parametrize(
    ("lag", "make_env"), [(0, CARTPOLE), (1, CARTPOLE), (2, CARTPOLE), (1, STOCK)]
)
def test_i7_a_resumed_run_is_the_run_that_was_never_interrupted(
    lag: int, make_env: Callable[[], Any]
) -> None:
    whole = Training(lag=lag, make_env=make_env, num_executors=1)
    with whole.collector as data:
        expected = [whole.step(batch) for batch in data]
    first = Training(lag=lag, make_env=make_env, num_executors=2)
    states = []
    with first.collector as data:
        # Saving changes nothing, at the very end neither.
        for j, batch in enumerate(data):
            assert first.step(batch) == expected[j]
            states.append(first.state())
    for j in (0, 4, 10, 11):
        resumed = Training(lag=lag, make_env=make_env, num_executors=3, num_actors=2, seed=99)
        with resumed.collector as data:
            resumed.load(states[j])
            if j == 4:  # loaded, and saved again before anything has run
                resumed.load(resumed.state())
            assert [resumed.step(batch) for batch in data] == expected[j + 1 :]
            assert data.statistics().frames == 12 * 21


def test_a_state_taken_before_the_first_batch() -> None:
    whole = Training(lag=1)
    with whole.collector as data:
        state = whole.state()
        expected = [whole.step(batch) for batch in data]
    resumed = Training(lag=1, seed=99)
    with resumed.collector as data:
        resumed.load(state)
        assert [resumed.step(batch) for batch in data] == expected


def test_speed_is_that_of_this_collector_alone() -> None:
    first = Training(lag=1)
    with first.collector as data:
        batches = iter(data)
        for _ in range(6):
            first.step(next(batches))
        state = first.state()
    resumed = Training(lag=1)
    with resumed.collector as data:
        resumed.load(state)
        resumed.step(next(iter(data)))
        statistics = data.statistics()
    assert (statistics.frames, statistics.rounds) == (7 * 21, 7)
    assert statistics.frames_per_second * statistics.elapsed_s == pytest.approx(21)


def test_recurrent_states_episodes_and_step_counts_go_on() -> None:
    def make(seed: int) -> HTSCollector:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            lstm = LSTMModule(4, 8, in_key="observation", out_key="embed")
            head = TensorDictModule(nn.Linear(8, 2), ["embed"], ["logits"])
        sample = TensorDictModule(lambda x: x.argmax(-1), ["logits"], ["action"])
        return HTSCollector(
            [CARTPOLE] * 2,
            TensorDictSequential(lstm, head, sample),
            frames_per_batch=2 * 5,
            total_frames=2 * 5 * 10,
            max_frames_per_traj=8,
            lag=1,
            seed=seed,
        )

    with make(3) as data:
        expected = [digest(batch) for batch in data]
    with make(3) as data:
        batches = iter(data)
        assert [digest(next(batches)) for _ in range(4)] == expected[:4]
        state = data.state_dict()
    with make(4) as data:
        data.load_state_dict(state)
        assert [digest(batch) for batch in data] == expected[4:]


def test_weights_that_were_staged_stay_in_force() -> None:
    other = marked()
    other.module.mark.data.fill_(7)
    with HTSCollector([CARTPOLE], marked(), frames_per_batch=4, lag=0) as collector:
        batches = iter(collector)
        next(batches)
        collector.update_policy_weights_(other)
        state = collector.state_dict()
        assert next(batches)["mark"].unique().item() == 7
    with HTSCollector([CARTPOLE], marked(), frames_per_batch=4, lag=0) as collector:
        collector.load_state_dict(state)
        batches = iter(collector)
        assert [next(batches)["mark"].unique().item() for _ in range(2)] == [7, 7]


class KeepsAFile(EchoEnv):
    """An environment whose state can't be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.file = open("/dev/null")  # noqa: SIM115


@pytest.mark.parametrize(
    "make_env", [KeepsAFile, lambda: GymWrapper(KeepsAFile(), categorical_action_encoding=True)]
)
def test_environments_that_cannot_be_saved_begin_new_episodes(
    make_env: Callable[[], Any],
) -> None:
    def collector(seed: int) -> HTSCollector:
        return HTSCollector(
            [make_env] * 2, marked(), frames_per_batch=8, total_frames=48, lag=1, seed=seed
        )

    with collector(0) as data:
        batches = iter(data)
        expected = [digest(next(batches)) for _ in range(2)]
        state = data.state_dict()
        expected.append(digest(next(batches)))  # was collected already, and is in the state
        was = next(batches)
    resumed = []
    for _ in range(2):
        with collector(9) as data:
            with pytest.warns(UserWarning, match="begin new episodes.*environment 0.*'file'"):
                data.load_state_dict(state)
            resumed.append([digest(batch) for batch in data])
    assert resumed[0] == resumed[1]
    assert len(resumed[0]) == 4
    assert resumed[0][0] == expected[2]
    assert resumed[0][1] != digest(was)


class Engine(gym.Env[Any, Any]):
    """Tells its state itself, and shows where it keeps it: memory that is none of numpy's."""

    observation_space = gym.spaces.Dict({"of": gym.spaces.Box(0, 99, (2,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.lock, self.memory = threading.Lock(), array.array("f", [0.0, 0.0])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.memory[0] = 0.0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.memory[0] += 1
        return self._shown(), 1.0, self.memory[0] == 9, False, {}

    def _shown(self) -> Any:
        return {"of": np.frombuffer(self.memory, np.float32)}

    def get_state(self) -> float:
        return self.memory[0]

    def set_state(self, state: float) -> None:
        self.memory[0] = state


def test_what_an_engine_shows_of_its_own_memory_does_not_keep_it_from_being_saved() -> None:
    def gathered(collector: HTSCollector, rounds: int) -> list[str]:
        batches = iter(collector)
        return [digest(next(batches)) for _ in range(rounds)]

    options = {"frames_per_batch": 2 * 4, "total_frames": 2 * 4 * 6, "seed": 0}
    with HTSCollector([Engine] * 2, None, **options) as collector:
        gathered(collector, 2)
        state = collector.state_dict()
        assert not state["why_environments_are_lost"]
        expected = gathered(collector, 3)
    with HTSCollector([Engine] * 2, None, **options) as collector:
        collector.load_state_dict(state)
        assert gathered(collector, 3) == expected


def test_a_state_after_the_shutdown_says_that_episodes_are_lost() -> None:
    with HTSCollector([CARTPOLE], marked(), frames_per_batch=4) as collector:
        next(iter(collector))
    state = collector.state_dict()
    with HTSCollector([CARTPOLE], marked(), frames_per_batch=4) as collector:
        with pytest.warns(UserWarning, match="had been shut down"):
            collector.load_state_dict(state)
        assert next(iter(collector))["policy_version"].unique().item() == 1


def test_a_state_of_another_environment_is_refused() -> None:
    def state_of(make_env: Callable[[], Any], lag: int) -> Any:
        with HTSCollector([make_env], marked(), frames_per_batch=4, lag=lag) as collector:
            next(iter(collector))
            state = collector.state_dict()
            del state["spaces"]  # as older versions have saved it
            return state

    with (
        HTSCollector([CARTPOLE], marked(), frames_per_batch=4, lag=1) as collector,
        pytest.raises(ValueError, match=r"other environments.*next/observation, observation"),
    ):
        collector.load_state_dict(state_of(EchoEnv, 1))  # float64
    with HTSCollector([CARTPOLE], marked(), frames_per_batch=4, lag=0) as collector:
        collector.load_state_dict(state_of(EchoEnv, 0))
        with pytest.raises(
            WorkerError, match=r"(?s)environment 0 failed.*saved one has: [^\n]*EchoEnv"
        ):
            next(iter(collector))


def test_a_run_that_had_ended_can_be_made_longer() -> None:
    whole = Training(lag=1)
    with whole.collector as data:
        expected = [whole.step(batch) for batch in data]
    short = Training(lag=1, total_frames=3 * 7 * 5)
    with short.collector as data:
        for batch in data:
            short.step(batch)
            state = short.state()  # also after the last batch, before the workers are ended
    resumed = Training(lag=1)
    with resumed.collector as data:
        resumed.load(state)
        assert [resumed.step(batch) for batch in data] == expected[5:]
    resumed = Training(lag=1)
    with resumed.collector, pytest.warns(UserWarning, match="had been shut down"):
        resumed.load(short.state())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"packed": True}, "large layers packed where the state was taken"),
        ({"transposed": True}, "linear layers transposed where the state was taken"),
        ({"blocked": True}, "products in blocks of rows where the state was taken"),
        ({"sizes": (100,)}, "batches of 100 rows agree .* where the state was taken"),
        ({"fixed_rows": 1}, None),
        ({"packed": 0}, None),
        ({"transposed": "yes"}, None),
        ({"blocked": "yes"}, None),
        ({"sizes": ()}, None),
        ({"sizes": (5, 3)}, None),
    ],
    ids=lambda value: str(value),
)
def test_a_state_from_where_batches_round_otherwise_says_so(
    changed: dict[str, Any], said: str | None
) -> None:
    training = Training(lag=1)
    with training.collector as collector:
        next(iter(collector))
        state = collector.state_dict()
        state["invariant_sizes"] = state["invariant_sizes"] | changed
        if said is None:
            (name,) = changed
            error = ValueError if name == "sizes" else TypeError
            with pytest.raises(
                error, match=f"'invariant_sizes'.*({name}.*can't be|can't be.*{name})"
            ):
                collector.load_state_dict(state)
            return
        with pytest.warns(UserWarning, match=f"not bit for bit: .* here, .*{said}"):
            collector.load_state_dict(state)


def test_a_state_from_before_layers_could_be_changed_goes_on_silently(
    recwarn: pytest.WarningsRecorder,
) -> None:
    training = Training(lag=1)
    with training.collector as collector:
        next(iter(collector))
        state = collector.state_dict()
        assert not state["invariant_sizes"].pop("packed")
        assert not state["invariant_sizes"].pop("transposed")
        assert not state["invariant_sizes"].pop("blocked")
        collector.load_state_dict(state)
    assert not [warning for warning in recwarn if "bit for bit" in str(warning.message)]
