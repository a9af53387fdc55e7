"""Train a deep perceptron, without batch norm or skip connections, in JAX by Nero and by Adam.

This is the deep-MLP experiment of the paper, on scikit-learn's digits. The network is flax's, the optimisers are
transformations of optax, each at several learning rates. Weights and biases start as in the paper, by PyTorch's
default, in which signals fade from layer to layer; balanced neurons undo that. With flax's own start, which has no such
fading, Adam does as well as Nero or better.
"""

import argparse
import math
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nero.jax

WIDTH = 64  # the number of pixels, so that layers are square as in the paper
BATCH = 144
DECAY = 0.9  # of the learning rate, in each epoch
RATES = {"Nero": (0.002, 0.01), "Adam": (1e-4, 1e-3, 1e-2)}


class Perceptron(nn.Module):
    """A perceptron with the activation √2·max(0, x)."""

    depth: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(self.depth - 1):
            x = jnp.sqrt(2) * nn.relu(nn.Dense(WIDTH, kernel_init=pytorch_start, bias_init=pytorch_start)(x))
        return nn.Dense(10, kernel_init=pytorch_start, bias_init=pytorch_start)(x)


def pytorch_start(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Return the first weights or biases of a layer by PyTorch's default."""
    return jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(WIDTH)


def load() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the pixels and labels of training digits, and of one in five as test digits."""
    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=0.2, random_state=0, stratify=labels
    )
    train, test = ((part - train.mean()) / train.std() for part in (train, test))
    as_arrays = [jnp.asarray(part) for part in (train, train_labels, test, test_labels)]
    return (as_arrays[0], as_arrays[1]), (as_arrays[2], as_arrays[3])


def train(network: Perceptron, params: Any, optimiser: Any, data: tuple[Array, Array], epochs: int) -> Any:
    """Return the parameters after some epochs."""
    pixels, labels = data
    count = len(labels) // BATCH

    def loss(params: Any, batch: Array) -> Array:
        scores = network.apply(params, pixels[batch])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels[batch]))

    def step(carry: Any, batch: Array) -> tuple[Any, Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimiser.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def epoch(carry: Any, key: Array) -> tuple[Any, Array]:
        return jax.lax.scan(
            step, carry, jax.random.permutation(key, len(labels))[: count * BATCH].reshape(count, BATCH)
        )

    carry = params, optimiser.init(params)
    for key in jax.random.split(jax.random.key(1), epochs):
        carry, _ = epoch(carry, key)
    return carry[0]


def main(argv: list[str] | None = None) -> int:
    """Train by both optimisers and print their accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depth", type=int, default=20, help="number of layers (default: 20)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of training (default: 30)")
    options = parser.parse_args(argv)
    network, (data, test) = Perceptron(options.depth), load()
    start = jax.jit(network.init)(jax.random.key(0), data[0][:1])

    def rate(first: float) -> optax.Schedule:
        return optax.exponential_decay(first, len(data[1]) // BATCH, DECAY, staircase=True)

    # init of a transformation cannot change the parameters, so balance them first
    starts = {"Nero": nero.jax.balance(start), "Adam": start}
    optimisers = {"Nero": nero.jax.nero, "Adam": optax.adam}
    print(f"{options.depth} layers, {WIDTH} wide; {len(data[1]):,} digits; {options.epochs} epochs")
    for name, first in ((name, first) for name, rates in RATES.items() for first in rates):
        params = train(network, starts[name], optimisers[name](rate(first)), data, options.epochs)
        scores = [jnp.asarray(network.apply(params, pixels)) for pixels, _ in (data, test)]
        right = [jnp.mean(each.argmax(1) == labels) for each, (_, labels) in zip(scores, (data, test), strict=True)]
        print(f"{name} at {first:<6g} training accuracy {right[0]:.1%}, test accuracy {right[1]:.1%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
