"""A very deep perceptron: 100 layers of 784 units, no skips, no batch norm.

It trains for 50 epochs in batches of 250, the learning rate times 0.9 at the end of every epoch and
its start tuned over {0.0001, 0.001, 0.01, 0.1}. Adam and LAMB ran with β₁ = 0.9 here.
"""

from dataclasses import replace
from functools import partial

from nero_lab.models.mlp import balanced_mlp, mlp
from nero_lab.protocol import Contender, Seconds, Task, decay_each_epoch

task = Task(
    name="mnist-deep",
    shows="Figure 3, right",
    title="Nero trains a 100-layer perceptron, reliably; SGD, Adam and LAMB do not",
    dataset="mnist",
    model=partial(mlp, 100),
    contenders={
        "nero": Contender("nero", best=0.001),
        "lamb": Contender("lamb", best=0.01, options={"beta1": 0.9}),
        "adam": Contender("adam", best=0.001, options={"beta1": 0.9}),
        "sgd": Contender("sgd", best=0.1),
    },
    grid=(0.0001, 0.001, 0.01, 0.1),
    epochs=50,
    batch=250,
    schedule=decay_each_epoch(0.9),
    metric="train_accuracy",
    seconds=Seconds(99, 47, 22_800),
    side_by_side=12,
)

#: Is it the optimiser, or the start? The paper's baselines from the weights that Nero starts from.
balanced_start = replace(
    task,
    name="mnist-deep-balanced",
    study="claims",
    shows="",
    title="From balanced weights, which optimiser trains a 100-layer perceptron?",
    model=partial(balanced_mlp, 100),
    contenders={
        name: replace(task.contenders[name], best=grid[0], grid=grid)
        for name, grid in {"adam": (0.0001, 0.001), "sgd": (0.01, 0.1), "lamb": (0.001, 0.01)}.items()
    },
)
