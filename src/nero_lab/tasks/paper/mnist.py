"""Two experiments with perceptrons on MNIST: a very deep one, and the rival way to balance."""

from dataclasses import replace
from functools import partial

from nero_lab.models.mlp import balanced_mlp, mlp
from nero_lab.models.mlp import reparameterised as reparameterised_mlp
from nero_lab.protocol import Contender, Seconds, Task, constant, decay_each_epoch

#: 100 layers of 784 units, no skips, no batch norm, for 50 epochs in batches of 250, the learning rate times 0.9 at the
#: end of every epoch. Adam and LAMB ran with β₁ = 0.9 here.
deep = Task(
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
    deep,
    name="mnist-deep-balanced",
    study="claims",
    shows="",
    title="From balanced weights, which optimiser trains a 100-layer perceptron?",
    model=partial(balanced_mlp, 100),
    contenders={
        name: replace(deep.contenders[name], best=grid[0], grid=grid)
        for name, grid in {"adam": (0.0001, 0.001), "sgd": (0.01, 0.1), "lamb": (0.001, 0.01)}.items()
    },
)

#: 5 layers with weights reparameterised by Eq. (cwn). The raw weights start as N(0, σ²) with σ = 1 or 100; Adam
#: (β₁ = 0.9) at 0.01 trains them for 5 epochs in batches of 250, without decay. The network is the same function for
#: every σ; its training is not.
reparameterised = Task(
    name="mnist-reparameterised",
    shows="Figure 3, left",
    title="Under reparameterisation, the weights' scale and Adam's learning rate are coupled",
    dataset="mnist",
    model=partial(reparameterised_mlp, 5, 1.0),
    contenders={
        f"sigma-{sigma}": Contender(
            "adam", best=0.01, options={"beta1": 0.9}, model=partial(reparameterised_mlp, 5, float(sigma))
        )
        for sigma in (1, 100)
    },
    grid=(0.01,),
    epochs=5,
    batch=250,
    schedule=constant,
    metric="train_accuracy",
    seconds=Seconds(1.2, 1.1, 124),
    side_by_side=6,
)
