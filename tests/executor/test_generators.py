"""Each environment has Python's, numpy's and torch's global generators of its own (I6, I7)."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environments import EchoEnv
from policies import categorical
from probe import (
    ask_for_states,
    generators_lie_in_memory,
    nobody_draws,
    server_pids,
    set_patience,
)
from torchrl.envs import GymWrapper

from torchrl_hts import HTSCollector
from torchrl_hts._executor.generators import Generators
from torchrl_hts._processes import server_pool
from torchrl_hts._processes.server_pool import TORCH_FREE, keep_servers
from torchrl_hts.envs.drawing import DrawingEnv
from torchrl_hts.testing import digest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def others_draw_as_ever() -> Iterator[None]:
    """What draws in this process is no environment's."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    nobody_draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(params=["in memory", "asked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where states lie otherwise in memory than is expected."""
    if request.param == "asked":
        ask_for_states(monkeypatch)
    else:
        assert generators_lie_in_memory()


def draw() -> list[float]:
    """Draws of each kind; an odd number of normal ones, of which some are kept in pairs."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*numbers, float(torch.rand(()))]


# What may be done in a step; returns what was drawn.
STEPS: dict[str, Callable[[], Any]] = {
    "a bit of all": draw,
    "nothing": lambda: None,
    "a normal number": lambda: (np.random.randn(), random.gauss(0, 1)),
    "as many words as a state has": lambda: (
        np.random.rand(312).tolist(),
        [random.random() for _ in range(312)],
    ),
    "seeds": lambda: random.seed(3),
    "numpy's seeds": lambda: np.random.seed(3),
    "other seeds": lambda: random.seed(4),
    "numpy's other seeds": lambda: np.random.seed(4),
    "a state": lambda: random.setstate(random.getstate()),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("patience", [0, 1, 1000])
def test_who_else_draws_meanwhile_makes_no_difference(
    patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_patience(monkeypatch, patience)

    def play(number: int, steps: list[str], others: int) -> list[Any]:
        players = [Generators(7, n) for n in range(number, number + 1 + others)]
        found = []
        for index, step in enumerate(steps):
            for other in players[1:]:
                other.enter_step()
                draw()
            if index % 10 == 9:  # a reset
                players[0].enter()
            else:
                players[0].enter_step()
            found.append(STEPS[step]())
        return found

    choose = np.random.default_rng(0).choice
    for trial in range(20):
        steps = [str(choose([*STEPS])) for _ in range(40)]
        if trial % 2:  # it is first met late
            steps = ["nothing"] * 15 + steps
        elif trial == 0:
            steps = ["seeds", "other seeds", "a bit of all"]
        alone = play(trial, steps, 0)
        assert play(trial, steps, 2) == alone
        assert play(trial + 1, steps, 0) != alone


@pytest.mark.usefixtures("way")
def test_a_state_goes_on_elsewhere() -> None:
    first = Generators(1)
    first.enter()
    draw()
    state = first.state()
    expected = draw()
    second = Generators(2)
    second.enter()
    draw()
    second.restore(state)
    second.enter()
    assert draw() == expected
    fresh = Generators(3)
    state = fresh.state()
    assert state[2] is None, "torch's is not there before somebody draws from it"
    fresh.enter()
    expected = draw()
    second.restore(state)
    second.enter()
    assert draw() == expected


def test_what_vmas_keeps_is_each_ones_own() -> None:
    """Whoever draws meanwhile, and in another process after `state`."""
    environment = pytest.importorskip("vmas.simulator.environment.environment")

    def draw_in_vmas() -> list[float]:
        with environment.local_seed(environment.Environment.vmas_random_state):
            return draw()

    for enter in (Generators.enter, Generators.enter_step):
        drawn = []
        for others in (0, 2):
            one, *rest = [Generators(5, n) for n in range(others + 1)]
            for other in (*rest, one):
                other.enter()
            found = []
            for _ in range(4):
                found.append(draw_in_vmas())
                for other in rest:
                    enter(other)
                    draw_in_vmas()
                enter(one)
            drawn.append(found)
        assert drawn[0] == drawn[1]
        assert len({tuple(each) for each in drawn[0]}) == 4
    state = one.state()
    expected = draw_in_vmas()
    elsewhere = Generators(6)
    elsewhere.restore(pickle.loads(pickle.dumps(state)))
    elsewhere.enter()
    assert draw_in_vmas() == expected
    one.seed(5, 0)
    one.enter()
    assert draw_in_vmas() == drawn[0][0], "seeds begin it anew"


def test_a_state_of_an_older_version_goes_on() -> None:
    one, other = Generators(1), Generators(2)
    one.restore(other.state()[:5])  # type: ignore[arg-type]
    other.enter()
    expected = draw()
    one.enter()
    assert draw() == expected


@pytest.mark.parametrize("part", [0, 1])
def test_a_state_that_is_none_is_refused(part: int) -> None:
    """Above all an index beyond the words, from which numpy would read on."""
    state: list[Any] = list(Generators(0).state())
    words = np.frombuffer(state[part], np.uint32).copy()
    words[0 if part == 0 else -1] = 625
    for wrong in (words.tobytes(), state[part][:-4]):
        with pytest.raises(ValueError, match="random generators was changed"):
            Generators(0).restore((*state[:part], wrong, *state[part + 1 :]))  # type: ignore[arg-type]


def test_torch_is_seeded_when_it_is_imported() -> None:
    """Also after somebody has only asked whether it is there."""
    code = (
        "import sys, importlib.util\n"
        "from torchrl_hts._executor.generators import Generators\n"
        "one, other = Generators(1), Generators(2)\n"
        "other.enter(); one.enter(); importlib.util.find_spec('torch')\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(float(torch.rand(())))\n"
        "other.enter(); print(float(torch.rand(())))\n"
        "print(sum('torchrl_hts' in type(x).__module__ for x in sys.meta_path))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    expected = []
    for number in (1, 2):
        Generators(number).enter()
        expected.append(str(float(torch.rand(()))))
    assert done.stdout.split() == [*expected, "0"]


# Environments.


def collect(
    factories: list[Callable[[], Any]], num_executors: int | None, frames: int = 30, **options: Any
) -> list[Any]:
    """Two batches."""
    with started(factories, num_executors, frames, **options) as collector:
        return [batch.clone() for batch in collector]


def started(
    factories: list[Callable[[], Any]], num_executors: int | None, frames: int = 30, **options: Any
) -> HTSCollector:
    """A collector of two batches."""
    options = {"seed": 0, "total_frames": 2 * frames * len(factories), **options}
    return HTSCollector(
        factories,
        categorical(num_actions=2),
        frames_per_batch=frames * len(factories),
        num_executors=num_executors,
        **options,
    )


def digests(batches: list[Any]) -> list[str]:
    return [digest(batch) for batch in batches]


def torchrls(use_torch: str) -> Any:
    return GymWrapper(DrawingEnv(use_torch), categorical_action_encoding=True)


class Hashes(EchoEnv):
    """Observes the hash of a string."""

    def _observe(self, action: float) -> np.ndarray:
        return np.full(4, hash("ball") % 2**50, np.float64)


# The second draws nothing for so long that it is taken for one that never does.
LATE = [partial(DrawingEnv, quiet_steps=n) for n in (0, 1050, 1100, 10**9)]


@pytest.mark.usefixtures("nothing_left")
class TestCollector:
    @pytest.mark.parametrize(
        ("factories", "frames"),
        [
            ([DrawingEnv] * 4, 30),
            ([partial(DrawingEnv, "made")] * 4, 30),
            ([partial(DrawingEnv, "first step")] * 4, 30),
            ([partial(DrawingEnv, quiet_steps=50)] * 4, 60),
            (LATE, 700),
            ([partial(torchrls, "made")] * 4, 30),
        ],
        ids=["without torch", "torch", "torch in the first step", "50th step", "late", "torchrl"],
    )
    def test_i7_for_any_number_of_executors(self, factories: Any, frames: int) -> None:
        with keep_servers():
            first = collect(factories, 1, frames)
            assert digests(collect(factories, 4, frames)) == digests(first)
            assert digests(collect(factories, 2, frames, num_actors=2)) == digests(first)
            other = collect(factories, 2, frames, seed=1)
        assert not set(digests(other)) & set(digests(first))
        drawn = torch.cat([batch["observation"] for batch in first], 1)
        assert len({row.numpy().tobytes() for row in drawn}) == 4, "no two are alike"

    @pytest.mark.parametrize("factory", [DrawingEnv, Hashes])
    def test_i7_from_one_run_to_the_next(
        self, factory: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each run's executors come from a server of their own, as those of another script do."""
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        runs, servers = [], set()
        for module in ("json", "wave"):
            monkeypatch.setattr(server_pool, "TORCH_FREE", (*TORCH_FREE, module))
            with started([factory] * 2, 1) as collector:
                servers |= set(server_pids(collector))
                runs.append([digest(batch) for batch in collector])
        assert len(servers) == 3, "the actors' is one"
        assert runs[0] == runs[1]

    def test_executors_stay_free_of_torch(self) -> None:
        """In a process that has no server which others' environments have imported torch in."""
        code = (
            "from policies import categorical\n"
            "from torchrl_hts import HTSCollector\n"
            "from torchrl_hts.envs.drawing import DrawingEnv\n"
            "policy = categorical(num_actions=2)\n"
            "with HTSCollector([DrawingEnv] * 2, policy, frames_per_batch=8) as collector:\n"
            "    next(iter(collector))\n"
            "    pid = collector.worker_pids()['executor 0']\n"
            "    print('libtorch' in open(f'/proc/{pid}/maps').read())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT / "tests/support",
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"},
        )
        assert done.stdout == "False\n", done.stderr

    @pytest.mark.parametrize("use_torch", ["never", "first step"])
    def test_a_resumed_run_goes_on_in_the_middle_of_its_episodes(self, use_torch: str) -> None:
        factories = [partial(DrawingEnv, use_torch, quiet_steps=n) for n in (0, 25, 10**9)]

        def make(num_executors: int) -> HTSCollector:
            return HTSCollector(
                factories,
                categorical(num_actions=2),
                frames_per_batch=3 * 7,
                total_frames=3 * 7 * 8,
                num_executors=num_executors,
                seed=5,
            )

        with keep_servers():
            with make(1) as collector:
                expected = digests([batch.clone() for batch in collector])
            with make(2) as collector:
                batches = iter(collector)
                assert digests([next(batches).clone() for _ in range(3)]) == expected[:3]
                state = collector.state_dict()
                assert state["why_environments_are_lost"] == ""
            with make(3) as collector:
                collector.load_state_dict(state)
                assert digests([batch.clone() for batch in collector]) == expected[3:]

    def test_after_a_restart_too(self, tmp_path: Path) -> None:
        """A replaced executor's environment draws the same each time; as it is made, too."""
        runs = []
        for number in range(2):
            failing = partial(FailsOnce, str(tmp_path / f"failed {number}"))
            with pytest.warns(RuntimeWarning, match="the ball is lost"):
                runs.append(
                    collect(
                        [DrawingEnv, failing, DrawingEnv],
                        3,
                        on_executor_failure="restart",
                    )
                )
        assert digests(runs[0]) == digests(runs[1])
        drawn = torch.cat([batch["observation"] for batch in runs[0]], 1)
        assert (drawn[1, :, 3] == drawn[1, 0, 3]).all(), "made anew it is what it was"
        undisturbed = torch.cat([b["observation"] for b in collect([DrawingEnv] * 3, 1)], 1)
        assert torch.equal(drawn[::2], undisturbed[::2])
        assert torch.equal(drawn[1, :9], undisturbed[1, :9])
        assert not torch.equal(drawn[1, 10], undisturbed[1, 10])

    def test_the_probe_plays_the_same(self, tmp_path: Path) -> None:
        for number in range(2):
            collect([partial(Noted, str(tmp_path / str(number)))] * 2, None)
        first, second = (sorted((tmp_path / str(n)).read_text().split()) for n in range(2))
        assert first == second
        assert len(first) == 3


class FailsOnce(DrawingEnv):
    """Raises in its 9th step, if there is no such file yet."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def step(self, action: int) -> Any:
        if self.steps == 9 and not self.path.exists():
            self.path.touch()
            raise OSError("the ball is lost")
        return super().step(action)


class Noted(DrawingEnv):
    """Writes down what is drawn while it is made."""

    def __init__(self, path: str) -> None:
        super().__init__()
        with open(path, "a") as file:
            file.write(f"{self.made_with}\n")
