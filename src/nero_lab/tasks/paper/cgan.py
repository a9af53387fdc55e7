"""A class-conditional GAN on CIFAR-10, like BigGAN: spectral norm, self-attention, conditional batch norm.

Batches of 256, flipped at random, one step of the discriminator to one of the generator at the same learning rate and
on the same classes, by the hinge loss. 120 epochs, the rate divided by 10 after 100 of them and its start tuned over
{0.0001, 0.001, 0.01, 0.1, 1}. No optimiser has momentum, as the paper says. The authors' script gives Adam β₁ = 0.9 for
the discriminator, and that is a contender of its own.
"""

from dataclasses import replace

from nero_lab.data.augmentation import flip
from nero_lab.loops.adversarial import Adversarial
from nero_lab.models.biggan import GANPair
from nero_lab.protocol import Contender, Seconds, Task, drop

task = Task(
    name="cgan",
    shows="Table 1, Figure 4",
    title="Nero trains a GAN that makes better images than the others' do",
    dataset="cifar10",
    model=GANPair,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=0.01),
        "adam": Contender("adam", best=0.0001),
        "lamb": Contender("lamb", best=0.01),
        "adam-momentum": Contender("adam", best=0.0001, options={"discriminator": {"beta1": 0.9}}),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    epochs=120,
    batch=256,
    schedule=drop(0.1, at=(100,)),
    metric="test_distance",
    augment=flip,
    loop=Adversarial,
    seconds=Seconds(1302, 513, None),
    side_by_side=2,
    is_compiled=True,
)

#: The paper's search over momentum, {0, 0.9}: the other half of it, for both networks, at each optimiser's rate without
#: momentum. Momentum makes steps of SGD ten times longer, so it also has a tenth of its rate.
with_momentum = replace(
    task,
    name="cgan-momentum",
    study="claims",
    shows="",
    title="Is a GAN better without momentum?",
    contenders={
        "sgd-momentum": Contender("sgd", best=0.001, options={"momentum": 0.9}, grid=(0.001, 0.01)),
        "adam-momentum": Contender("adam", best=0.0001, options={"beta1": 0.9}, grid=(0.0001,)),
        "lamb-momentum": Contender("lamb", best=0.01, options={"beta1": 0.9}, grid=(0.01,)),
    },
)
