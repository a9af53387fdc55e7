"""Relative updates per synapse (Madam), per neuron (Nero) and per layer (LAMB), free and balanced.

VGG-11 on CIFAR-10, the learning rate tuned over {0.01, 0.02, 0.04, 0.06, 0.08, 0.1}. Nero's two rows are those of
cifar10-ablation with neither constraint and with both.
"""

from nero_lab.models.vgg import vgg11
from nero_lab.protocol import Contender, Seconds, Task
from nero_lab.tasks.paper.cifar10_ablation import FINE_GRID
from nero_lab.tasks.paper.cifar10_vgg11 import CIFAR10

task = Task(
    name="cifar10-granularity",
    shows="Figure 2, appendix's table",
    title="A neuron is a good unit to update by",
    model=vgg11,
    contenders={
        "madam": Contender("madam", best=0.02),
        "madam-balanced": Contender("madam", best=0.06, options={"balanced": True}),
        "lamb": Contender("lamb", best=0.02),
        "lamb-balanced": Contender("lamb", best=0.06, options={"balanced": True}),
    },
    grid=FINE_GRID,
    seconds=Seconds(405, 121, 509_000),
    **CIFAR10,
)
