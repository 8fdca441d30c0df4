"""The networks of the recipes that learn from pictures."""

from __future__ import annotations

import pytest
import script_paths  # noqa: F401  so that the scripts are found
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

pytest.importorskip("ale_py")
from support import pixels
from support.errors import RecipeError

from torchrl_hts.envs import make_atari


def frames_batch(num_envs: int, num_steps: int) -> TensorDict:
    """Random frames, with an episode that is cut off and one that ends by itself."""
    shape = (num_envs, num_steps)
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(
        0, 256, (num_envs, num_steps + 1, 4, 84, 84), generator=generator, dtype=torch.uint8
    )
    truncated, terminated = torch.zeros(2, *shape, 1, dtype=torch.bool)
    truncated[0, 1] = terminated[1, 0] = terminated[1, -1] = True
    next_frames = frames[:, 1:].clone()
    ended = (truncated | terminated).squeeze(-1)
    next_frames[ended] = torch.randint(
        0, 256, (int(ended.sum()), 4, 84, 84), generator=generator, dtype=torch.uint8
    )
    return TensorDict(
        {
            "observation": frames[:, :-1].contiguous(),
            "action": torch.randint(0, 6, shape, generator=generator),
            "next": {
                "observation": next_frames,
                "reward": torch.randn(*shape, 1, generator=generator),
                "done": truncated | terminated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=shape,
        names=[None, "time"],
    )


def test_one_pass_of_the_trunk_gives_the_losses_and_gradients_of_four() -> None:
    torch.manual_seed(0)
    agent = pixels.Agent(make_atari("ALE/Pong-v5"))
    model = torch.nn.ModuleList([agent.trunk, agent.actor_head, agent.critic_head])

    def loss_and_gradients(encoded: bool) -> tuple[float, list[torch.Tensor]]:
        batch = frames_batch(3, 4)
        actor, critic = agent.actor_head, agent.critic_head
        if encoded:
            pixels.encode(agent.trunk, batch)
        else:
            critic = TensorDictSequential(agent.trunk, critic)
            actor = ProbabilisticActor(
                TensorDictSequential(agent.trunk, actor[0]),
                in_keys=["logits"],
                distribution_class=torch.distributions.Categorical,
            )
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
        losses = A2CLoss(actor, critic, entropy_coeff=0.01)(batch.reshape(-1))
        loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return loss.item(), gradients

    once = loss_and_gradients(encoded=True)
    stock = loss_and_gradients(encoded=False)
    assert once[0] == pytest.approx(stock[0], rel=1e-5)
    for mine, theirs in zip(once[1], stock[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_actors_values_give_the_advantages_of_the_critic() -> None:
    torch.manual_seed(0)
    agent = pixels.Agent(make_atari("ALE/Pong-v5"))
    batch = frames_batch(3, 4)
    with torch.no_grad():
        batch["state_value"] = agent.actor_critic(batch.select("observation"))["state_value"]
    agent.evaluate_next(batch)
    GAE(gamma=0.99, lmbda=0.95, value_network=None)(batch)
    stock = frames_batch(3, 4)
    critic = TensorDictSequential(agent.trunk, agent.critic_head)
    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(stock)
    torch.testing.assert_close(batch["advantage"], stock["advantage"])
    torch.testing.assert_close(batch["value_target"], stock["value_target"])


def test_layers_are_orthogonal() -> None:
    trunk = pixels.NatureCNN((4, 84, 84))
    weight = trunk.layers[7].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(512), rtol=0, atol=1e-4)
    assert not trunk.layers[7].bias.any()


def test_the_trunk_takes_any_batch_of_frames() -> None:
    frames = torch.randint(0, 256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    trunk = TensorDictModule(pixels.NatureCNN((4, 84, 84)), ["observation"], ["hidden"])
    out = trunk(TensorDict({"observation": frames}, [2, 3]))["hidden"]
    assert (out.shape, out.dtype) == ((2, 3, 512), torch.float32)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_learners_of_a_machine_take_gpus_of_their_own(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert pixels.own_device("cuda") == "cuda"
    found = []
    for rank in range(3):
        monkeypatch.setenv(variable, str(rank))
        assert pixels.own_device("cpu") == "cpu"
        assert pixels.own_device("cuda:1") == "cuda:1", "as it was asked for"
        found.append(pixels.own_device("cuda"))
    assert found == ["cuda:0", "cuda:1", "cuda:0"]


def test_a_device_that_is_not_there_is_told_of_by_its_option() -> None:
    agent = pixels.Agent(make_atari("ALE/Pong-v5"))
    with pytest.raises(RecipeError, match=r"--device cuda:99 can't be used here: "):
        pixels.on_device(agent, "cuda:99")
    assert not torch.are_deterministic_algorithms_enabled()
    assert pixels.on_device(agent, "cpu") is agent
    assert not torch.are_deterministic_algorithms_enabled(), "the CPU's are as they are"
