"""PPO's advantages and objective, against loops over single steps."""

import math

import pytest
import torch

from nero_lab.loops import ppo
from nero_lab.loops.ppo import PPO, Batch
from nero_lab.protocol import SettingError


def test_advantages_match_reference():
    torch.manual_seed(0)
    rewards, ends = torch.randn(20, 3, dtype=torch.float64), (torch.rand(20, 3) < 0.2).double()
    values = torch.randn(21, 3, dtype=torch.float64)
    found = ppo.advantages(PPO(discount=0.9, gae_lambda=0.8), rewards, ends, values)
    for game in range(3):
        for step in range(20):
            total, weight = 0.0, 1.0
            for later in range(step, 20):
                over = ends[later, game].item() == 1
                after = 0.0 if over else 0.9 * values[later + 1, game].item()
                total += weight * (rewards[later, game].item() + after - values[later, game].item())
                if over:
                    break
                weight *= 0.9 * 0.8
            assert found[step, game].item() == pytest.approx(total, rel=1e-12)


def test_objective_matches_reference():
    torch.manual_seed(0)
    logits, values = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    actions = torch.randint(4, (30,))
    old = torch.log_softmax(logits, 1).gather(1, actions[:, None])[:, 0] + 0.2 * torch.randn(30, dtype=torch.float64)
    before, returns, gained = (torch.randn(30, dtype=torch.float64) for _ in range(3))
    batch = Batch(actions, old, before, returns, gained)
    rules = PPO(clip=0.1, entropy=0.03, value=0.7)
    total, parts = ppo.objective(rules, logits, values, batch)
    policy = value = entropy = 0.0
    for step in range(30):
        exponentials = [math.exp(each) for each in logits[step].tolist()]
        probabilities = [each / sum(exponentials) for each in exponentials]
        ratio = probabilities[actions[step]] / math.exp(old[step].item())
        worth = gained[step].item()
        policy -= min(worth * ratio, worth * min(max(ratio, 0.9), 1.1)) / 30
        was, now, wanted = before[step].item(), values[step].item(), returns[step].item()
        near = was + min(max(now - was, -0.1), 0.1)
        value += max((now - wanted) ** 2, (near - wanted) ** 2) / 2 / 30
        entropy -= sum(p * math.log(p) for p in probabilities) / 30
    assert parts.tolist() == pytest.approx([policy, value, entropy], rel=1e-9)
    assert total.item() == pytest.approx(policy + 0.7 * value - 0.03 * entropy, rel=1e-9)


def test_ppo_uneven_minibatches_are_refused():
    with pytest.raises(SettingError, match="multiple of minibatches, got 1000 and 3"):
        PPO(games=8, steps=125, minibatches=3)
