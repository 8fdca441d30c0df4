"""make_remote: environments in Ray actors, with the bits of local ones; where ray is installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import played_elsewhere
import pytest
import torch
from environments import wrapped_in_disguise
from gymnasium.envs import registration
from played_elsewhere import check_going_on, gather, gather_twice
from probe import closes_within, take_for_hung_after
from processes import wait_until_gone
from remote_environments import BadEnv, DrawingEnv, HeldEnv, RaisingEnv, ResetTogether, WhereEnv
from seeding import Seeding

from torchrl_hts import HTSCollector, WorkerError
from torchrl_hts._processes.surroundings import WORKER_ENVIRONMENT
from torchrl_hts.env_state import CannotSaveError, restore_environment, save_environment
from torchrl_hts.envs import make_remote

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'torchrl_hts[ray]'")

start = partial(played_elsewhere.start, num_inputs=6)

# Ray's own threads and files are not what these tests are about.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster on this machine, or the one that ``RAY_ADDRESS`` names."""
    here = Path(__file__).parents[1] / "support"  # ray's workers import what these tests do
    options = {"num_cpus": 2, "object_store_memory": 200_000_000, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parents[1])]))
        ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else options))
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def remote(address: str) -> Any:
    """`make_remote` in that cluster."""
    return partial(make_remote, address=address)


def actors_in(folder: Path) -> set[int]:
    """Processes in which environments have been made."""
    return {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_executors", [1, 3])
def test_i7_remote_environments_give_the_bits_of_local_ones(
    remote: Any, lag: int, num_executors: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_inputs": 6, "lag": lag}
    make = partial(remote, partial(DrawingEnv, str(tmp_path)))
    mixed = [make, DrawingEnv, make]
    gathered = gather_twice(mixed, num_executors=num_executors, **options)
    assert (gathered == gather_twice([DrawingEnv] * 3, num_executors=1, **options)).all()
    pids = actors_in(tmp_path)
    assert len(pids) >= 2
    wait_until_gone(pids)


def test_episodes_that_are_cut_begin_anew_with_the_bits_of_local_ones(remote: Any) -> None:
    options: dict[str, Any] = {"num_inputs": 6, "max_frames_per_traj": 4, "num_executors": 1}
    make = partial(remote, DrawingEnv)
    gathered = gather_twice([make] * 2, **options)
    assert (gathered == gather_twice([DrawingEnv] * 2, **options)).all()


def test_they_begin_episodes_that_are_cut_side_by_side(remote: Any, tmp_path: Path) -> None:
    makes = [partial(remote, partial(ResetTogether, name, 2, str(tmp_path))) for name in "ab"]
    with start(makes, num_inputs=4, max_frames_per_traj=4, num_executors=1) as collector:
        batch = gather(collector)
    assert batch["next", "done"].sum() == 12


def test_a_run_of_remote_environments_goes_on_bit_for_bit(remote: Any) -> None:
    check_going_on(DrawingEnv, partial(remote, DrawingEnv), num_inputs=6)


def test_a_state_goes_on_in_another_actor_as_it_would_here(remote: Any) -> None:
    def after(env: gym.Env[Any, Any]) -> list[Any]:
        outcomes = [env.step(action) for action in (0, 1, 2)]
        return [(observation.tobytes(), rest) for observation, *rest in outcomes]

    env, other = remote(DrawingEnv), gym.Wrapper(remote(DrawingEnv))
    env.reset(seed=3)
    env.step(1)
    state = save_environment(gym.Wrapper(env), "with it")
    expected = after(env)
    assert restore_environment(other, state) == "with it"
    assert after(other) == expected
    env.close()
    other.close()


def test_an_environment_looks_like_its_own_and_runs_elsewhere(remote: Any) -> None:
    env, local = remote(DrawingEnv), DrawingEnv()
    assert env.observation_space == local.observation_space
    assert env.action_space == local.action_space
    assert env.metadata == local.metadata
    assert env.render_mode == "rgb_array"
    observation, _ = env.reset(seed=1)
    env.step(2)
    assert (env.render() == 1).all()
    observation += 1  # it is the caller's own
    env.close()
    env.close()
    for late in (env.reset, env.render, partial(env.step, 0)):
        with pytest.raises(gym.error.ClosedEnvironmentError, match=r"has been closed.*too late"):
            late()

    env = remote(WhereEnv)
    _, info = env.reset(seed=1, options={"level": 2})
    assert info["options"] == {"level": 2}
    assert info["pid"] != os.getpid()
    assert not info["torch"]
    env.close()
    wait_until_gone([info["pid"]])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "ValueError: the ball left the universe"),
        ("raises at its second reset", "ValueError: the ball won't come back"),
        ("is nan", r"observation.*NaN"),
        ("has another shape", "shape"),
        ("can't be sent", "what its step returned can't be pickled"),
        ("dies", "the Ray actor of a remote environment has ended"),
    ],
)
def test_what_goes_wrong_in_an_actor_is_told_where(
    remote: Any, fault: str, said: str, tmp_path: Path
) -> None:
    make = partial(remote, partial(BadEnv, fault, str(tmp_path)))
    with (
        start([partial(remote, DrawingEnv), make], num_executors=1) as collector,
        pytest.raises(WorkerError, match=f"(?s)environment 1 failed in round 0, step 2.*{said}"),
    ):
        gather(collector)
    wait_until_gone(actors_in(tmp_path))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("held", "remote_environments.HandleError: the door is closed"),
        ("of two arguments", "remote_environments.HandleError: the door is closed"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_what_cannot_be_raised_here_is_told_with_its_traceback(
    remote: Any, what: str, said: str
) -> None:
    env = remote(partial(RaisingEnv, what))
    env.reset(seed=0)
    told = f"a remote environment raised what can't be raised in this process: {said}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(told)}$") as caught:
        env.step(0)
    assert re.search(r"in process \d+ on(?s:.*)remote_environments.py", str(caught.value.__cause__))
    env.close()


def test_an_actor_that_dies_is_replaced(remote: Any, tmp_path: Path) -> None:
    """As the collector's options say; nothing of the first is left."""
    make = partial(remote, partial(BadEnv, "dies", str(tmp_path)))
    with start([DrawingEnv, make], num_executors=2, on_executor_failure="restart") as collector:
        batches = iter(collector)
        with pytest.warns(RuntimeWarning, match="the Ray actor of a remote environment has ended"):
            first = next(batches).clone()
        batch = torch.cat([first, next(batches).clone()], 1)
        assert batch["next", "truncated"].sum(1).flatten().tolist() == [0, 1]
    wait_until_gone(actors_in(tmp_path))


def test_with_its_executor_ends_an_actor(remote: Any, tmp_path: Path) -> None:
    """Also with one that has no time to say so."""
    make = partial(remote, partial(DrawingEnv, str(tmp_path)))
    with start([make], num_executors=1) as collector:
        gather(collector)
        os.kill(collector.worker_pids()["executor 0"], signal.SIGKILL)
        wait_until_gone(actors_in(tmp_path))


def test_what_cannot_be_saved_is_named(remote: Any) -> None:
    env = remote(HeldEnv)
    env.reset(seed=0)
    with pytest.raises(CannotSaveError, match=r"HeldEnv.*'engine'"):
        save_environment(env)
    env.close()


@pytest.mark.parametrize("factory", [wrapped_in_disguise, partial(gym.make_vec, "CartPole-v1")])
def test_only_one_gymnasium_environment_is_taken(remote: Any, factory: Any) -> None:
    with pytest.raises(TypeError, match=r"expected one gymnasium\.Env"):
        remote(factory)


def test_resets_without_a_seed_are_those_of_local_environments(remote: Any) -> None:
    found = []
    for factory, num_executors in ((Seeding, 1), (partial(remote, Seeding), 2)):
        with HTSCollector(
            [factory] * 2, None, frames_per_batch=24, seed=5, num_executors=num_executors
        ) as collector:
            found.append(gather(collector))
    assert (found[0] == found[1]).all()


def test_sets_and_threads_in_actors_are_those_of_executors(remote: Any) -> None:
    """Ray itself gives an actor as many threads as CPUs."""
    env = remote(WhereEnv, num_cpus=2)
    found = env.reset(seed=0)[1]["variables"].items()
    assert found >= {**WORKER_ENVIRONMENT, "PYTHONHASHSEED": "0"}.items()
    env.close()
    given = {"OMP_NUM_THREADS": "2"}
    env = remote(WhereEnv, runtime_env={"env_vars": given})
    assert env.reset(seed=0)[1]["variables"].items() >= given.items()
    env.close()


def test_wrappers_that_draw_outside_are_refused(remote: Any) -> None:
    env = gym.wrappers.StickyAction(remote(DrawingEnv), 0.25)
    env.reset(seed=0)
    env.step(0)
    with pytest.raises(AttributeError, match="put wrappers that draw from it into make_remote's"):
        env.step(0)
    env.close()


def test_an_environment_whose_actor_is_dead_is_closed(remote: Any, tmp_path: Path) -> None:
    env = remote(partial(DrawingEnv, str(tmp_path)))
    (pid,) = actors_in(tmp_path)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone({pid})
    with pytest.raises(RuntimeError, match="the Ray actor of a remote environment has ended"):
        env.reset(seed=0)
    env.close()


def test_a_place_that_does_not_come_is_told(remote: Any) -> None:
    with pytest.raises(TimeoutError, match=r"within 1 s.*'simulator': 1.*left of"):
        remote(DrawingEnv, resources={"simulator": 1}, start_timeout_s=1)


def test_an_address_where_nobody_listens_is_told(nobodys_address: str) -> None:
    """At once, in a process that has no cluster yet."""
    asked = f"make_remote(object, address={nobodys_address!r})"
    script = f"from torchrl_hts.envs import make_remote; {asked}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    said = rf"ConnectionError: there is no Ray cluster at address='{nobodys_address}' .*refused"
    assert re.search(said, done.stderr)


def test_an_environment_that_hangs_is_closed(
    remote: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, where there is no executor that would be ended."""
    closes_within(monkeypatch, 0.5)
    env = remote(partial(BadEnv, "hangs", str(tmp_path)))
    env.reset(seed=0)
    env.step(0)
    env.step(0)
    env.begin_step(0)
    with pytest.raises(TimeoutError, match=r"not closed within 0\.5 s, for it hangs"):
        env.close()
    wait_until_gone(actors_in(tmp_path))


def test_environments_that_the_main_process_has_registered_are_made_in_actors(
    remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain data, and a class of this script, which only comes by value; in executors too."""
    monkeypatch.setattr(registration, "registry", dict(registration.registry))

    class Here(DrawingEnv):
        pass

    gym.register("Plain-v0", entry_point="remote_environments:DrawingEnv")
    gym.register("Here-v0", entry_point=Here)
    env = remote(partial(gym.make, "Plain-v0", disable_env_checker=True))
    env.close()
    make = partial(gym.make, "Here-v0", disable_env_checker=True)
    with start([make] * 2) as collector:
        expected = gather(collector)
    with start([partial(remote, make)] * 2) as collector:
        assert (gather(collector) == expected).all()


def test_an_actor_that_hangs_is_told_and_ends(remote: Any, tmp_path: Path) -> None:
    make = partial(remote, partial(BadEnv, "hangs", str(tmp_path)))
    said = r"(?s)made no progress for 6 s.*environment 0.*step 2"
    with start([make], num_executors=1, timeout_s={"executor": 300}) as collector:
        take_for_hung_after(collector, 6)  # an actor may take longer to start
        with pytest.raises(WorkerError, match=said):
            gather(collector)
    wait_until_gone(actors_in(tmp_path))
