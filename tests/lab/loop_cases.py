"""A small GAN with its data and metric, and a small game with a task that plays it."""

import math
import random
from dataclasses import replace
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("typer")

from nero_lab.data import ImageDataset, Images
from nero_lab.data.arcade import Game
from nero_lab.image_metrics import FrechetMetric
from nero_lab.loops.adversarial import Adversarial
from nero_lab.loops.agent import Agent
from nero_lab.loops.ppo import PPO
from nero_lab.models.actor_critic import ActorCritic
from nero_lab.models.biggan import GANPair
from nero_lab.tasks import TASKS

CPU = torch.device("cpu")
PAPER_GAN = TASKS["cgan"]


def noise_images(examples=7, tests=6, size=16):
    """Make noise in which each class is brighter than the last."""
    generator = torch.Generator().manual_seed(0)

    def images(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(100, (count, 3, size, size), generator=generator)
        return Images((noise + 15 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

    return ImageDataset("cifar10", images(examples), images(tests), (0.4,) * 3, (0.2,) * 3)


def tiny_metrics(_):
    """Return a metric whose features are the means of 4 x 4 pixels."""

    def features(pixels):
        return F.avg_pool2d(pixels.float(), 4).flatten(1)

    return [FrechetMetric("Fréchet distance, quarters", "distance", features)]


TINY_GAN = replace(
    PAPER_GAN,
    model=partial(GANPair, base=1, blocks=2, chunk=3, class_features=5, rows=12),
    batch=4,
    epochs=3,
    loop=partial(Adversarial, metrics=tiny_metrics),
)
SIDE, ACTIONS = 36, 3
SMALL_PPO = PPO(games=2, steps=12, passes=2, minibatches=3, rounds=1)


class Echo:
    """Emulator of games that show an action as a bright stripe, and reward this action with one.

    An episode has 3 to 8 steps. As in the real emulator, it follows from the seed and the number of episodes since.
    """

    def __init__(self, games, colour=False):
        self.seeds, self.colour = [random.Random() for _ in range(games)], colour
        self.random = list(self.seeds)
        self.left, self.shown = [0] * games, [0] * games
        self.self_restarts, self.lengths = 0, [[] for _ in range(games)]

    def begin(self, game):
        self.random[game] = random.Random(self.seeds[game].random())
        self.left[game] = self.random[game].randint(3, 8)
        self.lengths[game].append(self.left[game])
        self.shown[game] = self.random[game].randrange(ACTIONS)

    def frames(self):
        found = np.zeros((len(self.shown), 4, SIDE, SIDE), np.uint8)
        for frames, action in zip(found, self.shown, strict=True):
            frames[:, :, action * SIDE // ACTIONS :][:, :, : SIDE // ACTIONS] = 255
        return np.repeat(found[:, :1, :, :, None], 3, axis=4) if self.colour else found

    def reset(self, *, seed, options):
        for game, number in zip(np.flatnonzero(options["reset_mask"]), seed, strict=True):
            if number >= 0:
                self.seeds[game].seed(int(number))
            self.begin(game)
        return self.frames(), {}

    def send(self, actions):
        self.actions = actions.copy()

    def recv(self):
        rewards, over = np.zeros(len(self.left), np.int32), np.zeros(len(self.left), bool)
        for game, action in enumerate(self.actions):
            if not self.left[game]:
                self.self_restarts += 1
                self.begin(game)
                continue
            rewards[game] = action == self.shown[game]
            self.left[game] -= 1
            over[game] = not self.left[game]
            self.shown[game] = self.random[game].randrange(ACTIONS)
        return self.frames(), rewards, over, np.zeros_like(over), {}


def shown_in(frames):
    """Return the action that each game shows."""
    return frames[..., 0, 0, :].int().argmax(-1) * ACTIONS // SIDE


ECHO = Game("pong", Echo)
TINY_GAME = replace(
    TASKS["pong"],
    model=partial(ActorCritic, ACTIONS, width=1 / 16, side=SIDE),
    loop=partial(Agent, ppo=SMALL_PPO),
)


class Watch:
    """Observer that ignores everything."""

    def __getattr__(self, _):
        return lambda *_: None


def play(task, settings, data, state=None, until=math.inf):
    """Train to the end, or for a number of steps."""
    training = task.loop(task, settings, data, state)
    while not training.is_finished and training.steps_done < until:
        training.advance()
    return training


def saved_and_loaded(state):
    """Pass a state through a checkpoint file."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
