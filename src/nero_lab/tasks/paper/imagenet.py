"""ResNet-50 on ImageNet, or on a stand-in: any folder of classes.

90 epochs in batches of 400: one of linear warm-up, step by step, then 89 of cosine annealing. SGD has momentum 0.9,
and weight decay 0.0001 of all parameters or none. Tuned, Nero has σ_b = 1 and a quadratic penalty that pulls gains to
one. The paper gives neither a grid nor the strength of the penalty.
"""

from dataclasses import replace

from torch import nn

from nero_lab import distributed
from nero_lab.data import Dataset, Photos
from nero_lab.models.resnet import resnet50
from nero_lab.protocol import Contender, Seconds, Task, warm_up_then_cosine

#: λ of λ/2 (gain - 1)². The paper does not give it; this value is ours, not tuned.
PENALTY = 0.001


def count_data(model: nn.Module, data: Dataset) -> dict[str, float]:  # noqa: ARG001
    """Return what a result depends on besides its settings: classes, side of the crops, processes."""
    assert isinstance(data, Photos)
    return {"classes": len(data.classes), "crop": data.crop, "processes": distributed.world_size()}


task = Task(
    name="imagenet",
    shows="Figure 9",
    title="Nero can be regularised: tuned, it about matches SGD with weight decay",
    dataset="imagenet",
    model=resnet50,
    contenders={
        "nero": Contender("nero", best=0.01),
        "nero-tuned": Contender("nero", best=0.02, options={"scale": 1.0, "gain_penalty": PENALTY}),
        "nero-free-gains": Contender("nero", best=0.02, options={"scale": 1.0}),
        "sgd-decay": Contender("sgd", best=0.1, options={"momentum": 0.9, "weight_decay": 0.0001}),
        "sgd": Contender("sgd", best=0.1, options={"momentum": 0.9}),
    },
    grid=(),
    epochs=90,
    batch=400,
    schedule=warm_up_then_cosine(1, 90),
    metric="test_accuracy",
    seconds=Seconds(),
    verdict=count_data,
    is_distributable=True,
    side_by_side=1,
)

#: What made the difference: stronger penalties, and the two other changes of tuned Nero, one at a time.
parts = replace(
    task,
    name="imagenet-parts",
    study="claims",
    shows="",
    title="Which part of tuned Nero helps: the rate, the scale, or the pull on gains?",
    contenders={
        **{
            f"gains-{penalty:g}": Contender("nero", best=0.02, options={"scale": 1.0, "gain_penalty": penalty})
            for penalty in (0.01, 0.1, 1.0)
        },
        "rate-alone": Contender("nero", best=0.02),
        "scale-alone": Contender("nero", best=0.01, options={"scale": 1.0}),
    },
)
