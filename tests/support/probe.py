"""The one place from which tests look inside: a function for each question that they ask.

What has a public answer (`worker_pids()`, `statistics()`, `state_dict()`) is asked there. A test
that reads a private name anywhere else is found by `tests/package/test_probe.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from subprocess import Popen
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest
    from torch import Tensor
    from torchrl.envs import EnvBase
    from torchrl.trainers import Trainer

    from torchrl_hts import Evaluator, HTSCollector, World
    from torchrl_hts._actor.batch_inference import BatchInference
    from torchrl_hts._policy.counter_policy import CounterPolicy
    from torchrl_hts._processes.fork_server import WorkerServer
    from torchrl_hts._processes.server_pool import ServerPool
    from torchrl_hts._rounds.exchange import Inbox
    from torchrl_hts._rounds.shared_memory import Layout
    from torchrl_hts._supervision.workers import Workers
    from torchrl_hts.envs.football import FootballEnv
    from torchrl_hts.envs.football_engines import EnvPoolEngine

# Imports stand in the functions, so that scripts which count their processes load nothing more.


# Collectors.


def take_for_hung_after(collector: HTSCollector, seconds: float) -> None:
    """Shorten the time-out of its executors, once their environments are made."""
    collector._workers.listener._watch.timeouts_s["executor"] = seconds


def workers(collector: HTSCollector) -> Workers:
    """The workers: which there are, how each has ended, and whether they were told to."""
    return collector._workers


def server_pids(collector: HTSCollector) -> list[int]:
    """The processes that have forked the workers."""
    return [server.pid for server in collector._workers.servers._current.values()]


def finished_steps(collector: HTSCollector) -> Sequence[int]:
    """How many steps each environment has finished; the numbers change while one looks."""
    return collector._supervisor.schedule.steps


def lent_rounds(collector: HTSCollector) -> int:
    """How many rounds the learner has been given."""
    return collector._supervisor.schedule.lent


def all_idle(collector: HTSCollector) -> bool:
    """Whether no worker is just stepping an environment or running the policy."""
    from torchrl_hts._rounds.shared_memory import Counter

    return not collector._memory.counters[:, Counter.AT].any()


def layout(collector: HTSCollector) -> Layout:
    """What the shared memory holds."""
    return collector._memory.layout


def cores_of_executors(collector: HTSCollector) -> int | None:
    """How many cores executors count on; None where they have other actors to think of."""
    return collector._workers.shared.plan.cores


def inference_of(collector: HTSCollector) -> BatchInference:
    """What the collector's actors have, but for the calibration."""
    from torchrl_hts._actor.batch_inference import BatchInference

    job = collector._workers._actor_job
    assert job is not None
    return BatchInference(
        collector._memory, job.policy, job.examples, job.outputs,
        exploration_type=job.exploration_type, device=job.device, last_round=None,
    )  # fmt: skip


# Evaluators and trainers.


def let_it_finish(evaluator: Evaluator) -> None:
    """Wait until all that was submitted has been played, and return none of it yet."""
    evaluator._advance(wait=True)


def hook_of(trainer: Trainer, name: str = "delayed_gradient") -> Any:
    """The hook that a trainer was given under a name."""
    return trainer._modules[name]


def logged(trainer: Trainer) -> dict[str, list[Any]]:
    """All that a trainer has logged, by name."""
    return dict(trainer._log_dict)


def has_hook(trainer: Trainer, name: str) -> bool:
    """Whether a trainer was given a hook under a name."""
    return name in trainer._modules


def forget_delayed_gradients(patch: pytest.MonkeyPatch) -> None:
    """For one test, as if no other `DelayedGradient` had been used in this process."""
    from torchrl_hts.delayed_gradient import undelayed

    patch.setattr(undelayed, "_in_use", type(undelayed._in_use)())


def batched_env_target() -> str:
    """The name by which configurations know TorchRL's batched environments."""
    from torchrl_hts.configs import make

    return make._BATCHED_ENV


# Policies.


def takes_steps(policy: CounterPolicy) -> bool:
    """Whether a policy is run in steps, around TensorDict."""
    return policy._steps is not None


@contextlib.contextmanager
def as_a_whole(policy: CounterPolicy) -> Iterator[None]:
    """Run a policy through TensorDict all the same."""
    steps, policy._steps = policy._steps, None
    try:
        yield
    finally:
        policy._steps = steps


def use_kernel(patch: pytest.MonkeyPatch, kernel: Any) -> None:
    """Let packed layers be computed by another kernel."""
    from torchrl_hts._policy import packed_layers

    patch.setattr(packed_layers, "_kernel", kernel)


# Environments, and what is tried out with them.


def limit_observing(
    patch: pytest.MonkeyPatch,
    *,
    resets_s: float | None = None,
    all_s: int | None = None,
    most_bytes: int | None = None,
) -> None:
    """Set how much is observed before a run.

    Args:
        patch: undoes it.
        resets_s: after how many seconds no further reset begins.
        all_s: after how many seconds an unfinished reset is cut off.
        most_bytes: of observations, but for the first.
    """
    from torchrl_hts._executor import trial_observations as observing

    limits = {"_RESETS_S": resets_s, "_LIMIT_S": all_s, "_BYTES": most_bytes}
    for name, value in limits.items():
        if value is not None:
            patch.setattr(observing, name, value)


def wrapped(env: EnvBase) -> Any:
    """What an environment of TorchRL's wraps."""
    return env._env


def closes_within(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give remote environments less time to close."""
    from torchrl_hts.envs import remote

    patch.setattr(remote, "_CLOSE_S", seconds)


def football_engine(env: FootballEnv) -> Any:
    """The engine that plays a game."""
    return env._engine


def shares_its_pool(env: FootballEnv) -> bool:
    """Whether EnvPool plays the game together with others."""
    from torchrl_hts.envs.football_pool import SharedGame

    return isinstance(env._engine._pool, SharedGame)


def pool_pid(env: FootballEnv) -> int:
    """The process in which EnvPool plays the game."""
    engine: EnvPoolEngine = env._engine
    return engine._pool._pid


def gfootball_config(stock: Any) -> Any:
    """What gfootball's own environment makes its next game of: it has no other way to set seeds."""
    return stock.unwrapped._config


# Random generators.


def nobody_draws() -> None:
    """Forget who has drawn in this process: what draws from now on is no environment's."""
    from torchrl_hts._executor.generators import _process

    _process.look()
    _process.last = _process.owner = _process.torch_owner = None


def generators_lie_in_memory() -> bool:
    """Whether the states of Python's and numpy's generators were found where they are expected."""
    from torchrl_hts._executor.generators import draws_are_seen

    return draws_are_seen()


def ask_for_states(patch: pytest.MonkeyPatch) -> None:
    """Let states be asked for by public functions, as where they lie elsewhere in memory."""
    from torchrl_hts._executor import generator_words, generators

    for name, get, set_ in (
        ("_python", generator_words.get_python, generator_words.set_python),
        ("_numpy", generator_words.get_numpy, generator_words.set_numpy),
    ):
        asked = generator_words.Asked(get, set_)
        patch.setattr(generators, name, asked)
        patch.setattr(generators, f"{name}_mark", asked.mark)


def set_patience(patch: pytest.MonkeyPatch, steps: int) -> None:
    """After how many steps without a draw an environment is taken for one that draws nothing."""
    from torchrl_hts._executor import generators

    patch.setattr(generators, "_PATIENCE", steps)


def has_drawn(space: Any) -> bool:
    """Whether a space of gymnasium has a generator, which it makes for its first sample."""
    return space._np_random is not None


# Processes.


def process_of(server: WorkerServer) -> Popen[bytes]:
    """The process of a worker server."""
    return server._process


def set_worker_limit(limit: int, wanted: tuple[int, int]) -> None:
    """Set a limit as a worker does that inherits it: soft and hard, as far as it may."""
    from torchrl_hts._processes.surroundings import _set_limit

    _set_limit(limit, wanted)


def servers_in_use(pool: ServerPool) -> list[WorkerServer]:
    """Those that somebody uses, or that are about to end."""
    return list(pool._users)


@contextlib.contextmanager
def shared_servers_locked() -> Iterator[None]:
    """Hold the lock of the servers that collectors share."""
    from torchrl_hts._processes import server_pool

    with server_pool._pool._lock:
        yield


class Looks:
    """Notes looks and sleeps of an inbox, and lets a test act at each of them.

    Attributes:
        count: of looks.
        at: what is called at the n-th look.
        before_sleep: what is called before each sleep.
    """

    def __init__(self, inbox: Inbox, patch: pytest.MonkeyPatch) -> None:
        from torchrl_hts._rounds import exchange

        self.count = 0
        self.at: dict[int, Any] = {}
        self.before_sleep: Any = lambda: None
        self._poll, self._read = inbox._poll, os.read
        inbox._poll = self  # type: ignore[assignment]
        patch.setattr(exchange.os, "read", self.read)

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        """In place of the inbox's own."""
        assert timeout_ms == 0
        self.count += 1
        self.at.get(self.count, lambda: None)()
        return self._poll.poll(0)

    def read(self, fd: int, size: int) -> bytes:
        """In place of `os.read`."""
        self.before_sleep()
        return self._read(fd, size)


# Several learners.


def summed(world: World, own: Sequence[Tensor], what: str) -> Tensor:
    """The sum of all parts, of which each learner has some; ``what`` is said of it in errors."""
    return world._sum(own, what)


def exchange_sum(world: World, own: Tensor, what: str) -> None:
    """Add a vector up over the learners."""
    world._group.tree_sum(own, what)


def halve_from(length: int) -> None:
    """Let vectors from this length on be added in halves, for the rest of this process."""
    from torchrl_hts._world import tree

    tree._HALVING_FROM = length
