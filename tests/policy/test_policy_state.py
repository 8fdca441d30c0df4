"""What a policy leaves for its next step is carried, as TorchRL's collectors do."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collectors import collect
from environments import Paying
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Unbounded
from torchrl.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    SerialEnv,
    TensorDictPrimer,
    TransformedEnv,
    gSDENoise,
)
from torchrl.envs.utils import ExplorationType
from torchrl.modules import OrnsteinUhlenbeckProcessModule
from torchrl.modules.models.exploration import gSDEModule

from torchrl_hts import Evaluator, HTSCollector
from torchrl_hts.errors import PolicyError
from torchrl_hts.testing import digest

pytestmark = pytest.mark.usefixtures("nothing_left")

GREEDY = ExplorationType.DETERMINISTIC


def wrapped(length: int = 5, *transforms: Callable[[], Any]) -> Any:
    """The same as a TorchRL environment."""
    env = GymWrapper(Paying(length))
    made = [make() for make in transforms]
    return TransformedEnv(env, Compose(*made)) if made else env


PATHS = {"gymnasium": Paying, "torchrl": wrapped}


class Counting(TensorDictModuleBase):
    """Acts with the number of its steps, which it reads back from where it left it."""

    def __init__(
        self, key: Any, dtype: torch.dtype = torch.int64, *, declares: bool = True
    ) -> None:
        super().__init__()
        self.key, self.dtype = key, dtype
        self.in_keys = ["observation"]
        self.out_keys = ["action", *([key] if declares else [])]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        count = td.get(self.key, None)
        if count is None:
            count = torch.zeros(*td.shape, 1, dtype=self.dtype)
        td.set(self.key, count + 1)
        return td.set("action", (count + 1).float())


class LastAction(TensorDictModuleBase):
    """Doubles its last action."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        last = td.get("action", None)
        return td.set(
            "action", td["observation"][..., :1] * 0 + (1 if last is None else 2 * last + 1)
        )


class Moving(TensorDictModuleBase):
    """Sums its observations up, and counts; declares nothing of what it leaves."""

    def __init__(self, sums: Any = "_sums") -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.sums = ["observation"], ["action"], sums

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        sums = td.get("_sums", torch.zeros(*td.shape, 2)) + td["observation"]
        steps = td.get(("deep", "_steps"), torch.zeros(*td.shape, 1)) + 1
        td.set(self.sums, sums)
        td.set(("deep", "_steps"), steps)
        return td.set("action", sums[..., :1] * 0.25 + steps)


def summing() -> TensorDictSequential:
    """Plain modules, the first of which reads what the last one wrote: a moving sum."""

    def add(observation: Tensor, memory: Tensor | None = None) -> Tensor:
        return observation if memory is None else observation + memory

    return TensorDictSequential(
        TensorDictModule(add, ["observation", "memory"], ["sum"]),
        TensorDictModule(lambda sum_: (sum_[..., :1] / 8, sum_), ["sum"], ["action", "memory"]),
    )


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "a number": lambda: Counting("count"),
    "a private number": lambda: Counting("_count"),
    "a nested, private flag": lambda: Counting(("a", "_b", "c"), torch.uint8),
    "a number that isn't declared": lambda: Counting(("a", "b"), torch.float64, declares=False),
    "its last action": LastAction,
    "entries at two places": Moving,
    "what a later module wrote": summing,
}


def stock(envs: list[Callable[[], Any]], policy: nn.Module) -> TensorDict:
    """Twelve steps of TorchRL's own collector."""
    frames = 12 * len(envs)
    collector = Collector(
        SerialEnv(len(envs), envs), policy, frames_per_batch=frames, total_frames=frames,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    try:
        return next(iter(collector))
    finally:
        collector.shutdown()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", STATEFUL)
def test_what_a_policy_reads_back_is_carried_as_torchrls_collector_does(
    name: str, path: str
) -> None:
    """Zero where an episode starts, in each environment by itself."""
    lengths = (3, 5, 99)
    expected = stock([partial(wrapped, length) for length in lengths], STATEFUL[name]())
    envs = [partial(PATHS[path], length) for length in lengths]
    found = collect(envs, STATEFUL[name]())
    for key, value in found.exclude("policy_version", "collector").items(True, True):
        assert torch.equal(value, expected[key]), key
    assert not [key for key in found.keys(True) if "_" in (key[0][0], key[-1][0])]
    other = collect(envs, STATEFUL[name](), num_executors=3, num_actors=2)
    assert digest(other) == digest(found)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_left_under_next_is_carried_without_a_spec(path: str) -> None:
    """Where TorchRL's collectors, which know no spec of it, would lose it."""
    envs = [partial(PATHS[path], length) for length in (3, 5)]
    found = collect(envs, Moving(("next", "_sums")))
    assert digest(found) == digest(collect(envs, Moving()))
    assert found["action"][0].flatten().tolist() == [1, 2.25, 3.75] * 4


def test_an_episode_that_is_cut_off_starts_anew_too() -> None:
    found = collect([partial(Paying, 99)], Counting("count"), max_frames_per_traj=3)
    assert found["count"].flatten().tolist() == [1, 2, 3] * 4
    assert "count" not in found["next"].keys()


SPEC = Bounded(-100.0, 100.0, (1,))


def correlated(**options: Any) -> TensorDictSequential:
    """Zeros with Ornstein-Uhlenbeck noise."""
    zeros = TensorDictModule(lambda x: torch.zeros_like(x[..., :1]), ["observation"], ["action"])
    return TensorDictSequential(
        zeros, OrnsteinUhlenbeckProcessModule(spec=SPEC, device=torch.device("cpu"), **options)
    )


OU_PATHS = {"gymnasium": Paying, "torchrl": partial(wrapped, 5, InitTracker)}


@pytest.mark.parametrize("path", OU_PATHS)
def test_noise_is_correlated_within_an_episode_and_not_over_its_end(path: str) -> None:
    theta, dt, sigma, length = 2.0, 0.1, 0.5, 25
    policy = correlated(theta=theta, dt=dt, sigma=sigma)
    make = partial(Paying, length) if path == "gymnasium" else partial(wrapped, length, InitTracker)
    found = collect([make] * 3, policy, rounds=50, frames_per_batch=12)
    noise = found["action"].squeeze(-1).reshape(3, -1, length)
    # The noise's own recursion, whose random part must be that of independent draws.
    before = torch.cat([torch.zeros(3, noise.shape[1], 1), noise[..., :-1]], -1)
    draws = (noise - before * (1 - theta * dt)) / (sigma * dt**0.5)
    assert 0.9 < draws.std() < 1.1
    flat = draws.reshape(-1)
    for shift in (1, 2, length):
        assert abs((flat[shift:] * flat[:-shift]).mean()) < 0.15
    centred = noise - noise.mean()
    assert (centred[..., 1:] * centred[..., :-1]).mean() / centred.var() > 0.7


@pytest.mark.parametrize("path", OU_PATHS)
def test_noise_has_the_same_bits_for_any_number_of_workers(path: str) -> None:
    envs = [OU_PATHS[path]] * 4
    one = collect(envs, correlated(), num_executors=1)
    assert digest(one) == digest(collect(envs, correlated(), num_executors=3, num_actors=2))
    assert digest(one) != digest(collect(envs, correlated(), seed=1))
    keys = {str(key) for key in one.keys(True, True)}
    assert "is_init" in keys
    assert not {key for key in keys if "_ou" in key}


def test_without_exploration_nothing_is_carried() -> None:
    found = collect([Paying], correlated(), exploration_type=GREEDY)
    assert not found["action"].any()


def state_dependent(state_dim: int = 2) -> TensorDictSequential:
    """gSDE as TorchRL ships it: the noise is drawn once in an episode."""
    module = gSDEModule(1, state_dim)
    return TensorDictSequential(
        TensorDictModule(
            lambda x: (torch.zeros_like(x[..., :1]), x / 10), ["observation"], ["mu", "state"]
        ),
        TensorDictModule(
            module,
            ["mu", "state", "_eps_gSDE"],
            ["loc", "scale", "action", "_eps_gSDE"],
        ),
    )


def noise_of_two_by_one() -> gSDENoise:
    return gSDENoise(state_dim=2, action_dim=1, shape=())


def test_gsde_draws_its_noise_once_in_an_episode() -> None:
    make = partial(wrapped, 5, InitTracker, noise_of_two_by_one)
    policy = state_dependent()
    found = collect([make] * 2, policy, rounds=5)
    assert digest(found) == digest(collect([make] * 2, policy, rounds=5, num_executors=2))
    assert "_eps_gSDE" not in found.keys()
    action, state = found["action"].squeeze(-1), found["state"]
    for env in range(2):
        for start in range(0, 20, 5):  # five actions, two unknowns: the noise of the episode
            rows = slice(start, start + 5)
            solved = torch.linalg.lstsq(state[env, rows], action[env, rows, None])
            assert solved.solution.abs().min() > 1e-3
            torch.testing.assert_close(
                state[env, rows] @ solved.solution, action[env, rows, None], atol=1e-5, rtol=1e-4
            )
    starts = action[:, ::5]
    assert len({round(value, 6) for value in starts.flatten().tolist()}) == starts.numel()


def test_gsde_whose_noise_has_no_shape_is_refused_and_the_advice_works() -> None:
    without = partial(wrapped, 5, InitTracker, partial(gSDENoise, shape=()))
    with pytest.raises((ValueError, PolicyError), match="_eps_gSDE"):
        collect([without], state_dependent())
    with pytest.raises(ValueError, match=r"'_eps_gSDE'.*gSDENoise with state_dim and action_dim"):
        collect([Paying], state_dependent())
    collect([partial(wrapped, 5, noise_of_two_by_one)], state_dependent())


class Recalling(TensorDictModuleBase):
    """Reads back something odd."""

    def __init__(self, leave: Callable[[Any, TensorDictBase], Any]) -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.leave = ["observation"], ["action"], leave

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        last = td.get("memory", None)
        size = 0.0 if last is None else last.float().mean(-1, keepdim=True) + last.shape[-1]
        td.set("memory", self.leave(last, td))
        return td.set("action", td["observation"][..., :1] + size)


class Failing(Counting):
    """Doesn't know what it has left itself."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if self.key in td.keys():
            raise LookupError("who left this here?")
        return super().forward(td)


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "it starts from one": (
        lambda: Recalling(lambda last, td: td["observation"] * 0 + (7 if last is None else 1)),
        "reads back 'memory'.*something else with zeros.*TensorDictPrimer",
    ),
    "it grows": (
        lambda: Recalling(
            lambda last, td: torch.cat([td["observation"], *([] if last is None else [last])], -1)
        ),
        r"reads back 'memory'.*\(\d+, 2\) after one step and .*\(\d+, 4\) after two",
    ),
    "it changes its type": (
        lambda: Recalling(
            lambda last, td: td["observation"].to(torch.float32 if last is None else torch.float64)
        ),
        "reads back 'memory'.*float32.*after one step and float64",
    ),
    "it fails on it": (lambda: Failing("count"), "fails on what it has left.*'count'.*who left"),
    "it needs it at once": (
        lambda: TensorDictModule(
            lambda x, h: (x[..., :1] + h, h + 1), ["observation", "h"], ["action", ("next", "h")]
        ),
        r"reads 'h', which it writes for its next step itself.*make_tensordict_primer\(\)",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ODD)
def test_what_cant_be_carried_is_refused_by_name(name: str, path: str) -> None:
    make_policy, said = ODD[name]
    with pytest.raises((ValueError, PolicyError), match=said):
        collect([PATHS[path]] * 2, make_policy())


def test_the_advice_to_give_a_primer_works() -> None:
    """Its first value is the primer's, at the start of each episode."""

    def make(fill: float) -> Any:
        spec = Unbounded((2,))
        return wrapped(5, lambda: TensorDictPrimer({"memory": spec}, default_value=fill))

    policy = Recalling(lambda last, td: td["observation"] * 0 + (7 if last is None else last + 1))
    found = collect([partial(make, 4.0)] * 2, policy)
    assert found["memory"][0, :, 0].tolist() == [5, 6, 7, 8, 9] * 2 + [5, 6]
    policy = TensorDictModule(
        lambda x, h: (x[..., :1] + h[..., :1], h + 1), ["observation", "memory"],
        ["action", ("next", "memory")],
    )  # fmt: skip
    found = collect([partial(make, 2.0)] * 2, policy)
    assert found["memory"][0, :, 0].tolist() == [2, 3, 4, 5, 6] * 2 + [2, 3]


class Primed(TensorDictModule):
    """Brings the primer of what it reads back."""

    def __init__(self, default: Any) -> None:
        super().__init__(
            lambda x, h: (x[..., :1] + h, h + 1), ["observation", "h"], ["action", "h"]
        )
        self.default = default

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({"h": Unbounded((1,))}, default_value=self.default)


def test_a_modules_own_primer_is_obeyed_in_gymnasium_environments() -> None:
    found = collect([Paying] * 2, Primed(3.0))
    assert found["h"][0].flatten().tolist() == [4, 5, 6, 7, 8] * 2 + [4, 5]
    with pytest.raises(ValueError, match=r"primer draws or computes the first value of .*'h'"):
        collect([Paying], Primed(lambda: torch.ones(1)))

    def primer() -> TensorDictPrimer:  # the advice
        return TensorDictPrimer({"h": Unbounded((1,))}, default_value=lambda: torch.full((1,), 4.0))

    found = collect([partial(wrapped, 5, primer)] * 2, Primed(lambda: torch.ones(1)))
    assert found["h"][0].flatten().tolist() == [5, 6, 7, 8, 9] * 2 + [5, 6]


def test_a_resumed_run_goes_on_in_the_middle_of_an_episode() -> None:
    """With what the policy has left, private entries too."""

    def make(policy: nn.Module, frames: int = 72) -> HTSCollector:
        return HTSCollector([partial(Paying, 7)] * 3, policy, frames_per_batch=12,
                            total_frames=frames, seed=3)  # fmt: skip

    for make_policy in (correlated, lambda: Counting("_count"), Moving):
        with make(make_policy()) as collector:
            batches = []
            for batch in collector:
                batches.append(digest(batch))
                if len(batches) == 3:
                    file = io.BytesIO()
                    torch.save(collector.state_dict(), file)
        file.seek(0)
        with make(make_policy()) as collector:
            collector.load_state_dict(torch.load(file, weights_only=True))
            assert [digest(batch) for batch in collector] == batches[3:]


def test_an_evaluation_plays_with_it_too() -> None:
    def returns(make_policy: Callable[[], nn.Module], **options: Any) -> Any:
        with Evaluator(partial(Paying, 4), make_policy(), num_episodes=3, **options) as evaluator:
            for step in range(2):  # the second begins anew
                evaluator.submit(step)
            return [evaluation.returns for evaluation in evaluator.wait()]

    for make_policy in (partial(Counting, "count"), partial(Counting, ("a", "_b"), declares=False)):
        assert returns(make_policy) == [(10.0,) * 3] * 2
    (first, second) = returns(correlated, exploration_type=ExplorationType.RANDOM)
    assert len({*first, *second}) == 6
    assert returns(correlated) == [(0.0,) * 3] * 2
