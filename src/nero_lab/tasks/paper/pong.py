"""Proximal policy optimisation plays Atari's Pong.

8 games are played for 128 steps at a time, which are then learned from in 4 passes of 4 minibatches, for 5 million
steps in all; the learning rate falls linearly to zero, and its start is tuned over {0.0001, 0.001, 0.01, 0.1, 1}. Every
optimiser's gradient is clipped to a norm of 0.5. Where the paper is silent, the settings are those of the code that
it followed (Kostrikov's): 32 channels of the third convolution, advantages normalised within a round. LAMB learns only
with momentum, as the paper found.
"""

from functools import partial

from nero_lab.loops.agent import Agent
from nero_lab.loops.ppo import PPO
from nero_lab.models.actor_critic import ActorCritic
from nero_lab.protocol import Contender, Seconds, Task, linear_decay

#: Each of 80 rounds of 1024 steps: 4,997,120 steps in all.
EPOCHS = 61

task = Task(
    name="pong",
    shows="Table 1, Figure 8",
    title="Nero out of the box learns to play Pong; LAMB does not, without momentum",
    dataset="pong",
    model=ActorCritic,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=0.1),
        "adam": Contender("adam", best=0.0001, options={"eps": 1e-5}),
        "lamb": Contender("lamb", best=0.001, options={"eps": 1e-5}),
        "lamb-momentum": Contender("lamb", best=0.001, options={"beta1": 0.9, "eps": 1e-5}),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    epochs=EPOCHS,
    batch=256,
    schedule=linear_decay(EPOCHS),
    metric="reward",
    seconds=Seconds(915, 832, None),
    side_by_side=2,
    loop=partial(Agent, ppo=PPO(rounds=80)),
)
