"""Proximal policy optimisation: its numbers, its advantages and its objective, on plain tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nero_lab.protocol import SettingError


@dataclass(frozen=True)
class PPO:
    """How an agent gathers steps and learns from them; a round is both.

    Attributes:
        games: how many are played at a time.
        steps: in each of them, in a round.
        passes: how often a round's steps are learned from.
        minibatches: of a pass.
        clip: how far the policy's ratio, and the value, may move before they count no more.
        discount: γ, what a reward one step later is worth.
        trace: λ of the advantages' average.
        entropy, value: what these count for in the objective.
        longest_gradient: the norm that the gradient of all weights is shortened to.
        rounds: of an epoch.
    """

    games: int = 8
    steps: int = 128
    passes: int = 4
    minibatches: int = 4
    clip: float = 0.1
    discount: float = 0.99
    trace: float = 0.95
    entropy: float = 0.01
    value: float = 0.5
    longest_gradient: float = 0.5
    rounds: int = 80

    def __post_init__(self) -> None:
        if self.gathered % self.minibatches:
            raise SettingError(f"{self.gathered} steps cannot be parted into {self.minibatches} minibatches alike")

    @property
    def gathered(self) -> int:
        """The steps of a round, of all games."""
        return self.games * self.steps

    @property
    def updates(self) -> int:
        """Of the weights, in a round."""
        return self.passes * self.minibatches


@dataclass(frozen=True)
class Batch:
    """Steps to learn from, and what was thought of them as they were made.

    Attributes:
        actions: that were chosen.
        likelihoods: their logarithms under the policy that chose them.
        values: as they were judged.
        returns: what they brought.
        advantages: by how much the actions were better than judged, normalised within the round.
    """

    actions: Tensor
    likelihoods: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor


def advantages(ppo: PPO, rewards: Tensor, ends: Tensor, values: Tensor) -> Tensor:
    """Generalised advantages of steps in a row.

    Args:
        ppo: for the discount and the trace.
        rewards: (steps, games), of each step.
        ends: likewise, 1 where the episode was over with the step: what comes after is another's.
        values: (steps + 1, games), before each step, and after the last.
    """
    goes_on = 1 - ends
    surprises = rewards + ppo.discount * values[1:] * goes_on - values[:-1]
    fades = ppo.discount * ppo.trace * goes_on
    found = torch.empty_like(rewards)
    last = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        last = surprises[step] + fades[step] * last
        found[step] = last
    return found


def normalised(values: Tensor) -> Tensor:
    """Brought to mean 0 and deviation 1."""
    return (values - values.mean()) / (values.std() + 1e-5)


def objective(ppo: PPO, logits: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """What to minimise, and its three parts: the losses of policy and value, and the entropy.

    The value's step is clipped like the policy's.
    """
    every = torch.log_softmax(logits, 1)
    likelihoods = every.gather(1, batch.actions[:, None]).squeeze(1)
    ratios = (likelihoods - batch.likelihoods).exp()
    clipped = ratios.clamp(1 - ppo.clip, 1 + ppo.clip)
    policy = -torch.minimum(batch.advantages * ratios, batch.advantages * clipped).mean()
    near = batch.values + (values - batch.values).clamp(-ppo.clip, ppo.clip)
    value = 0.5 * torch.maximum((values - batch.returns).square(), (near - batch.returns).square()).mean()
    entropy = -(every.exp() * every).sum(1).mean()
    total = policy + ppo.value * value - ppo.entropy * entropy
    return total, torch.stack([policy, value, entropy]).detach()
