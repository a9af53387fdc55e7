"""The actor-critic network."""

import math

import torch

from nero_lab.models.actor_critic import ActorCritic


def test_actor_critic_starts_orthogonal_and_scales_pixels():
    torch.manual_seed(0)
    model = ActorCritic()
    assert [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 4] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (32, 64, 3, 3),
    ]
    assert sum(parameter.numel() for parameter in model.parameters()) == 866_439
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
            continue
        rows = parameter.detach().flatten(1)
        gain = {"actor.weight": 0.01, "critic.weight": 1.0}.get(name, math.sqrt(2))
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=0)
    frames = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    logits, values = model(frames)
    hidden = model.body(frames.float() / 255)
    assert logits.shape == (5, 6)
    torch.testing.assert_close(logits, model.actor(hidden))
    torch.testing.assert_close(values, model.critic(hidden)[:, 0])
