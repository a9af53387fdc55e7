"""Four experiments with classifiers on CIFAR-10: VGG-11, ResNet-18, Nero's constraints, and the unit of an update.

Every optimiser without momentum, β = β₂ = 0.999, no weight decay.
"""

from dataclasses import replace

from nero_lab.data.augmentation import crop_flip_rotate
from nero_lab.models.resnet import resnet18
from nero_lab.models.vgg import vgg11
from nero_lab.protocol import Contender, Seconds, Task, warm_up_then_drop

FINE_GRID = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1)

#: VGG-11, which has no batch norm. 199 epochs: 5 of linear warm-up, step by step; the learning rate is multiplied by
#: 0.2 at three later ones. Images are cropped at random after padding by 4, flipped, and rotated by up to 15°.
vgg = Task(
    name="cifar10-vgg11",
    shows="Table 1, Figure 5",
    title="Nero out of the box, against SGD, Adam and LAMB at their best",
    dataset="cifar10",
    model=vgg11,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=0.1),
        "adam": Contender("adam", best=0.001),
        "lamb": Contender("lamb", best=0.01),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    epochs=199,
    batch=128,
    schedule=warm_up_then_drop(5, 0.2, at=(100, 150, 180)),
    metric="test_accuracy",
    augment=crop_flip_rotate,
    seconds=Seconds(405, 121, 509_000),
)

#: Is one rate stable across batch sizes? Every contender at its rate for batches of 128, for as many epochs.
batches = tuple(
    replace(
        vgg,
        name=f"cifar10-vgg11-b{batch}",
        study="claims",
        shows="",
        title="Does a rate serve other batch sizes?",
        batch=batch,
        grid=(),
        seeds=1,
        seconds=Seconds(),
    )
    for batch in (32, 512, 2048)
)

#: The same on a network with batch norm and skips.
resnet = replace(
    vgg,
    name="cifar10-resnet18",
    title="The same on a residual network with batch norm",
    model=resnet18,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=0.1),
        "adam": Contender("adam", best=0.01),
        "lamb": Contender("lamb", best=0.1),
    },
    seconds=Seconds(1280, 358, 1_190_000),
    side_by_side=2,
    is_compiled=True,
)


def _constrained(fix_mean: bool, fix_norm: bool, best: float) -> Contender:
    return Contender("nero", best, {"fix_mean": fix_mean, "fix_norm": fix_norm, "fixed_scale": True})


#: Which of the two constraints helps Nero? As in the authors' runs, a step is relative to a tensor's mean neuron norm
#: at the start, which matters where the norm is free.
ablation = replace(
    vgg,
    name="cifar10-ablation",
    shows="Figure 1, appendix's table",
    title="Nero does best with both constraints",
    contenders={
        "nero-neither": _constrained(fix_mean=False, fix_norm=False, best=0.02),
        "nero-mean": _constrained(fix_mean=True, fix_norm=False, best=0.01),
        "nero-norm": _constrained(fix_mean=False, fix_norm=True, best=0.02),
        "nero-both": _constrained(fix_mean=True, fix_norm=True, best=0.02),
    },
    grid=FINE_GRID,
)

#: Relative updates per synapse (Madam), per neuron (Nero) and per layer (LAMB), free and balanced. Nero's two rows are
#: those of the ablation with neither constraint and with both.
granularity = replace(
    vgg,
    name="cifar10-granularity",
    shows="Figure 2, appendix's table",
    title="A neuron is a good unit to update by",
    contenders={
        "madam": Contender("madam", best=0.02),
        "madam-balanced": Contender("madam", best=0.06, options={"balanced": True}),
        "lamb": Contender("lamb", best=0.02),
        "lamb-balanced": Contender("lamb", best=0.06, options={"balanced": True}),
    },
    grid=FINE_GRID,
)
