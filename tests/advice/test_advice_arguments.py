"""Advice about arguments, policies and resources, followed; mostly without a worker."""

from __future__ import annotations

import resource
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from advised import gather, refusal
from collectors import start
from environments import EchoEnv
from policies import Marked, categorical, marked
from probe import layout
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Bernoulli
from torchrl.data import Categorical, Composite
from torchrl.envs import GymWrapper, SerialEnv, TransformedEnv, VecNorm
from torchrl.modules import MaskedCategorical, ProbabilisticActor

from torchrl_hts import HTSCollector, ResourceError
from torchrl_hts._executor.info import check_info_keys, info_number
from torchrl_hts._planning.arguments import check_factories, make_policy
from torchrl_hts._planning.batched_envs import factories_of
from torchrl_hts._planning.pickling import pickle_factories, pickle_policy
from torchrl_hts._planning.policy_forms import as_module
from torchrl_hts._planning.random_actions import RandomActions
from torchrl_hts._policy.draws import WordStream
from torchrl_hts._processes.limits import check_descriptors, check_storage
from torchrl_hts.collector.stock_arguments import take_stock_arguments

pytestmark = pytest.mark.usefixtures("warm_servers")
TAKEN = {"frames_per_batch": 4, "total_frames": 4}


def said_by(call: Callable[[], Any]) -> str:
    """The message with which something is refused."""
    with pytest.raises((TypeError, ValueError, ResourceError, KeyError)) as caught:
        call()
    return str(caught.value)


class TestFactories:
    """Those of environments."""

    def test_more_workers_than_factories(self) -> None:
        message = said_by(lambda: check_factories([EchoEnv] * 2, None, copies=3))
        assert "give one that is to be copied, or leave num_workers out" in message
        assert check_factories(EchoEnv, None, copies=3) == [EchoEnv] * 3
        assert check_factories([EchoEnv] * 2, None) == [EchoEnv] * 2

    def test_two_numbers_of_copies(self) -> None:
        message = said_by(lambda: take_stock_arguments({"num_workers": 2, "num_collectors": 3}))
        assert "give one of them" in message
        assert take_stock_arguments({"num_collectors": 3}).copies == 3

    def test_an_environment_in_place_of_a_factory(self) -> None:
        env = EchoEnv()
        assert "a callable that makes an environment" in said_by(lambda: check_factories(env, None))
        (factory,) = check_factories(lambda: EchoEnv(), None)
        assert isinstance(factory(), EchoEnv)

    def test_what_cant_be_pickled(self) -> None:
        lock = threading.Lock()
        message = said_by(lambda: pickle_factories([lambda: EchoEnv() if lock else None]))
        assert "(locks, files, generators, environments) inside the callable instead" in message

        def inside() -> Any:
            own = threading.Lock()
            return EchoEnv() if own else None

        assert pickle_factories([inside])

    def test_a_transform_that_works_on_all_environments(self) -> None:
        def one() -> Any:
            return GymWrapper(EchoEnv())

        def normalised() -> Any:
            return TransformedEnv(one(), VecNorm())

        message = said_by(lambda: factories_of(TransformedEnv(SerialEnv(2, one), VecNorm()), {}))
        assert "put it into the factory of each, or normalise in the policy" in message
        factories = factories_of(SerialEnv(2, normalised), {})
        assert factories is not None
        assert isinstance(factories[0]().transform, VecNorm)


class TestPolicies:
    """Forms of a policy."""

    def test_a_policy_and_a_factory(self) -> None:
        assert "give either policy or policy_factory" in said_by(
            lambda: make_policy(marked(), marked)
        )
        assert make_policy(None, marked).out_keys == marked().out_keys
        assert "give one factory" in said_by(lambda: make_policy(None, [marked, categorical]))
        assert make_policy(None, [marked]).out_keys == marked().out_keys

    def test_a_class(self) -> None:
        assert "make one of it, or give it as policy_factory" in said_by(lambda: as_module(Marked))
        assert isinstance(make_policy(Marked(), None), TensorDictModule)
        assert isinstance(make_policy(None, Marked), TensorDictModule)

    def test_a_function_around_a_module(self) -> None:
        module = nn.Linear(4, 3)
        message = said_by(lambda: as_module(lambda observation: module(observation)))
        line = message.split("pass the module itself, as ")[1]
        policy = eval(line, {"TensorDictModule": TensorDictModule, "module": module})
        assert make_policy(policy, None) is policy

    def test_parameters_that_cant_be_found_out(self) -> None:
        line = said_by(lambda: as_module(torch.sigmoid)).split("wrap it as ")[1]
        line = line.replace("[...]", "['observation']")
        names = {"TensorDictModule": TensorDictModule, "policy": torch.sigmoid}
        assert make_policy(eval(line, names), None).out_keys == ["action"]

    def test_a_callable_that_fails_on_all_there_is(self) -> None:
        def policy(tensordict: TensorDictBase) -> Tensor:
            return torch.ones(tensordict["pixels"].shape[:-1], dtype=torch.int64)

        assert "TensorDictModule(policy, in_keys=[...]" in refusal(EchoEnv, policy)  # type: ignore[arg-type]

        def by_key(observation: Tensor) -> Tensor:
            return torch.ones(observation.shape[:-1], dtype=torch.int64)

        gather(EchoEnv, TensorDictModule(by_key, ["observation"], ["action"]))

    def test_a_callable_that_returns_no_tensordict(self) -> None:
        def bare(tensordict: TensorDictBase) -> Tensor:
            return torch.ones(tensordict.shape, dtype=torch.int64)

        def within(tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("action", bare(tensordict))

        message = refusal(EchoEnv, bare)  # type: ignore[arg-type]
        assert "return the TensorDict with the action in it" in message
        gather(EchoEnv, within)  # type: ignore[arg-type]

    def test_a_mask_and_random_actions(self) -> None:
        spec = Categorical(3, mask=torch.tensor([True, False, True]))
        assert "give a policy that reads the mask, with MaskedCategorical" in said_by(
            lambda: RandomActions(Composite(action=spec))
        )
        space = gym.spaces.Dict(
            observation=gym.spaces.Box(-1, 1, (4,)), mask=gym.spaces.Box(0, 1, (3,), bool)
        )
        mask = np.array([True, False, True])

        class Masked(EchoEnv):
            observation_space: Any = space

            def __init__(self) -> None:
                super().__init__()
                self.observation_space = space

            def _observe(self, action: float) -> Any:
                return {"observation": np.zeros(4, np.float32), "mask": mask}

        policy = ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"]),
            in_keys={"logits": "logits", "mask": "mask"},
            distribution_class=MaskedCategorical,
        )
        assert not (gather(Masked, policy)["action"] == 1).any()

    def test_what_cant_be_pickled(self) -> None:
        class Logging(nn.Linear):
            def __init__(self) -> None:
                super().__init__(4, 3)
                self.lock = threading.Lock()

        message = said_by(lambda: pickle_policy(make_policy(Logging(), None)))
        assert "Keep locks, files, generators and loggers out of modules" in message
        module = Logging()
        del module.lock
        assert pickle_policy(make_policy(module, None))

    def test_draws_that_grow(self) -> None:
        words = np.zeros((2, 1), np.uint64)
        stream = WordStream(2, words, torch.device("cpu"))
        stream.uniform_array((2,))
        assert "number of draws the same in every call" in said_by(
            lambda: stream.uniform_array((2,))
        )
        assert len(WordStream(2, words, torch.device("cpu")).uniform_array((2,))) == 2

    def test_a_distribution_without_rows(self) -> None:
        alone = torch.distributions.Categorical(logits=torch.zeros(3))

        def drawn(distribution: Any) -> Any:
            return WordStream(2, None, torch.device("cpu")).uniform_array(distribution.batch_shape)

        assert "Expand its parameters to the batch" in said_by(lambda: drawn(alone))
        assert len(drawn(torch.distributions.Categorical(logits=torch.zeros(3).expand(2, 3)))) == 2


class TestActions:
    """Values that a space can't hold."""

    def test_numbers_that_a_box_cant_hold(self) -> None:
        make = partial(EchoEnv, action_space=gym.spaces.Box(0, 255, (1,), np.uint8))

        def policy(act: Callable[[Tensor], Tensor]) -> Any:
            return TensorDictModule(act, ["observation"], ["action"])

        message = refusal(make, policy(lambda x: x[..., :1] * 0 + 300.5))
        assert "Clip or round it in the policy" in message
        clipped = gather(make, policy(lambda x: (x[..., :1] * 0 + 300.5).clamp(0, 255).round()))
        assert (clipped["action"] == 255).all()

    def test_numbers_that_are_no_bits(self) -> None:
        make = partial(EchoEnv, action_space=gym.spaces.MultiBinary(2))
        halves = TensorDictModule(lambda x: x[..., :2] * 0 + 0.5, ["observation"], ["action"])
        message = refusal(make, halves)
        assert "takes 0 and 1. Draw them from torch.distributions.Bernoulli" in message
        net = TensorDictModule(lambda x: x[..., :2].float() * 0, ["observation"], ["logits"])
        gather(make, ProbabilisticActor(net, in_keys=["logits"], distribution_class=Bernoulli))


class TestInfo:
    """Numbers out of ``info``."""

    def test_keys(self) -> None:
        message = said_by(lambda: check_info_keys(["a", ("a", "b")]))
        assert "what holds other entries is no number: leave it out" in message
        assert check_info_keys([("a", "b")]) == (("a", "b"),)
        message = said_by(lambda: check_info_keys("is_success"))
        assert check_info_keys(eval(message.split("such as ")[1].split(", got")[0]))
        message = said_by(lambda: check_info_keys([3]))
        assert check_info_keys([eval(message.split("such as ")[1])])

    def test_a_value_that_is_no_number(self) -> None:
        with pytest.raises(ValueError, match="one number or bool, or leave it out there"):
            info_number({"a": "x"}, ("a",))
        assert np.isnan(info_number({}, ("a",)))


class TestResources:
    """What there may be too little of."""

    def test_rounds_that_do_not_fit(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr("torchrl_hts._processes.limits.available_memory", lambda: 1 << 20)
        message = said_by(lambda: check_storage(1 << 21, None))
        assert "hold the rounds in a file with storage_dir, or make them smaller" in message
        check_storage(1 << 21, str(tmp_path))
        check_storage(1 << 19, None)
        with HTSCollector([EchoEnv], marked(), storage_dir=tmp_path, **TAKEN) as collector:
            assert next(iter(collector)).shape == (1, 4)

    def test_what_makes_rounds_smaller(self) -> None:
        def size(**options: Any) -> int:
            given: Any = {"frames_per_batch": 64, "lag": 2} | options
            collector = start([EchoEnv], marked(), num_executors=1, num_actors=1, **given)
            with collector:
                return layout(collector).num_bytes

        most = size()
        assert most > size(frames_per_batch=32)
        assert most > size(lag=1)
        assert most > size(compact_obs=True)

    def test_file_descriptors(self) -> None:
        message = said_by(lambda: check_descriptors(10**7, 1))
        needed = int(message.split("(ulimit -n ")[1].split(")")[0])
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        try:
            message = said_by(lambda: check_descriptors(300, 2))
            needed = int(message.split("(ulimit -n ")[1].split(")")[0])
            assert 256 < needed <= before[1]
            check_descriptors(2, 2)  # fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, before[1]))
            check_descriptors(300, 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed - 10, before[1]))
            assert "ulimit" in said_by(lambda: check_descriptors(300, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


class TestCollectors:
    """What is asked of a collector."""

    def test_starting_it(self) -> None:
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        buffer = ReplayBuffer(storage=LazyTensorStorage(8))
        options: dict[str, Any] = {"num_executors": 1, "num_actors": 1, "replay_buffer": buffer}
        with start([EchoEnv], marked(), **options) as collector:
            with pytest.raises(NotImplementedError, match="iterate over it, with a replay_buffer"):
                collector.start()
            next(iter(collector))
            assert len(buffer) == 4

    def test_weights_by_name(self) -> None:
        weights = TensorDict.from_module(marked()).data
        with start([EchoEnv], marked(), num_executors=1, num_actors=1) as collector:
            with pytest.raises(KeyError, match=r"weights_dict must be {'policy': weights}"):
                collector.update_policy_weights_(weights_dict={"critic": weights})
            with pytest.raises(ValueError, match="give either weights_dict or model_id"):
                collector.update_policy_weights_(
                    weights_dict={"policy": weights}, model_id="policy"
                )
            collector.update_policy_weights_(weights_dict={"policy": weights})

    def test_another_one_after_the_end(self) -> None:
        collector = start([EchoEnv], marked(), num_executors=1, num_actors=1)
        collector.shutdown()
        with pytest.raises(RuntimeError, match="make a new one to go on"):
            next(iter(collector))
        gather(EchoEnv)

    def test_a_torchrl_environment_whose_state_can_not_be_saved(self) -> None:
        def holding(found: Any) -> Any:
            env = GymWrapper(EchoEnv(), categorical_action_encoding=True)
            env.found = found
            return env

        def restored(make: Any) -> Any:
            with start([make], marked(), num_executors=1, num_actors=1) as collector:
                next(iter(collector))
                state = collector.state_dict()
            with start([make], marked(), num_executors=1, num_actors=1) as collector:
                collector.load_state_dict(state)

        with pytest.warns(UserWarning, match=r"env\.found .*an array of objects: use a list"):
            restored(lambda: holding(np.array([{1: 2}], object)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restored(lambda: holding([{1: 2}]))
