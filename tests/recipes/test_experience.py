"""The newest steps, and what is drawn from them: by parts of a batch, and in a resumed run too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import script_paths  # noqa: F401  so that the scripts are found
import torch
from support.errors import RecipeError
from support.experience import Experience
from support.sac_options import SACOptions
from tensordict import TensorDict

from torchrl_hts import World


@pytest.fixture
def make_experience() -> Callable[..., Experience]:
    """Of parts that hold ten steps each, and of which four are drawn."""

    def make(shards: int = 2, seed: int = 0, **more: int) -> Experience:
        sizes = {"init_random_frames": 0, "num_envs": shards, "sync_interval": 1}
        sizes |= {"buffer_size": 10 * shards, "batch_size": 4 * shards, **more}
        world = World(shards=shards, threads=torch.get_num_threads())
        return Experience(world, ["at"], SACOptions(seed=seed, **sizes))

    return make


def batch(round_: int) -> TensorDict:
    """Three steps of two environments, whose numbers say where and when they were."""
    at = torch.arange(3) + 3 * round_ + torch.tensor([[0], [1000]])
    version = torch.full((2, 3), round_)
    return TensorDict({"at": at, "left_out": at, "policy_version": version}, [2, 3])


def drawn(experience: Experience, count: int = 30) -> list[list[int]]:
    """So many samples of each part, one after the other."""
    samples = [experience.sample() for _ in range(count)]
    return [[int(at) for sample in samples for at in sample[part]["at"]] for part in (0, 1)]


def test_samples_are_of_the_newest_steps_of_each_part(
    make_experience: Callable[..., Experience],
) -> None:
    experience = make_experience()
    for round_ in range(7):
        experience.extend(batch(round_))
    newest = set(range(21 - 10, 21))
    one, other = drawn(experience)
    assert set(one) == newest
    assert {at - 1000 for at in other} == newest
    assert [at + 1000 for at in one] != other, "each part is drawn from by itself"
    (part, _) = experience.sample()
    assert part.shape == (4,)
    assert set(part.keys()) == {"at", "policy_version"}
    assert part["policy_version"].unique().tolist() == [6]


def test_what_is_drawn_depends_on_seed_round_and_number_alone(
    make_experience: Callable[..., Experience],
) -> None:
    found = []
    for seed, rounds in ((0, 3), (0, 3), (1, 3), (0, 4)):
        experience = make_experience(seed=seed)
        for round_ in range(rounds):
            experience.extend(batch(0))
            experience.extend(batch(round_))
            torch.rand(1)  # of others
        found.append(drawn(experience, 5))
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0] != found[3]
    one, _ = found[0]
    assert len({tuple(one[at : at + 4]) for at in range(0, 20, 4)}) == 5, "no sample comes twice"


def test_a_buffer_that_no_memory_holds_is_refused(
    make_experience: Callable[..., Experience],
) -> None:
    most = {"total_frames": 10**12, "buffer_size": 10**12}
    with pytest.raises(
        RecipeError,
        match=r"the 1,000,000,000,000 steps of --buffer-size take 8,000\.0 GB here, and",
    ):
        make_experience(**most).extend(batch(0))
    make_experience(buffer_size=10**12, total_frames=20).extend(batch(0))  # it never gets so many


def test_a_state_has_what_was_filled_alone(make_experience: Callable[..., Experience]) -> None:
    experience = make_experience()
    experience.extend(batch(0))
    parts = experience.state_dict()["parts"]
    for part in parts:
        assert part["steps"]["at"].untyped_storage().nbytes() == 3 * 8
    before = parts[0]["steps"]["at"].clone()
    for round_ in range(1, 6):
        experience.extend(batch(round_))
    assert torch.equal(parts[0]["steps"]["at"], before), "copies, which nobody writes to"


def test_a_state_of_other_parts_is_refused(make_experience: Callable[..., Experience]) -> None:
    experience = make_experience()
    experience.extend(batch(0))
    with pytest.raises(RecipeError, match="is of 2 learners, and here are 4: start as many"):
        make_experience(shards=4).load_state_dict([experience.state_dict()])


def test_a_learner_that_goes_on_takes_its_own_parts(
    make_experience: Callable[..., Experience],
) -> None:
    """Where the next steps go is as it was, too."""
    before, after = make_experience(), make_experience()
    for round_ in range(5):
        before.extend(batch(round_))
    one = before.state_dict()
    halves = [{**one, "first": rank, "parts": [part]} for rank, part in enumerate(one["parts"])]
    after.load_state_dict(halves[::-1])
    for experience in (before, after):
        experience.extend(batch(5))
    assert drawn(before) == drawn(after)
