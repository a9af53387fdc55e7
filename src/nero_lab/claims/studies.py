"""Studies that train perceptrons: the scale of weights, batch sizes, gains, and flattened weights."""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import nero
from nero_lab import baselines
from nero_lab.claims import PIXELS, Digits, Split, evaluate, linear_layers, measure_test, train
from nero_lab.models.mlp import mlp
from nero_lab.protocol import constant

Settings = dict[str, Any]
SEEDS = (0, 1, 2)
WIDTH, EXAMPLES = 128, 20_000


class Study(NamedTuple):
    """A study: what it asks, its runs, and how one is made."""

    asks: str
    settings: Callable[[], list[Settings]]
    run: Callable[[Digits, Settings], dict[str, Any]]


def product(**values: Iterable[Any]) -> list[Settings]:
    """Return all combinations of values, by name."""
    return [dict(zip(values, found, strict=True)) for found in itertools.product(*values.values())]


def perceptron(depth: int = 3) -> nn.Sequential:
    """Return a perceptron of 128 units a layer with torch's initial weights."""
    return mlp(depth, WIDTH, inputs=PIXELS)


# Section 5.3: "Nero completely eliminates this issue"

RAW_SCALES = (1.0, 100.0)


def run_raw_scale(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train the network of Figure 3, left, by Nero from N(0, σ²): 5 epochs in batches of 250 at a constant 0.01.

    The setting ``longest_step``, if there is one, is that option of Nero.
    """
    torch.manual_seed(settings["seed"])
    model = mlp(5, bias=False)
    for layer in linear_layers(model):
        nn.init.normal_(layer.weight, std=settings["sigma"])
    optimiser = baselines.make("nero", model, 0.01, longest_step=settings.get("longest_step", math.inf))
    errors: list[float] = []

    def test(_epoch: int) -> None:
        errors.append(evaluate(model, data.test)[1])

    accuracy = train(
        model, optimiser, data.train, lr=0.01, batch=250, epochs=5, seed=settings["seed"], schedule=constant,
        after_epoch=test,
    )  # fmt: skip
    return {"train_accuracy": accuracy, "test_error": errors}


# Section 4: "the need for initialisation tuning ... is removed"

#: The rates of each optimiser, the usual one first.
RATES = {"nero": (0.01, 0.001, 0.1), "adam": (0.001, 0.0001, 0.01), "sgd": (0.1, 0.01, 1.0)}
FACTORS = tuple(10.0**power for power in range(-3, 4))


def initial_scale_settings() -> list[Settings]:
    """Return every factor: three seeds at the usual rate, and one at the others."""
    found = []
    for optimiser, (usual, *others) in RATES.items():
        found += product(seed=SEEDS, optimiser=[optimiser], lr=[usual], factor=FACTORS)
        found += product(seed=SEEDS[:1], optimiser=[optimiser], lr=others, factor=FACTORS)
    return sorted(found, key=lambda settings: settings["seed"])


def run_initial_scale(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train one epoch of 20,000 images from torch's initial weights times a factor; biases start as torch's."""
    torch.manual_seed(settings["seed"])
    model = perceptron()
    with torch.no_grad():
        for layer in linear_layers(model):
            layer.weight.mul_(settings["factor"])
    optimiser = baselines.make(settings["optimiser"], model, settings["lr"])
    images = data.train.first(EXAMPLES)
    accuracy = train(model, optimiser, images, lr=settings["lr"], batch=100, epochs=1, seed=settings["seed"])
    return {"train_accuracy": accuracy, **measure_test(model, data)}


# Section 5.4: "Nero could reliably train a 100-layer MLP"; is that the start or the steps?

START_RATES = {"nero": (0.003, 0.01, 0.03), "adam": (0.0003, 0.001, 0.003)}
START_DEPTH = 50


def start_settings() -> list[Settings]:
    """Return three seeds of every rate; Adam from torch's weights and from balanced ones, as Nero's are."""
    found = product(seed=SEEDS, optimiser=["nero"], is_balanced=[True], lr=START_RATES["nero"])
    found += product(seed=SEEDS, optimiser=["adam"], is_balanced=[False, True], lr=START_RATES["adam"])
    return sorted(found, key=lambda settings: settings["seed"])


def run_start(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train 50 layers of 128 units for five epochs of 20,000 images; Adam with β₁ = 0.9, as in mnist-deep."""
    torch.manual_seed(settings["seed"])
    model, optimiser = perceptron(START_DEPTH), settings["optimiser"]
    if settings["is_balanced"]:
        nero.balance_(model)
    made = baselines.make(optimiser, model, settings["lr"], **({"beta1": 0.9} if optimiser == "adam" else {}))
    images = data.train.first(EXAMPLES)
    accuracy = train(model, made, images, lr=settings["lr"], batch=250, epochs=5, seed=settings["seed"])
    return {"train_accuracy": accuracy, **measure_test(model, data)}


# Section 4: "stability across batch sizes"

#: The rates of Table 1 for VGG-11.
USUAL_RATES = {"nero": 0.01, "lamb": 0.01, "adam": 0.001, "sgd": 0.1}
BATCHES, BATCHED_EXAMPLES = (32, 128, 512, 2048), 30_000


def batch_size_settings() -> list[Settings]:
    """Return three seeds at the usual rate, and one at a tenth and ten times of it."""
    found = []
    for optimiser, usual in USUAL_RATES.items():
        for factor, seeds in ((1.0, SEEDS), (0.1, SEEDS[:1]), (10.0, SEEDS[:1])):
            found += product(seed=seeds, optimiser=[optimiser], lr=[round(usual * factor, 6)], batch=BATCHES)
    return sorted(found, key=lambda settings: settings["seed"])


def run_batch_size(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train two epochs of 30,000 images in batches of one size."""
    torch.manual_seed(settings["seed"])
    model = perceptron()
    optimiser = baselines.make(settings["optimiser"], model, settings["lr"])
    images = data.train.first(BATCHED_EXAMPLES)
    accuracy = train(
        model, optimiser, images, lr=settings["lr"], batch=settings["batch"], epochs=2, seed=settings["seed"]
    )
    return {"train_accuracy": accuracy, **measure_test(model, data)}


# Section 6.3: pulling gains to one "is easier to tune than weight decay"

STRENGTHS = (0.0, *(10.0**power for power in range(-5, 2)))
#: The optimisers of the study of gains: a name, its rate, and the option that is swept.
REGULARISED = {
    "nero": (0.02, "gain_penalty", {"scale": 1.0}),
    "sgd": (0.1, "weight_decay", {"momentum": 0.9}),
    "adamw": (0.001, "weight_decay", {}),
}
NOISY_EXAMPLES, NOISE = 1000, 0.2


def run_gains(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train a batch-normalised perceptron on 1,000 images, one label in five at random."""
    torch.manual_seed(settings["seed"])
    inputs, labels = data.train.first(NOISY_EXAMPLES)
    is_wrong = torch.rand(len(labels)) < NOISE
    noisy = Split(inputs, torch.where(is_wrong, torch.randint(10, labels.shape), labels))
    layers: list[nn.Module] = []
    for fan_in in (PIXELS, WIDTH):
        layers += [nn.Linear(fan_in, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    lr, option, others = REGULARISED[settings["optimiser"]]
    optimiser = baselines.make(settings["optimiser"], model, lr, **{option: settings["strength"]}, **others)
    accuracy = train(model, optimiser, noisy, lr=lr, batch=100, epochs=30, seed=settings["seed"])
    gains = torch.cat([module.weight for module in model if isinstance(module, nn.BatchNorm1d)]).detach()
    return {
        "train_accuracy": accuracy[-1],
        **measure_test(model, data),
        "gains": [float(gains.min()), float(gains.max())],
    }


# Section 6.3: techniques on a flattened vector "may be improved by accounting for the neural architecture"

CLIPS = (0.1, 1.0, 10.0)
CLIPPED_RATES = (0.1, 0.3, 1.0)


def clip_settings() -> list[Settings]:
    """Return every rate without a clip, and with each kind of clip at each norm."""
    free = product(seed=SEEDS, kind=["none"], clip=[0.0], lr=CLIPPED_RATES)
    return free + product(seed=SEEDS, kind=["flattened", "neurons"], clip=CLIPS, lr=CLIPPED_RATES)


@torch.no_grad()
def clip_neurons(model: nn.Module, clip: float) -> None:
    """Clip the gradient of each neuron, with its bias, to its share of a norm: clip / √(number of neurons).

    If all neurons reach their share, the gradient as one vector has the norm ``clip``.
    """
    layers = linear_layers(model)
    most = clip / sum(layer.out_features for layer in layers) ** 0.5
    for layer in layers:
        grad, bias = layer.weight.grad, layer.bias.grad
        if grad is not None and bias is not None:
            norms = (grad.square().sum(1) + bias.square()).sqrt()
            factor = (most / norms.clamp_min(1e-30)).clamp_max(1)
            grad.mul_(factor[:, None])
            bias.mul_(factor)


def run_clip(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train one epoch of 20,000 images by SGD with momentum 0.9 and clipped gradients."""
    torch.manual_seed(settings["seed"])
    model, clip = perceptron(5), settings["clip"]
    optimiser = baselines.make(
        "sgd", model, settings["lr"], momentum=0.9, clip=clip if settings["kind"] == "flattened" else None
    )
    if settings["kind"] == "neurons":
        optimiser.register_step_pre_hook(lambda *_: clip_neurons(model, clip))
    train(model, optimiser, data.train.first(EXAMPLES), lr=settings["lr"], batch=100, epochs=1, seed=settings["seed"])
    return measure_test(model, data)


AVERAGED = {"nero": 0.01, "adam": 0.001, "sgd": 0.1}


def run_average(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train two epochs of 20,000 images at a constant rate, and average the weights of the second epoch in two ways.

    Flattened: the mean of the weights. By neuron: the same direction for each neuron, at its mean norm.
    """
    torch.manual_seed(settings["seed"])
    model, lr = perceptron(), AVERAGED[settings["optimiser"]]
    optimiser = baselines.make(settings["optimiser"], model, lr)
    weights = list(model.parameters())
    sums = [torch.zeros_like(weight) for weight in weights]
    norms = [torch.zeros_like(_norms(weight)) for weight in weights]
    images, count = data.train.first(EXAMPLES), 0
    half = len(images.labels) // 100

    @torch.no_grad()
    def collect(step: int) -> None:
        nonlocal count
        if step > half:
            count += 1
            for weight, total, size in zip(weights, sums, norms, strict=True):
                total += weight
                size += _norms(weight)

    train(
        model, optimiser, images, lr=lr, batch=100, epochs=2, seed=settings["seed"], schedule=constant,
        after_step=collect,
    )  # fmt: skip
    found = {"last": evaluate(model, data.test)}
    with torch.no_grad():
        for weight, total in zip(weights, sums, strict=True):
            weight.copy_(total / count)
        found["flattened"] = evaluate(model, data.test)
        shrink = [float((_norms(weight) * count / size).mean()) for weight, size in zip(weights, norms, strict=True)]
        for weight, size in zip(weights, norms, strict=True):
            if weight.dim() > 1:
                weight.mul_(size / count / _norms(weight))
        found["neurons"] = evaluate(model, data.test)
    results = {f"{way}_error": error for way, (_, error) in found.items()}
    results |= {f"{way}_loss": loss for way, (loss, _) in found.items()}
    return {**results, "norm_of_average": sum(shrink[::2]) / len(shrink[::2])}  # of the matrices


def _norms(weight: Tensor) -> Tensor:
    """Return the norm of each neuron of a matrix; of a bias, its elements' sizes."""
    return weight.detach().abs() if weight.dim() == 1 else weight.detach().norm(dim=1, keepdim=True)


STUDIES = {
    "raw-scale": Study(
        "does Nero depend on the scale of the initial weights in the network of Figure 3, left?",
        partial(product, seed=SEEDS, sigma=RAW_SCALES),
        run_raw_scale,
    ),
    "raw-scale-bounded": Study(
        "and with no step longer than three times the angle?",
        partial(product, seed=SEEDS[:2], sigma=RAW_SCALES, longest_step=[3.0]),
        run_raw_scale,
    ),
    "initial-scale": Study("is there an initial scale to tune?", initial_scale_settings, run_initial_scale),
    "start": Study("is it the start or the steps that train 50 layers?", start_settings, run_start),
    "batch-size": Study("does one rate do for all batch sizes?", batch_size_settings, run_batch_size),
    "gains": Study(
        "is pulling gains to one easier to tune than weight decay?",
        partial(product, seed=SEEDS, optimiser=REGULARISED, strength=STRENGTHS),
        run_gains,
    ),
    "clip": Study("is clipping by neuron better than clipping the flattened gradient?", clip_settings, run_clip),
    "average": Study(
        "is averaging by neuron better than averaging flattened weights?",
        partial(product, seed=SEEDS, optimiser=AVERAGED),
        run_average,
    ),
}
