"""Whatever is given to constructors and `load_state_dict`: a clear error at once, or it works."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from environments import EchoEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import marked
from torch import nn
from torchrl.envs.utils import ExplorationType

import torchrl_hts.collector.startup
from torchrl_hts import DelayedGradient, HTSCollector, WorkerError
from torchrl_hts.testing import digest

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]


def times(count: int) -> settings:
    """So many examples, the same each time."""
    unhealthy = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=unhealthy
    )


def refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> str | None:
    """What a TypeError or ValueError says; None if there is none."""
    try:
        function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


class Contrary:
    """Refuses to be compared, counted or asked whether it is true."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ArithmeticError("neither true nor false")

    def __repr__(self) -> str:
        return "Contrary()"


def odd_values() -> st.SearchStrategy[Any]:
    """Of every kind."""
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.integers(-3, 9),
        st.floats(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from([2**2000, -(2**2000), 1j, "raise", "restart", "cpu", "meta", "cuda:77"]),
    )
    objects = st.sampled_from(
        (
            *(np.int64(3), np.float32(2), np.zeros(2), torch.zeros(2), torch.tensor(1)),
            *(object(), EchoEnv, Contrary, int, EchoEnv(), marked(), ExplorationType.MEAN),
        )
    )
    keys = st.one_of(st.none(), st.integers(-1, 2), st.sampled_from(["executor", "actor", "x"]))
    return st.one_of(
        plain,
        objects,
        st.builds(Contrary),
        st.lists(plain, max_size=2),
        st.dictionaries(keys, plain, max_size=2),
    )


ARGUMENTS = [
    *("create_env_fn", "policy", "policy_factory", "frames_per_batch", "total_frames", "lag"),
    *("num_actors", "num_executors", "seed", "device", "storing_device", "policy_device"),
    *("env_device", "create_env_kwargs", "exploration_type", "max_frames_per_traj", "postproc"),
    *("split_trajs", "set_truncated", "compact_obs", "return_same_td", "track_policy_version"),
    *("actor_threads", "on_executor_failure", "max_restarts", "restart_window_s", "timeout_s"),
    *("info_keys", "storage_dir", "timeline_events", "pre_collect_hook", "post_collect_hook"),
    *("replay_buffer", "trajs_per_batch", "num_workers", "nonsense", "cat_results", "init_fn"),
    *("trust_policy", "worker_idx", "backend", "preemptive_threshold"),
]


class StartedError(Exception):
    """The arguments have passed: now processes would be started."""


@pytest.fixture
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **options: Any) -> None:
        raise StartedError

    monkeypatch.setattr(torchrl_hts.collector.startup, "Servers", start)


@pytest.mark.usefixtures("_starts_nothing")
@times(500)
@given(st.dictionaries(st.sampled_from(ARGUMENTS), odd_values(), min_size=1, max_size=3))
def test_the_constructor_names_the_argument(given_: dict[str, Any]) -> None:
    """Before anything is started; what passes is of the right kind."""
    options = {
        "create_env_fn": [EchoEnv] * 2, "policy": POLICY, "frames_per_batch": 8, **given_,
    }  # fmt: skip
    if "policy_factory" in given_ and "policy" not in given_:
        options["policy"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said = refusal(HTSCollector, **options)
        except StartedError:
            return
    assert said is not None, "it can't have started"
    assert any(name in said for name in given_), said


POLICY = marked()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"seed": 2**200},
        {"max_frames_per_traj": 2**63 - 1},
        {"total_frames": 2**62},
        {"timeout_s": 1e300, "restart_window_s": 5e-324},
        {"num_executors": 2**40, "lag": 100},
        {"create_env_kwargs": [{}, {}], "policy_device": "cpu"},
    ],
    ids=str,
)
def test_what_is_at_the_edge_works(kwargs: dict[str, Any]) -> None:
    options: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 8, **kwargs}
    with HTSCollector([EchoEnv] * 2, marked(), **options) as collector:
        assert next(iter(collector)).shape == (2, 4)


class Session:
    """A collector that is loaded with many states, and a sound one of them."""

    def __init__(self) -> None:
        with self.make() as collector:
            batches = iter(collector)
            next(batches)
            collector.update_policy_weights_(marked())
            self.state = copy.deepcopy(collector.state_dict())
            self.next = next(batches).clone()
        self.collector = self.make()

    @staticmethod
    def make(seed: int = 0) -> HTSCollector:
        return HTSCollector([EchoEnv] * 2, marked(), frames_per_batch=8, seed=seed, num_executors=1)

    def another(self) -> tuple[Any, list[str]]:
        """The state of another run, with other parameters, and the two batches after it."""
        with self.make(seed=5) as collector:
            for parameter in collector.policy.parameters():
                parameter.data.fill_(0.5)
            batches = iter(collector)
            next(batches)
            state = copy.deepcopy(collector.state_dict())
            return state, [digest(next(batches)) for _ in range(2)]

    def seen(self) -> tuple[Any, ...]:
        """What of the collector's state is to be seen without a batch."""
        collector, counted = self.collector, self.collector.statistics()
        policy = digest(collector.policy.state_dict().values())
        return policy, collector.seed, collector.policy_version, counted.frames, counted.rounds


@pytest.fixture
def session(nothing_left: None) -> Iterator[Session]:
    session = Session()
    yield session
    session.collector.shutdown()
    del session.collector  # and its memory


def places(state: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry, and of those within."""
    inner = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in inner:
        yield (*where, key)
        if isinstance(value, dict | list | tuple):
            yield from places(value, (*where, key))


def mutated(state: Any, where: tuple[Any, ...], change: Callable[[Any], Any] | None) -> Any:
    """A copy in which one entry is another, or missing."""
    state = copy.deepcopy(state)
    owners, inner = [], state
    for key in where[:-1]:
        owners.append((inner, key))
        inner = inner[key]
    if isinstance(inner, tuple):
        inner = list(inner)
        owner, key = owners[-1]
        owner[key] = inner
    if change is None:
        del inner[where[-1]]
    else:
        inner[where[-1]] = change(inner[where[-1]])
    return state


def changes() -> st.SearchStrategy[Callable[[Any], Any] | None]:
    """None for an entry that is missing."""

    def bend(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:-1] if value.ndim else value[None]
        return not value if isinstance(value, bool) else value + 1

    def flip(value: torch.Tensor) -> torch.Tensor:
        other = value.clone()
        other.view(torch.uint8).view(-1)[len(other.view(torch.uint8).view(-1)) // 2] ^= 255
        return other

    return st.one_of(
        st.none(),
        st.sampled_from([_or_same(bend), _or_same(flip)]),
        odd_values().map(lambda value: lambda _: value),
    )


def _or_same(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        try:
            return change(value)
        except (TypeError, AttributeError, RuntimeError, IndexError):
            return value

    return apply


def test_load_state_dict_names_the_entry(session: Session) -> None:
    """And a state that is refused changes nothing."""
    where_from = sorted(places(session.state), key=str)
    another, coming = session.another()

    @times(150)
    @given(st.sampled_from(where_from), changes())
    def check(where: tuple[Any, ...], change: Callable[[Any], Any] | None) -> None:
        collector, state = session.collector, mutated(session.state, where, change)
        collector.load_state_dict(another)
        batches = iter(collector)
        assert digest(next(batches)) == coming[0]
        before = session.seen()
        said = refusal(collector.load_state_dict, state)
        if said is not None:
            assert str(where[0]) in said
            assert session.seen() == before
            assert digest(next(batches)) == coming[1], "it goes on as if undisturbed"
            return
        if where[0] in ("environments", "collected"):  # damaged within, or for a batch that is out
            return
        assert next(iter(collector)).shape == (2, 4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    session.collector.load_state_dict(session.state)
    batch = next(iter(session.collector))
    assert (batch == session.next).all()


@pytest.mark.parametrize("state", [None, 3, [], "state", {}, {1: 2}])
def test_what_is_no_state_at_all(state: Any, session: Session) -> None:
    with pytest.raises((TypeError, ValueError), match="state"):
        session.collector.load_state_dict(state)
    with pytest.raises((TypeError, ValueError), match="state"):
        DelayedGradient(marked()).load_state_dict(state)


@pytest.mark.parametrize("stray", [None, 3, "state", torch.zeros(())])
def test_a_policy_with_more_than_the_own_one_has_is_refused(stray: Any, session: Session) -> None:
    """Before torch's own check, which copies what fits first."""
    session.state["policy_state_dict"]["stray"] = stray
    for parameter in session.collector.policy.parameters():
        parameter.data.fill_(3)
    before = session.seen()
    with pytest.raises(ValueError, match=r"'policy_state_dict'\] is of another policy.* stray$"):
        session.collector.load_state_dict(session.state)
    assert session.seen() == before


@pytest.mark.parametrize("damage", ["empty", "flipped"])
def test_a_damaged_environment_is_told_by_its_executor(damage: str, session: Session) -> None:
    state = session.state
    saved = state["environments"][1]
    state["environments"][1] = saved[:0] if damage == "empty" else saved.flip(0)
    session.collector.load_state_dict(state)
    with pytest.raises(WorkerError, match="environment 1 failed"):
        list(iter(session.collector))


@times(300)
@given(st.dictionaries(st.sampled_from(["lag", "gradient_at", "loss_module"]), odd_values()))
def test_delayed_gradient_names_the_argument(given_: dict[str, Any]) -> None:
    said = refusal(DelayedGradient, **{"loss_module": POLICY, **given_})
    assert said is None or any(name in said for name in given_)


@times(300)
@given(st.data())
def test_delayed_gradients_state_names_the_entry(data: st.DataObject) -> None:
    """A state that is refused changes nothing."""
    model = nn.Linear(2, 1)
    delayed = DelayedGradient(model, lag=2)
    for _ in range(2):
        with delayed, torch.no_grad():
            model.weight.mul_(0.5)
    genuine = delayed.state_dict()
    where = data.draw(st.sampled_from(sorted(genuine)))
    change = data.draw(changes())
    said = refusal(delayed.load_state_dict, mutated(genuine, (where,), change))
    if said is None:
        with delayed:
            return
    assert where in said or "the state is of lag" in said
    after = delayed.state_dict()
    assert after.keys() == genuine.keys()
    assert all(np.array_equal(after[key], genuine[key]) for key in genuine)
