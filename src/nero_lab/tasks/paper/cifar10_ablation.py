"""Which of the two constraints helps Nero? VGG-11 on CIFAR-10 with either, both or neither.

The learning rate is tuned over {0.01, 0.02, 0.04, 0.06, 0.08, 0.1}. As in the authors' runs, a step is
relative to a tensor's mean neuron norm at the start, which matters where the norm is free.
"""

from nero_lab.models.vgg import vgg11
from nero_lab.protocol import Contender, Seconds, Task
from nero_lab.tasks.paper.cifar10_vgg11 import CIFAR10

FINE_GRID = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1)


def nero(fix_mean: bool, fix_norm: bool, best: float) -> Contender:
    """Return Nero with the given constraints."""
    return Contender("nero", best, {"fix_mean": fix_mean, "fix_norm": fix_norm, "fixed_scale": True})


task = Task(
    name="cifar10-ablation",
    shows="Figure 1, appendix's table",
    title="Nero does best with both constraints",
    model=vgg11,
    contenders={
        "nero-neither": nero(fix_mean=False, fix_norm=False, best=0.02),
        "nero-mean": nero(fix_mean=True, fix_norm=False, best=0.01),
        "nero-norm": nero(fix_mean=False, fix_norm=True, best=0.02),
        "nero-both": nero(fix_mean=True, fix_norm=True, best=0.02),
    },
    grid=FINE_GRID,
    seconds=Seconds(405, 121, 509_000),
    **CIFAR10,
)
