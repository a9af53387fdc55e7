"""Studies that measure networks: overflow, cost, activations by layer, and robustness to rotations."""

import itertools
import math
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

import nero
import nero.theory
from nero_lab import baselines
from nero_lab.claims import PIXELS, Digits, Split, evaluate, linear_layers, train, weight_norm
from nero_lab.claims.studies import EXAMPLES, SEEDS, WIDTH, Settings, Study, product
from nero_lab.models.mlp import mlp


class PrintedForm(nn.Module):
    """Eq. (cwn) in the operations in which the paper prints it."""

    def forward(self, raw: Tensor) -> Tensor:
        centred = raw - raw.mean(1, keepdim=True)
        norms: Tensor = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        return centred / norms


def balance_by(way: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make an optimiser that holds a perceptron to balanced neurons in one of several ways.

    Args:
        way: "plain" (Adam, no constraint), "printed" (Adam on weights reparameterised by :class:`PrintedForm`), "safe"
            (Adam, :func:`nero.centred_weight_norm`), "projected" (Adam, :func:`nero.balance_after_step`) or "nero".
        model: the perceptron, changed in place.
        lr: the rate.
    """
    for layer in linear_layers(model):
        if way == "printed":
            parametrize.register_parametrization(layer, "weight", PrintedForm())
        elif way == "safe":
            nero.centred_weight_norm(layer)
    if way == "nero":
        return baselines.make("nero", model, lr)
    optimiser = baselines.make("adam", model, lr, beta1=0.9)
    if way == "projected":
        nero.balance_after_step(optimiser, model)
    return optimiser


# Section 5.3: "the unnecessary scale freedom ... numerical overflow"

POWERS = {"float32": range(-44, 39, 2), "bfloat16": range(-40, 39, 2), "float16": range(-7, 5)}
OVERFLOW_STEPS = 10


def run_overflow(data: Digits, settings: Settings) -> dict[str, Any]:
    """Find the powers of ten at which N(0, σ²) weights are balanced, and in float32 also the loss after 10 steps."""
    dtype = getattr(torch, settings["dtype"])
    is_balanced: list[bool | None] = []
    losses: list[float | None] = []
    for power in POWERS[settings["dtype"]]:
        torch.manual_seed(settings["seed"])
        model = mlp(3, WIDTH, inputs=PIXELS, bias=False)
        for layer in linear_layers(model):  # in float64, where the factor cannot overflow
            weight = torch.randn(layer.weight.shape, dtype=torch.float64) * 10.0**power
            layer.weight = nn.Parameter(weight.to(dtype))
        if all(bool(layer.weight.isfinite().all()) for layer in linear_layers(model)):
            optimiser = balance_by(settings["way"], model, 0.01)
            is_balanced.append(all(_has_unit_norms(layer) for layer in linear_layers(model)))
            losses.append(_learn(model, optimiser, data.train) if dtype is torch.float32 else None)
        else:
            is_balanced.append(None)  # the weights themselves overflow
            losses.append(None)
    return {"powers": list(POWERS[settings["dtype"]]), "is_balanced": is_balanced, "loss": losses}


@torch.no_grad()
def _has_unit_norms(layer: nn.Linear) -> bool:
    return bool(((layer.weight.double().norm(dim=1) - 1).abs() < 0.01).all())


def _learn(model: nn.Module, optimiser: torch.optim.Optimizer, data: Split) -> float | None:
    """Return the loss after some steps, or None if it is not finite."""
    for rows in torch.split(torch.arange(100 * (OVERFLOW_STEPS + 1)), 100):
        loss = cross_entropy(model(data.inputs[rows]), data.labels[rows])
        if rows[0] < 100 * OVERFLOW_STEPS:
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return loss.item() if math.isfinite(loss.item()) else None


# Section 4: projection "is lighter-weight" than reparameterisation

WAYS = ("plain", "printed", "safe", "projected", "nero")
ROUNDS = 15


def run_cost(data: Digits, settings: Settings) -> dict[str, Any]:
    """Time training steps of the network of Figure 3, left, in turn: CPU time of one thread, and memory held."""
    inputs, labels = (part.clone() for part in data.train.first(settings["batch"]))  # not views of all images
    steps, held = {}, {}
    for way in WAYS:
        torch.manual_seed(0)
        model = mlp(5, bias=False)
        optimiser = balance_by(way, model, 0.001)
        steps[way] = partial(_step, model, optimiser, inputs, labels)
        for _ in range(2):
            steps[way]()
        held[way] = _bytes_held(model, optimiser, inputs)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, step in steps.items():
            start = time.process_time()
            step()
            times[way].append(time.process_time() - start)
    ratios = {
        way: statistics.median(taken / plain for taken, plain in zip(times[way], times["plain"], strict=True))
        for way in WAYS
    }
    return {
        "milliseconds": {way: 1000 * statistics.median(times[way]) for way in WAYS},
        "ratio": ratios,
        "megabytes": {way: round(held[way] / 1e6, 2) for way in WAYS},
    }


def _step(model: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimiser.zero_grad()
    cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def _bytes_held(model: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor) -> int:
    """Count weights, gradients, optimiser state, and what the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = [*model.parameters(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]
    own += [each for state in optimiser.state.values() for each in state.values() if isinstance(each, Tensor)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(inputs)  # alive until the count is made, so that no address is used twice
        for tensor in (*own, inputs, outputs):
            keep(tensor)
    return sum(kept.values())


# Section 3.1: balanced neurons "encourage the standardisation of activation statistics"

ACTIVATION_RATES = {"nero": 0.003, "adam": 0.001, "adam-balanced": 0.001, "kaiming": 0.001}


def activation_settings() -> list[Settings]:
    """Return perceptrons of 20 layers to train, and of 5 and 100 layers to measure at the start."""
    trained = product(seed=SEEDS, depth=[20], optimiser=ACTIVATION_RATES, epochs=[2])
    return trained + product(seed=SEEDS[:1], depth=[5, 100], optimiser=["nero", "adam", "kaiming"], epochs=[0])


def run_activations(data: Digits, settings: Settings) -> dict[str, Any]:
    """Measure pre-activations by layer at the start and after training.

    "nero" and "adam-balanced" start balanced, "adam" from torch's weights, "kaiming" (trained by Adam) from N(0, 1/d).
    """
    torch.manual_seed(settings["seed"])
    model, name = mlp(settings["depth"], WIDTH, inputs=PIXELS, bias=False), settings["optimiser"]
    if name == "kaiming":
        for layer in linear_layers(model):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    lr = ACTIVATION_RATES[name]
    optimiser = baselines.make("nero" if name == "nero" else "adam", model, lr)
    if name == "adam-balanced":
        nero.balance_after_step(optimiser, model)
    results: dict[str, Any] = {"start": _by_layer(model, data.test)}
    if settings["epochs"]:
        images = data.train.first(EXAMPLES)
        train(model, optimiser, images, lr=lr, batch=100, epochs=settings["epochs"], seed=settings["seed"])
        results |= {"end": _by_layer(model, data.test), "test_error": evaluate(model, data.test)[1]}
    return results


def _by_layer(model: nn.Module, data: Split) -> dict[str, list[float]]:
    """Return, by layer, the mean and the largest variance of neurons, and the RMS of their means."""
    layers = nero.theory.preactivations(model, data.inputs[:1000]).layers
    return {
        "variance": [layer.variance for layer in layers],
        "means": [layer.spread for layer in layers],
        "largest": [float(layer.variances.max()) for layer in layers],
    }


# Sections 6.1 and 6.2: robustness to rotations, and generalisation

ROBUST_EXAMPLES, ROBUST_WIDTH, ROBUST_EPOCHS = 1000, 64, 80
ROBUST_RATES = {
    "nero": (0.01, 0.03),
    "adam": (0.001, 0.003),
    "sgd": (0.1, 0.3),
    "adam-balanced": (0.001, 0.003),
}


def robustness_settings() -> list[Settings]:
    """Return every optimiser at two rates, three seeds each."""
    found = []
    for optimiser, rates in ROBUST_RATES.items():
        found += product(seed=SEEDS, optimiser=[optimiser], lr=rates)
    return sorted(found, key=lambda settings: settings["seed"])


def run_robustness(data: Digits, settings: Settings) -> dict[str, Any]:
    """Train a perceptron to zero training error on 1,000 images, and bound its α, its measure and its error.

    Neurons turn in all directions, whatever the optimiser, so that angles compare. The sphere of a neuron of fan-in d
    then has dimension d - 1.
    """
    torch.manual_seed(settings["seed"])
    sizes = (PIXELS, ROBUST_WIDTH, ROBUST_WIDTH, 10)
    layers: list[nn.Module] = []
    for fan_in, neurons in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, neurons, bias=False), nn.ReLU()]
    model, images = nn.Sequential(*layers[:-1]), data.train.first(ROBUST_EXAMPLES)
    name, _, balanced = settings["optimiser"].partition("-")
    optimiser = baselines.make(name, model, settings["lr"])
    if balanced:
        nero.balance_after_step(optimiser, model)
    norms = [weight_norm(model.parameters())]
    train(
        model, optimiser, images, lr=settings["lr"], batch=50, epochs=ROBUST_EPOCHS, seed=settings["seed"],
        after_epoch=lambda epoch: norms.append(weight_norm(model.parameters())) if epoch % 10 == 0 else None,
    )  # fmt: skip
    results: dict[str, Any] = {"weight_norms": norms}
    for part, split in (("train", images), ("test", data.test)):
        results[f"{part}_loss"], results[f"{part}_error"] = evaluate(model, split)
    if results["train_error"]:
        return results  # α is undefined
    found = nero.theory.robustness(model, images, fix_mean=False, rotations=60, examples=8)
    assert found.lower is not None  # a plain perceptron has a proof
    spheres = [(neurons, fan_in + 1) for fan_in, neurons in itertools.pairwise(sizes)]
    bounds = {
        "proved": nero.theory.generalisation_bound(spheres, found.lower, ROBUST_EXAMPLES),
        "random": nero.theory.generalisation_bound(
            spheres, found.typical, ROBUST_EXAMPLES, log_solutions=math.log(found.share)
        ),
    }
    return {
        **results,
        "alpha_lower": found.lower,
        "alpha_upper": found.upper,
        "alpha_random": found.typical,
        "share": found.share,
        **{f"bound_{name}": bound.exact.bound for name, bound in bounds.items()},
    }


STUDIES = {
    "overflow": Study(
        "at which scales of the raw weights does reparameterisation overflow?",
        partial(product, seed=SEEDS[:1], dtype=POWERS, way=["printed", "safe", "nero"]),
        run_overflow,
    ),
    "cost": Study("is projection lighter than reparameterisation?", partial(product, batch=[32, 250]), run_cost),
    "activations": Study("does balance standardise activations?", activation_settings, run_activations),
    "robustness": Study(
        "how robust to rotations are solutions, and do robust ones generalise?", robustness_settings, run_robustness
    ),
}
