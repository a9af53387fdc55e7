"""Proximal policy optimisation plays Atari's Pong.

8 games are played for 128 steps at a time, which are then learned from in 4 passes of 4 minibatches, for 5 million
steps in all; the learning rate falls linearly to zero, and its start is tuned over {0.0001, 0.001, 0.01, 0.1, 1}. Every
optimiser's gradient is clipped to a norm of 0.5. Where the paper is silent, the settings are those of the code that
it followed (Kostrikov's): 32 channels of the third convolution, advantages normalised within a round. LAMB learns only
with momentum, as the paper found.
"""

from dataclasses import replace
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

#: Why does Nero stay below the paper here? One change at a time to PPO or to Nero, on one seed.
variants = replace(
    task,
    name="pong-variants",
    study="claims",
    shows="",
    title="Which change to PPO or to Nero lifts its mean return?",
    contenders={
        "minibatch-advantages": Contender("nero", best=0.01, options={"ppo": {"normalises_rounds": False}}),
        "unclipped-value": Contender("nero", best=0.01, options={"ppo": {"is_value_clipped": False}}),
        "value-not-halved": Contender("nero", best=0.01, options={"ppo": {"value": 1.0}}),
        "unclipped-gradient": Contender("nero", best=0.01, options={"ppo": {"max_grad_norm": 1e9}}),
        "no-entropy": Contender("nero", best=0.01, options={"ppo": {"entropy": 0.0}}),
        "bounded": Contender("nero", best=0.01, options={"longest_step": 3.0}),
        "twice-the-rate": Contender("nero", best=0.02),
        "free": Contender("nero", best=0.01, options={"fix_mean": False, "fix_norm": False}),
    },
    grid=(),
    seeds=1,
)
