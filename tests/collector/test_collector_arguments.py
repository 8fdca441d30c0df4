"""Bad arguments: one clear error before anything runs, or while it starts, and nothing left."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from cached import CACHED, batch_of_one_twice
from environments import DictEnv, EchoEnv, OddEnv, wrapped_in_disguise
from policies import categorical, marked
from processes import processes_below
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs import GymEnv, GymWrapper, StepCounter, TransformedEnv
from torchrl_environments import Square

from torchrl_hts import HTSCollector, HTSError, PolicyError, WorkerError
from torchrl_hts._rounds.exchange import MAX_ENVS

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(60)]

# Written in place, factories are pickled by value: their executor doesn't import this module.
WRAP = lambda: GymWrapper(EchoEnv())  # noqa: E731
COUNT_STEPS = lambda: TransformedEnv(GymWrapper(EchoEnv()), StepCounter())  # noqa: E731


@pytest.fixture(autouse=True)
def _ends_what_it_starts(nothing_left: None) -> Iterator[None]:
    """Also the servers of a collector that doesn't come about."""
    before = processes_below(os.getpid())
    yield
    assert processes_below(os.getpid()) <= before


def make(envs: Any = None, policy: Any = None, **kwargs: Any) -> None:
    """Make a collector; it is to fail."""
    if not kwargs.keys() & {"frames_per_batch"}:
        kwargs["frames_per_batch"] = 4 * (len(envs) if isinstance(envs, list) and envs else 2)
    if "policy_factory" not in kwargs and policy is None:
        policy = categorical()
    with HTSCollector([EchoEnv] * 2 if envs is None else envs, policy, **kwargs) as collector:
        next(iter(collector))


INTEGERS = ["frames_per_batch", "total_frames", "lag", "num_actors", "num_executors",
            "actor_threads", "max_frames_per_traj", "seed", "timeline_events", "max_restarts",
            "num_workers", "num_collectors", "worker_idx"]  # fmt: skip


@pytest.mark.parametrize("value", [True, 4.5, "4", np.float64(4.5), float("nan"), (4,)])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_integers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an int, got "):
        make(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_a_least_value(name: str) -> None:
    zero = dict.fromkeys(("lag", "seed", "timeline_events", "worker_idx"), 0)
    least = ({"total_frames": -1, "max_frames_per_traj": -1} | zero).get(name, 1)
    for value in (least - 1, least - 100):
        with pytest.raises(ValueError, match=f"^{name} must be at least {least}, got {value}$"):
            make(**{name: value})


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64, float, np.float32])
def test_integers_of_other_types_are_plain_ones_from_there_on(dtype: Any) -> None:
    """numpy's unsigned ones would wrap around, or not be loaded with ``weights_only=True``."""
    names = ["frames_per_batch", "total_frames", "lag", "num_actors", "num_executors"]
    names += ["actor_threads", "max_frames_per_traj", "timeline_events"]
    numbers = dict(zip(names, (16, 48, 1, 1, 1, 1, 5, 4), strict=True))
    given = {name: dtype(number) for name, number in numbers.items()}
    with HTSCollector([EchoEnv] * 4, categorical(), **given) as collector:
        assert [batch.shape for batch in collector] == [(4, 4)] * 3
        state = collector.state_dict()
    assert {type(state[name]) for name in ("frames", "sync_interval", "lag")} == {int}


def test_a_lag_whose_rounds_would_fill_the_inbox_of_the_learner() -> None:
    with pytest.raises(
        ValueError, match=r"^lag must be at most 299 with 100 environments, got 300$"
    ):
        make([EchoEnv] * 100, lag=300)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_set_seed_takes_what_the_constructor_takes(seed: Any) -> None:
    with HTSCollector([EchoEnv], marked(), frames_per_batch=4, seed=3) as collector:
        with pytest.raises((TypeError, ValueError), match=r"^seed must be "):
            collector.set_seed(seed)
        with pytest.raises(TypeError, match=r"^static_seed must be True or False, got 1$"):
            collector.set_seed(4, static_seed=1)
        assert collector.seed == 3
        next(iter(collector))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("trajs_per_batch", 4, "use split_trajs=True"),
        ("reset_at_each_iter", True, "use max_frames_per_traj"),
        ("interruptor", object(), "every round is complete"),
        ("preemptive_threshold", 0.5, "every environment contributes"),
        ("num_threads", 2, "use actor_threads"),
        ("weight_updater", object(), "use update_policy_weights_"),
        ("weight_sync_schemes", {"policy": None}, "use update_policy_weights_"),
        ("compile_policy", True, "as it is written"),
        ("cudagraph_policy", True, "as it is written"),
    ],
)
def test_arguments_of_other_collectors_say_what_to_use_instead(
    name: str, value: Any, why: str
) -> None:
    with pytest.raises(TypeError, match=f"^HTSCollector does not take {name}: .*{why}"):
        make(**{name: value})


def test_arguments_that_ask_for_nothing_are_let_pass() -> None:
    make(replay_buffer=None, init_random_frames=0, trajs_per_batch=None, use_buffers=False)


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'frames'"):
        make(frames=3)


def test_start_says_what_to_do() -> None:
    collector = HTSCollector([EchoEnv], marked(), frames_per_batch=4)
    with collector, pytest.raises(NotImplementedError, match="iterate over it"):
        collector.start()


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"device": "nonsense"}, ValueError, "^device='nonsense' is not a device"),
        ({"world": 2}, TypeError, "^world must be a World or None, got 2$"),
        ({"policy_device": 1.5}, ValueError, "^policy_device=1.5 is not a device"),
        ({"storing_device": "cuda:99"}, ValueError, "^storing_device='cuda:99', but .* finds"),
        ({"policy_device": "cuda:99"}, ValueError, "^policy_device='cuda:99', but .* finds"),
        ({"storing_device": "mps"}, ValueError, "^storing_device='mps', but .{1,99}machine$"),
        ({"env_device": "xpu:3"}, ValueError, "^env_device='xpu:3', but .{1,99}machine$"),
        ({"policy_device": "meta"}, ValueError, "^policy_device='meta', but .{1,99}machine$"),
        ({"env_device": 99}, ValueError, "^env_device=(99 is not|'cuda:99', but)"),
        ({"exploration_type": "RANDOM"}, TypeError, "^exploration_type must be an Exploration"),
        ({"postproc": 3}, TypeError, "^postproc must be callable, got 3"),
        ({"pre_collect_hook": 3}, TypeError, "^pre_collect_hook must be callable, got 3"),
        ({"post_collect_hook": []}, TypeError, r"^post_collect_hook must be callable, got \[\]"),
        ({"storage_dir": ""}, ValueError, "^storage_dir='' is not a directory"),
        ({"policy_factory": []}, TypeError, r"^policy_factory must be callable, got \[\]"),
        ({"policy_factory": ["a"]}, TypeError, "^policy_factory must be callable, got 'a'"),
        ({"create_env_kwargs": [{}]}, ValueError, "^create_env_kwargs has 1 dicts for 2 env"),
        ({"create_env_kwargs": 3}, TypeError, "^create_env_kwargs must be a dict or a list"),
        ({"create_env_kwargs": ["a", "b"]}, TypeError, "^create_env_kwargs must be a dict or"),
    ],
)
def test_other_options(kwargs: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make(**kwargs)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, observation: Tensor) -> Tensor:
        return observation


class TestFactories:
    """``create_env_fn``."""

    @pytest.mark.parametrize(
        ("envs", "said"),
        [
            ([], f"must have 1 to {MAX_ENVS} callables, one per environment; got 0"),
            ([EchoEnv] * (MAX_ENVS + 1), f"must have 1 to .* callables.*; got {MAX_ENVS + 1}"),
            ([EchoEnv, EchoEnv()], r"create_env_fn\[1\] is a EchoEnv; expected a callable"),
            ("CartPole-v1", "create_env_fn is 'CartPole-v1'; expected a callable that makes"),
            ([EchoEnv, "CartPole-v1"], r"create_env_fn\[1\] is 'CartPole-v1'; expected a callable"),
            (None, "create_env_fn is a NoneType; expected a callable that makes an environment"),
            ([[EchoEnv]], r"create_env_fn\[0\] is a list; expected one callable that makes"),
            *(
                (iterable, r"create_env_fn is a .*; expected a callable or a list of .*list\(")
                for iterable in (iter([EchoEnv]), {EchoEnv}, {"a": EchoEnv}, np.array([EchoEnv]))
            ),
        ],
    )
    def test_are_callables(self, envs: Any, said: str) -> None:
        with pytest.raises((TypeError, ValueError), match=said):
            HTSCollector(envs, categorical(), frames_per_batch=4)

    def test_that_cant_be_pickled(self) -> None:
        lock = threading.Lock()
        with pytest.raises(TypeError, match=r"create_env_fn\[1\] can't be pickled.*lock.*inside"):
            make([EchoEnv, lambda: EchoEnv() if lock else None])

    @pytest.mark.parametrize(
        ("factory", "said"),
        [
            (int, "made a builtins.int; expected a gymnasium.Env, a gymnasium.vector.VectorEnv or"),
            (EchoEnv().reset, "made a builtins.tuple; expected"),
            (partial(gym.make_vec, "CartPole-v1", 2), "which would waste a row of the batch"),
            (Square, r"of batch size \(2, 2\)"),
            (partial(EchoEnv, colour="red"), "unexpected keyword argument 'colour'"),
            (partial(gym.make, "Nowhere-v0"), "doesn't exist"),
        ],
    )
    def test_that_make_something_else(self, factory: Any, said: str) -> None:
        with pytest.raises(WorkerError, match="environment 1 failed while it was made") as e:
            make([EchoEnv, factory], num_executors=1)
        assert said.replace("\\", "") in e.value.remote_traceback
        assert e.value.env_indices == (1,)

    @pytest.mark.parametrize("factory", CACHED)
    def test_that_make_the_same_once_more(self, factory: Any) -> None:
        """Its rows would hold parts of one episode."""
        said = r"create_env_fn\[1\] made the environment that create_env_fn\[0\] has made before"
        with pytest.raises(WorkerError, match=said):
            make([factory] * 2, num_executors=1)

    def test_that_make_a_batch_of_one_twice(self) -> None:
        with pytest.raises(WorkerError, match=r"create_env_fn\[0\] made a batch .*twice"):
            make([batch_of_one_twice])

    @pytest.mark.parametrize("num_executors", [1, 3])
    def test_whose_spaces_differ(self, num_executors: int) -> None:
        four = partial(EchoEnv, action_space=gym.spaces.Discrete(4))
        said = r"(?s)environment 2 differs from environment 0 in its action_space.*\(3\).*\(4\)"
        with pytest.raises(ValueError, match=said):
            make([EchoEnv, EchoEnv, four], num_executors=num_executors)
        with pytest.raises(ValueError, match=r"environment 1 differs .* in its observation_space"):
            make([EchoEnv, DictEnv], num_executors=min(2, num_executors))

    def test_whose_specs_differ(self) -> None:
        """The message names the one that differs, and shows no other."""
        envs = [partial(GymEnv, f"{name}-v1") for name in ("CartPole", "Acrobot")]
        with pytest.raises(ValueError, match=r"environment 1 differs .* in its spec") as e:
            make(envs)
        assert "'observation'" in str(e.value)
        assert "reward" not in str(e.value)

    @pytest.mark.parametrize(
        ("first", "last", "num_executors"),
        [
            (EchoEnv, WRAP, 1),
            (WRAP, EchoEnv, 3),
            (EchoEnv, wrapped_in_disguise, 1),
            (EchoEnv, wrapped_in_disguise, 3),
        ],
    )
    def test_of_both_kinds(self, first: Any, last: Any, num_executors: int) -> None:
        """Whether or not the pickled factories give away that they need torch."""
        with pytest.raises(ValueError, match=r"environment 2 .* kind"):
            make([first, first, last], num_executors=num_executors)

    def test_with_spaces_of_no_fixed_shape(self) -> None:
        with pytest.raises(TypeError, match="'observation' is a Text space; supported are Box"):
            make([partial(OddEnv, "observation_space", gym.spaces.Text(5))])
        with pytest.raises(TypeError, match="the action space has a Text; supported are Discrete"):
            make([partial(OddEnv, "action_space", gym.spaces.Text(5))])
        reserved = gym.spaces.Dict(reward=gym.spaces.Box(-1, 1))
        with pytest.raises(ValueError, match=r"environment gives .*'reward'.*Rename the env"):
            make([partial(OddEnv, "observation_space", reserved)])

    def test_that_count_steps_already(self) -> None:
        with pytest.raises(WorkerError, match=r"EnvError: .*'step_count' already: set max_f") as e:
            make([COUNT_STEPS], max_frames_per_traj=5)
        assert "Traceback" not in str(e.value)  # our own frames tell a user nothing


class Double(nn.Module):
    """A network over float64 observations, whose output has some shape."""

    def __init__(self, *after: nn.Module, out: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, out), *after).double()

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation)


def acting(module: Any, out_key: str = "action", in_key: str = "observation") -> TensorDictModule:
    return TensorDictModule(module, [in_key], [out_key])


def with_nan() -> nn.Module:
    policy = categorical()
    for parameter in policy.parameters():
        parameter.data.fill_(torch.nan)
    return policy


class TestPolicies:
    """``policy`` and ``policy_factory``."""

    @pytest.mark.parametrize(
        ("policy", "error", "said"),
        [
            (nn.Linear, TypeError, "got the class Linear: make one of it"),
            (TensorDictModule, TypeError, "got the class TensorDictModule: make one of it"),
            (torch.sigmoid, TypeError, "can't be found out: wrap it as TensorDictModule"),
            (Locked(), TypeError, "the policy can't be pickled.*lock"),
            (acting(nn.LazyConv2d(3, 2)), ValueError, "lazy parameters .*Expected 3D.*run it once"),
            (acting(Double(), in_key="pixels"), ValueError, "reads 'pixels'.*it gives .*'observ"),
            (
                acting(Double(), "logits"),
                ValueError,
                "does not write .*'action'; it writes 'log",
            ),
            (acting(Double(out=2)), ValueError, r"2 element\(s\) .*Discrete\(3\) needs 1 or 3"),
            (acting(nn.Linear(4, 3)), PolicyError, "torch.float64.*must have the same dtype"),
            (acting(nn.Linear(5, 3).double()), PolicyError, r"\(512, 4\)\): .*cannot be multi"),
            (acting(torch.sum), PolicyError, "trial run"),
            (with_nan(), PolicyError, "trial run.*nan"),
            (acting(Double(nn.BatchNorm1d(3))), PolicyError, r"1 \(BatchNorm1d\) .*policy.eval"),
            (acting(Double(nn.Dropout())), PolicyError, r"1 \(Dropout\) is in training mode"),
        ],
    )
    def test_that_cant_act(self, policy: Any, error: type[Exception], said: str) -> None:
        with pytest.raises(error, match=f"(?s){said}"):
            make([EchoEnv] * 2, policy)

    @pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.Dropout()])
    def test_in_evaluation_mode_is_fine(self, layer: nn.Module) -> None:
        make([EchoEnv] * 2, acting(Double(layer)).eval())

    def test_that_mixes_rows_in_some_other_way(self) -> None:
        with pytest.raises(PolicyError, match="rows aren't independent"):
            make([EchoEnv] * 3, acting(Centred()))

    def test_both_are_given(self) -> None:
        with pytest.raises(TypeError, match="either policy or policy_factory, not both"):
            HTSCollector([EchoEnv], marked(), policy_factory=marked, frames_per_batch=4)

    def test_a_factory_that_fails(self) -> None:
        def fail() -> nn.Module:
            raise LookupError("no checkpoint")

        with pytest.raises(LookupError, match="no checkpoint"):
            make(policy_factory=fail)


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, observation: Tensor) -> Tensor:
        return (observation - observation.mean(0))[:, :3]


def test_errors_are_what_a_caller_would_catch() -> None:
    assert issubclass(PolicyError, ValueError)
    assert issubclass(WorkerError, RuntimeError)
    assert issubclass(PolicyError, HTSError)
    assert issubclass(WorkerError, HTSError)
