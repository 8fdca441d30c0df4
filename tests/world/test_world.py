"""World: ranks that add, agree and fail, as processes on this machine."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from functools import partial
from typing import Any

import pytest
import torch
import torchrl
from probe import exchange_sum, halve_from, summed
from ranks import results, run_ranks
from tensordict import TensorDict
from torch import nn

from torchrl_hts._world.launch import place
from torchrl_hts._world.tree import tree_sum
from torchrl_hts._world.world import World
from torchrl_hts.errors import WorldError

LENGTHS = [1, 2, 3, 5, 33, 1001, 4099]
PATIENCE_S = 6.0


def vector(part: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * length + part)
    # Of many magnitudes, so that another order of adding shows.
    return torch.randn(length, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (length,), generator=generator
    )


def sums(parts: int) -> list[list[bytes]]:
    """Sums over all parts, by both ways to walk the tree."""
    found = []
    with World(shards=parts, timeout_s=60) as world:
        for halving_from in (1, 10**9):
            halve_from(halving_from)
            found.append([])
            for length in LENGTHS:
                own = world.own([vector(part, length) for part in range(parts)])
                found[-1].append(summed(world, own, "vectors").numpy().tobytes())
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_have_the_bits_of_the_tree_for_every_number_of_ranks(size: int) -> None:
    expected = [
        tree_sum([vector(part, length) for part in range(4)]).numpy().tobytes()
        for length in LENGTHS
    ]
    for found in results(run_ranks(sums, size, 4)):
        assert found == [expected, expected]


def test_another_order_of_adding_has_other_bits() -> None:
    parts = [vector(part, 4099) for part in range(4)]
    assert not torch.equal(tree_sum(parts), parts[0] + parts[1] + parts[2] + parts[3])


def ask() -> dict[str, Any]:
    with World(timeout_s=60) as world:
        world.agree(learning_rate=0.1)
        return {
            "gathered": world.gather({"rank": world.rank}),
            "any": [world.any(world.rank == rank) for rank in range(world.size + 1)],
            "own": [*world.own(range(8))],
            "local": world.local_size,
            "first": world.is_first,
        }


def test_ranks_are_asked_and_told_the_same() -> None:
    for rank, found in enumerate(results(run_ranks(ask, 2))):
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert found["any"] == [True, True, False]
        assert found["own"] == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
        assert found["first"] == (rank == 0)
        assert found["local"] == 2


OF_SLURM = {
    "SLURM_PROCID": "{}",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_JOB_ID": str(os.getpid()),
}


def test_steps_of_a_slurm_job_that_run_at_once_have_ports_of_their_own() -> None:
    steps = [place(OF_SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_ID": str(s)}) for s in range(8)]
    assert len({step.port for step in steps if step is not None}) == 8


def test_ranks_find_each_other_by_the_variables_of_slurm() -> None:
    for found in results(run_ranks(ask, 2, variables=OF_SLURM)):
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert found["local"] == 2


def batch_of(rows: torch.Tensor) -> TensorDict:
    return TensorDict({"x": rows}, [len(rows)])


def differ(what: str) -> None:
    odd = os.environ["RANK"] == "2"
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0 if odd and what == "parameters" else 1.0)
    if odd and what == "torchrl":
        torchrl.__version__ = "0.0"
    with World(shards=8 if odd and what == "shards" else 4, timeout_s=30) as world:
        world.agree(seed=1 if odd and what == "seed" else 0)
        for part in world.gradients(model, batch_of(torch.ones(4, 2))):
            model(part["x"]).sum().backward()


@pytest.mark.parametrize("what", ["shards", "torchrl", "seed", "parameters"])
def test_a_rank_of_another_run_is_named_on_all_ranks(what: str) -> None:
    for outcome in run_ranks(differ, 4, what):
        assert outcome.error.startswith(f"WorldError: rank 2 has {what} ")


def fail(how: str) -> None:
    world = World(timeout_s=PATIENCE_S)
    if world.rank == 2:
        if how == "dies":
            os._exit(3)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "does another thing":
            world.any(False)
        if how == "has another length":
            exchange_sum(world, torch.ones(9), "ones")
    exchange_sum(world, torch.ones(8), "ones")


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_rank_that_does_not_come_is_named_on_all_others(how: str) -> None:
    outcomes = run_ranks(fail, 4, how, silent=2)
    for rank in (0, 1, 3):
        assert outcomes[rank].error.startswith("WorldError: rank 2 did not come to 'ones of 8 val")
        assert outcomes[rank].took_s < PATIENCE_S + 10


@pytest.mark.parametrize("how", ["does another thing", "has another length"])
def test_ranks_at_different_exchanges_are_told_so(how: str) -> None:
    for outcome in run_ranks(fail, 4, how):
        assert "every rank must do the same in the same order" in outcome.error
        assert (
            "rank 2 is at" in outcome.error
            or "and this one at 'ones of 9" in outcome.error
            or ("and this one at 'any'" in outcome.error)
        )


def misunderstand() -> None:
    with World(timeout_s=60) as world:
        if world.rank == 1:
            world.gather({"a": "value"})  # under `if is_first`, say
        else:
            world.any(False)


def test_what_is_gathered_is_not_taken_for_something_else() -> None:
    for rank, outcome in enumerate(run_ranks(misunderstand, 3)):
        other, its, own = (0, "any", "gather") if rank == 1 else (1, "gather", "any")
        assert outcome.error == (
            f"WorldError: rank {other} is at {its!r}, and this one at {own!r}: every rank must do "
            "the same in the same order"
        )


def leave_early() -> str:
    world = World(timeout_s=30)
    model = nn.Linear(2, 1)
    if world.rank == 1:
        for _ in world.gradients(model, batch_of(torch.ones(4, 2))):
            break
        with pytest.raises(WorldError, match="left before its end"):
            world.any(False)
        return "left"
    try:
        for part in world.gradients(model, batch_of(torch.ones(4, 2))):
            model(part["x"]).sum().backward()
    except WorldError as error:
        return str(error)
    return "went on"


def test_a_loop_over_gradients_that_is_left_early_ends_the_run() -> None:
    torch.manual_seed(0)
    found = results(run_ranks(leave_early, 2))
    assert found[1] == "left"
    assert found[0].startswith("rank 1 has parameters") or "rank 1 did not come" in found[0]
    for words in ("pytorch/", "GLHF", "Check the logs"):
        assert words not in found[0], "those of the network's library"


def write(directory: str, full: int | None) -> str:
    with World(timeout_s=30) as world:

        def part() -> None:
            if world.rank == full:
                raise OSError("the disk is full")
            open(f"{directory}/part-{world.rank}", "w").close()

        try:
            world.save(part, lambda: open(f"{directory}/marker", "w").close())
        except WorldError as error:
            return str(error)
        return "saved"


@pytest.mark.parametrize("full", [None, 0, 1])
def test_a_checkpoint_is_complete_or_has_no_marker(full: int | None, tmp_path: Any) -> None:
    found = results(run_ranks(write, 2, str(tmp_path), full))
    assert (tmp_path / "marker").exists() == (full is None)
    if full is None:
        assert found == ["saved", "saved"]
        assert {path.name for path in tmp_path.iterdir()} == {"marker", "part-0", "part-1"}
    else:
        assert all(text.startswith(f"rank {full} could not write") for text in found)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.used * x).square().sum(-1).mean()


def gradient(shards: int | None, earlier: bool) -> tuple[bytes, bool]:
    model = Square()
    if earlier:
        model.used.grad = torch.full((3,), 0.5)
    with World(shards=shards, timeout_s=30) as world:
        own = world.own([vector(row, 3).clamp(-2, 2) for row in range(8)])
        for part in world.gradients(model, batch_of(torch.stack([*own]))):
            model(part["x"]).backward()
    assert model.used.grad is not None
    return model.used.grad.numpy().tobytes(), model.unused.grad is None


@pytest.mark.parametrize("earlier", [False, True])
def test_the_gradient_is_the_mean_over_all_ranks(earlier: bool) -> None:
    model, rows = Square(), torch.stack([vector(row, 3).clamp(-2, 2) for row in range(8)])
    model(rows).backward()
    assert model.used.grad is not None
    expected = model.used.grad + (0.5 if earlier else 0.0)
    with_shards = [results(run_ranks(gradient, size, 4, earlier)) for size in (1, 2)]
    assert len({found for ranks in with_shards for found in ranks}) == 1
    without = results(run_ranks(gradient, 2, None, earlier))
    for bits, unused in [with_shards[0][0], *without]:
        assert unused  # has no gradient, rather than one of zeros
        torch.testing.assert_close(torch.frombuffer(bytearray(bits), dtype=torch.float32), expected)


def mean_of(shards: int | None) -> tuple[float, float]:
    with World(shards=shards, timeout_s=30) as world:
        own = torch.tensor(float(world.rank))
        return world.mean([own]).item(), own.item()


@pytest.mark.parametrize("shards", [None, 2])
def test_what_a_mean_is_taken_of_stays_as_it_is(shards: int | None) -> None:
    assert results(run_ranks(mean_of, 2, shards)) == [(0.5, 0.0), (0.5, 1.0)]


def modules_that_come_and_go() -> int:
    """Each loop trains another module; rank 0 alone keeps them."""
    kept = []
    with World(timeout_s=20) as world:
        for _ in range(20):
            model = Square()
            if world.is_first:
                kept.append(model)
            for part in world.gradients(model, batch_of(torch.ones(2, 3))):
                model(part["x"]).backward()
            del model
    return len(kept)


def test_a_module_is_compared_when_it_is_first_seen_whatever_became_of_others() -> None:
    assert results(run_ranks(modules_that_come_and_go, 2)) == [20, 0]


def test_a_world_of_one_without_shards_leaves_all_as_it_is() -> None:
    model, batch = nn.Linear(2, 1), batch_of(torch.ones(3, 2))
    grad = torch.zeros(1, 2)
    model.weight.grad = grad
    threads = torch.get_num_threads()
    with World() as world:
        parts = [*world.gradients(model, batch)]
        assert world.parts(batch)[0] is batch
        assert len(parts) == 1
        assert parts[0] is batch
        assert model.weight.grad is grad
        assert torch.get_num_threads() == threads


def test_a_copy_is_refused() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with World() as world, pytest.raises(TypeError, match="every process of a run makes its"):
            copied(world)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 3}, "a power of two, got 3"),
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"shards": True}, "shards must be an int, got True"),
        ({"shards": "4"}, "shards must be an int, got '4'"),
        ({"timeout_s": 0}, "timeout_s must be more than 0 seconds"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        World(**arguments)


def refused() -> None:
    World(shards=1, timeout_s=30)


def test_more_learners_than_shards_are_refused() -> None:
    for outcome in run_ranks(refused, 2):
        assert "2 learners don't divide 1 shards" in outcome.error


def test_environments_that_cannot_be_shared_out_are_refused() -> None:
    threads = torch.get_num_threads()
    with World(shards=4) as world, pytest.raises(ValueError, match="6 environments can't be"):
        world.own(range(6))
    torch.set_num_threads(threads)


def wrapped() -> tuple[bytes, str]:
    """DistributedDataParallel by itself, and in a loop over gradients."""
    model = Square()
    with World(timeout_s=30) as world:
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        rows = torch.stack([*world.own([vector(row, 3).clamp(-2, 2) for row in range(8)])])
        ddp(rows).backward()
        with pytest.raises(ValueError, match="adds up gradients by itself") as raised:
            next(world.gradients(ddp, batch_of(rows)))
        with pytest.raises(ValueError, match="part 'critic' is wrapped in DistributedDataPara"):
            next(world.gradients(nn.ModuleDict({"critic": ddp}), batch_of(rows)))
    assert model.used.grad is not None
    return model.used.grad.numpy().tobytes(), str(raised.value)


def test_a_wrapped_module_averages_by_itself_and_is_refused_where_the_world_does() -> None:
    (first, message), (second, _) = results(run_ranks(wrapped, 2))
    (expected, _) = results(run_ranks(gradient, 2, None, False))[0]
    assert first == second == expected
    assert "its .module" in message


@pytest.mark.parametrize("shards", [None, 2])
def test_parts_of_what_is_no_batch(shards: int | None) -> None:
    with World(shards=shards) as world, pytest.raises(TypeError, match="None when all frames"):
        world.parts(None)  # type: ignore[arg-type]


def test_minibatches_of_whole_rows_keep_steps_in_their_order() -> None:
    steps = torch.arange(8 * 3).reshape(8, 3)
    rows = TensorDict({"step": steps, "policy_version": torch.full((8, 3), 2)}, [8, 3])
    threads = torch.get_num_threads()
    with World(shards=2) as world:
        parts = world.parts(rows)
        cut = partial(world.minibatches, parts, 2, seed=0, whole_rows=True)
        orders = [[*cut(epoch=epoch)] for epoch in (0, 0, 1)]
        with pytest.raises(ValueError, match="4 rows of a part can't be cut into 3 minibatches"):
            next(world.minibatches(parts, 3, seed=0, epoch=0, whole_rows=True))
    torch.set_num_threads(threads)
    for minibatches in orders:
        for index, part in enumerate(parts):
            found = [minibatch[index]["step"] for minibatch in minibatches]
            assert [each.shape for each in found] == [(2, 3), (2, 3)]
            assert sorted(torch.cat(found).tolist()) == part["step"].tolist()
    first, again, other = [[m["step"].tolist() for m in order[0]] for order in orders]
    assert first == again != other
