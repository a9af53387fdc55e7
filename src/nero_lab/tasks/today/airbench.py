"""The speed-run to 94 % on CIFAR-10 (Jordan 2024, arXiv:2404.00498): 8 epochs of batches of 2000.

Muon with SGD, and SGD alone, have the published settings; SGD is fitted to 8 epochs of batches of 2000, from 9.9 of
1024. Nero trains filters and head, SGD beside it the biases, as beside Muon. A head of unit rows needs no factor.
``nero sweep airbench --no-grid`` repeats every contender; a record has ``tta_accuracy`` and
``train_seconds`` (:class:`nero_lab.loops.speedrun.SpeedRun`).
"""

from functools import partial

from nero_lab.loops.speedrun import SpeedRun, multi_crop_accuracy
from nero_lab.models.airbench import Airbench
from nero_lab.protocol import Contender, Seconds, Task, linear_decay

EPOCHS = 8
#: The head beside Muon starts with unit variance, and its outputs are divided by the number of features.
BESIDE_MUON = partial(Airbench, output_scale=1 / 256, head_std=1.0)
#: Rows of the head have norm one.
BALANCED = partial(Airbench, output_scale=1.0)
#: The momentum of Muon here, and a running average over twenty of the 200 steps.
MOMENTUM = {"momentum": 0.6, "nesterov": True, "beta": 0.95}
NERO_GRID = (0.025, 0.05, 0.1, 0.2)

task = Task(
    name="airbench",
    study="today",
    shows="",
    title="The speed-run to 94 % on CIFAR-10",
    dataset="cifar10",
    model=Airbench,
    contenders={
        "nero": Contender("nero", 0.1, {}, BALANCED, NERO_GRID),
        "nero-momentum": Contender("nero", 0.05, MOMENTUM, BALANCED, NERO_GRID),
        "muon": Contender("filter-muon", 0.24, {}, BESIDE_MUON),
        "muon-balanced": Contender("filter-muon", 0.24, {"balanced": True}, BESIDE_MUON),
        "sgd": Contender("sgd", 11.5),
    },
    grid=(),
    epochs=EPOCHS,
    batch=2000,
    schedule=linear_decay(EPOCHS),
    metric="test_accuracy",
    smoothing=0.2,
    is_loss_summed=True,
    precision="bf16",
    is_compiled=True,
    side_by_side=1,
    seeds=50,
    verdict=multi_crop_accuracy,
    loop=SpeedRun,
    seconds=Seconds(bf16=22),
)
