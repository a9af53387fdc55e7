"""Proximal policy optimisation (PPO): hyperparameters, advantages and objective, on plain tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PPO:
    """Hyperparameters. A round collects steps of all games, then learns from them.

    Attributes:
        games: parallel games.
        steps: steps of each game in a round.
        passes: passes over the steps of a round.
        minibatches: minibatches of a pass.
        clip: bound on the change of the policy ratio and of the value.
        discount: γ.
        gae_lambda: λ of generalised advantage estimation.
        entropy, value: weights of these terms in the objective.
        is_value_clipped: clip the change of the value, as that of the policy ratio.
        normalises_rounds: normalise advantages within a round, instead of within a minibatch.
        max_grad_norm: norm that the gradient of all weights is clipped to.
        rounds: rounds of an epoch.
    """

    games: int = 8
    steps: int = 128
    passes: int = 4
    minibatches: int = 4
    clip: float = 0.1
    discount: float = 0.99
    gae_lambda: float = 0.95
    entropy: float = 0.01
    value: float = 0.5
    is_value_clipped: bool = True
    normalises_rounds: bool = True
    max_grad_norm: float = 0.5
    rounds: int = 80

    @property
    def round_steps(self) -> int:
        """Steps of all games in a round."""
        return self.games * self.steps

    @property
    def round_updates(self) -> int:
        """Updates of the weights in a round."""
        return self.passes * self.minibatches


@dataclass(frozen=True)
class Batch:
    """Steps to learn from.

    Attributes:
        actions: the chosen actions.
        log_likelihoods: log-probabilities of the actions under the policy that chose them.
        values: value estimates when the actions were chosen.
        returns: targets of the value.
        advantages: advantages of the actions, normalised.
    """

    actions: Tensor
    log_likelihoods: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor


def advantages(ppo: PPO, rewards: Tensor, ends: Tensor, values: Tensor) -> Tensor:
    """Compute generalised advantage estimates of consecutive steps.

    Args:
        ppo: discount and λ.
        rewards: (steps, games).
        ends: (steps, games): 1 where the step ended its episode.
        values: (steps + 1, games): value estimates before each step, and after the last.
    """
    continues = 1 - ends
    errors = rewards + ppo.discount * values[1:] * continues - values[:-1]
    decay = ppo.discount * ppo.gae_lambda * continues
    estimates = torch.empty_like(rewards)
    last = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        last = errors[step] + decay[step] * last
        estimates[step] = last
    return estimates


def normalise(values: Tensor) -> Tensor:
    """Scale to mean 0 and standard deviation 1."""
    return (values - values.mean()) / (values.std() + 1e-5)


def objective(ppo: PPO, logits: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute the loss, and its parts: policy loss, value loss and entropy."""
    log_policy = torch.log_softmax(logits, 1)
    log_likelihoods = log_policy.gather(1, batch.actions[:, None]).squeeze(1)
    ratios = (log_likelihoods - batch.log_likelihoods).exp()
    clipped = ratios.clamp(1 - ppo.clip, 1 + ppo.clip)
    policy = -torch.minimum(batch.advantages * ratios, batch.advantages * clipped).mean()
    errors = (values - batch.returns).square()
    if ppo.is_value_clipped:
        near = batch.values + (values - batch.values).clamp(-ppo.clip, ppo.clip)
        errors = torch.maximum(errors, (near - batch.returns).square())
    value = 0.5 * errors.mean()
    entropy = -(log_policy.exp() * log_policy).sum(1).mean()
    total = policy + ppo.value * value - ppo.entropy * entropy
    return total, torch.stack([policy, value, entropy]).detach()
