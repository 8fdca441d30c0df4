"""Slow, plain computation of the delayed update, and the small problems that tests put it to.

The recursion and the optimizers' formulas are written out here, on lists of tensors. Only the value
of a loss is torchrl's, evaluated on a module that the code under test never sees.

Axes: N environments, T steps, O observation features, A actions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, LossModule, PPOLoss
from torchrl.objectives.value import GAE

N, T, O, A = 4, 6, 3, 2  # noqa: E741
LOSSES = {"a2c": A2CLoss, "ppo_clip": ClipPPOLoss, "ppo_kl": KLPENPPOLoss, "ppo": PPOLoss}

Values = list[Tensor]
Rule = Callable[[Values, Values, float], Values]  # gradients, phi, learning rate -> increments


def make_loss(
    name: str = "a2c", *, shared: bool = False, dtype: torch.dtype = torch.float64, **kwargs: object
) -> tuple[LossModule, GAE]:
    """A loss and its advantage estimator, always with the same initial parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actor_head = nn.Linear(5, A) if shared else nn.Sequential(*mlp(A))
        critic_head = nn.Linear(5, 1) if shared else nn.Sequential(*mlp(1))
        trunk = TensorDictModule(nn.Sequential(*mlp(1)[:2]), ["observation"], ["hidden"])
    key = "hidden" if shared else "observation"
    actor = ProbabilisticActor(
        TensorDictModule(actor_head, [key], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(critic_head, in_keys=[key])
    if shared:
        both = ActorValueOperator(trunk, actor, critic)
        actor, critic = both.get_policy_operator(), both.get_value_operator()
    loss = LOSSES[name](actor.to(dtype), critic.to(dtype), entropy_coeff=0.01, **kwargs)
    return loss, GAE(gamma=0.9, lmbda=0.8, value_network=critic)


def mlp(num_outputs: int) -> list[nn.Module]:
    return [nn.Linear(O, 5), nn.Tanh(), nn.Linear(5, num_outputs)]


def make_batch(j: int, dtype: torch.dtype = torch.float64) -> TensorDict:
    """Batch of round j: numbers of that round alone, no matter what the parameters are."""
    generator = torch.Generator().manual_seed(1000 + j)

    def normal(*shape: int) -> Tensor:
        return torch.randn(N, T, *shape, generator=generator, dtype=dtype)

    terminated = normal(1) > 1.5
    return TensorDict(
        {
            "observation": normal(O),
            "action": torch.randint(A, (N, T), generator=generator),
            "action_log_prob": math.log(1 / A) + 0.1 * normal(),
            "logits": 0.1 * normal(A),
            "policy_version": torch.full((N, T), j),
            "next": {
                "observation": normal(O),
                "reward": normal(1),
                "done": terminated,
                "terminated": terminated,
                "truncated": torch.zeros_like(terminated),
            },
        },
        batch_size=[N, T],
        names=[None, "time"],
    )


def minibatches(
    batch: TensorDict, advantage: GAE, epochs: int, num_minibatches: int
) -> Iterator[TensorDict]:
    """PPO's inner loop: advantages once per epoch, then every part of the batch in turn."""
    for _ in range(epochs):
        with torch.no_grad():
            advantage(batch)
        yield from batch.reshape(-1).split(N * T // num_minibatches)


def total_loss(loss_module: LossModule, minibatch: TensorDict) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = loss_module(minibatch)
    return sum(value for key, value in losses.items() if key.startswith("loss_"))


def snapshot(module: nn.Module) -> Values:
    return [parameter.detach().clone() for parameter in module.parameters()]


def clip(gradients: Values, max_norm: float | None) -> Values:
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    if max_norm is None or norm <= max_norm:
        return gradients
    return [g * max_norm / (norm + 1e-6) for g in gradients]


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Rule:
    velocity: Values = []

    def rule(gradients: Values, phi: Values, lr: float) -> Values:
        gradients = [g + weight_decay * p for g, p in zip(gradients, phi, strict=True)]
        previous = velocity or [torch.zeros_like(g) for g in gradients]
        velocity[:] = [momentum * v + g for v, g in zip(previous, gradients, strict=True)]
        return [-lr * v for v in velocity]

    return rule


def rmsprop(alpha: float = 0.99, eps: float = 1e-8) -> Rule:
    square: Values = []

    def rule(gradients: Values, phi: Values, lr: float) -> Values:
        previous = square or [torch.zeros_like(g) for g in gradients]
        square[:] = [
            alpha * s + (1 - alpha) * g**2 for s, g in zip(previous, gradients, strict=True)
        ]
        return [-lr * g / (s.sqrt() + eps) for g, s in zip(gradients, square, strict=True)]

    return rule


def adam(decoupled_decay: float = 0.0, eps: float = 1e-8) -> Rule:
    beta1, beta2 = 0.9, 0.999
    first: Values = []
    second: Values = []
    steps = 0

    def rule(gradients: Values, phi: Values, lr: float) -> Values:
        nonlocal steps
        steps += 1
        zeros = [torch.zeros_like(g) for g in gradients]
        first[:] = [
            beta1 * m + (1 - beta1) * g for m, g in zip(first or zeros, gradients, strict=True)
        ]
        second[:] = [
            beta2 * v + (1 - beta2) * g**2 for v, g in zip(second or zeros, gradients, strict=True)
        ]
        return [
            -lr * (m / (1 - beta1**steps)) / ((v / (1 - beta2**steps)).sqrt() + eps)
            - lr * decoupled_decay * p
            for m, v, p in zip(first, second, phi, strict=True)
        ]

    return rule


def reference(
    loss_name: str,
    rule: Rule,
    *,
    lag: int,
    rounds: int,
    shared: bool = False,
    epochs: int = 1,
    num_minibatches: int = 1,
    max_norm: float | None = None,
    learning_rate: Callable[[int], float] = lambda j: 0.05,
    newest: bool = False,
) -> list[Values]:
    """theta_0, theta_1, ... by docs/explanation/schedule.md; with `newest`, gradients there."""
    loss_module, advantage = make_loss(loss_name, shared=shared)
    theta = [snapshot(loss_module)] * (lag + 1)
    for j in range(rounds):
        moving = theta[j + lag]
        phi = theta[j + lag] if newest else theta[j]
        batch = make_batch(j)
        put(loss_module, phi)
        for minibatch in minibatches(batch, advantage, epochs, num_minibatches):
            put(loss_module, phi)
            gradients = torch.autograd.grad(
                total_loss(loss_module, minibatch), list(loss_module.parameters())
            )
            increments = rule(clip(list(gradients), max_norm), phi, learning_rate(j))
            moving = [a + b for a, b in zip(moving, increments, strict=True)]
            phi = [a + b for a, b in zip(phi, increments, strict=True)]
            put(loss_module, phi)  # the next epoch's advantages are of the moved values
        theta.append(moving)
    return theta


def put(module: nn.Module, values: Values) -> None:
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)
