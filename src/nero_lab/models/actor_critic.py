"""The actor-critic network that plays Atari games from the last four frames."""

import math

from torch import Tensor, nn


class ActorCritic(nn.Module):
    """Three convolutions and a hidden layer, then a policy head and a value head.

    Weights start orthogonal, biases at zero. The gain is √2 before a ReLU, 1 for the value, and 0.01 for the policy, so
    that it starts near uniform.

    Args:
        actions: number of actions.
        width: width of every hidden layer, relative to the paper's.
        side: side of the square frames, in pixels.
    """

    def __init__(self, actions: int = 6, *, width: float = 1.0, side: int = 84) -> None:
        super().__init__()
        channels = [int(layer * width) for layer in (32, 64, 32)]
        hidden = int(512 * width)
        final_side = (((side - 8) // 4 + 1 - 4) // 2 + 1) - 2
        self.body = nn.Sequential(
            nn.Conv2d(4, channels[0], 8, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels[0], channels[1], 4, 2),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels[1], channels[2], 3, 1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(channels[2] * final_side**2, hidden),
            nn.ReLU(inplace=True),
        )
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)
        gains = {"actor": 0.01, "critic": 1.0}
        for name, parameter in self.named_parameters():
            layer, _, kind = name.rpartition(".")
            if kind == "weight":
                nn.init.orthogonal_(parameter, gains.get(layer, math.sqrt(2)))
            else:
                nn.init.zeros_(parameter)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Map frames, uint8 (N, 4, side, side), to logits (N, actions) and values (N,)."""
        hidden = self.body(frames.float() / 255)
        return self.actor(hidden), self.critic(hidden).squeeze(1)
