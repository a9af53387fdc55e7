"""The rival way to balance: 5 layers with weights reparameterised by Eq. (cwn).

The raw weights start as N(0, σ²) with σ = 1 or 100; Adam (β₁ = 0.9) at 0.01 trains them for 5 epochs in
batches of 250, without decay. The network is the same function for every σ; its training is not.
"""

from functools import partial

from nero_lab.models.mlp import reparameterised
from nero_lab.protocol import Contender, Seconds, Task, constant

task = Task(
    name="mnist-reparameterised",
    shows="Figure 3, left",
    title="Under reparameterisation, the weights' scale and Adam's learning rate are coupled",
    dataset="mnist",
    model=partial(reparameterised, 5, 1.0),
    contenders={
        f"sigma-{sigma}": Contender(
            "adam", best=0.01, options={"beta1": 0.9}, model=partial(reparameterised, 5, float(sigma))
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
