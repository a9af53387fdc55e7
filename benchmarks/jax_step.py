"""The time of a compiled update of nero.jax on the shapes of GPT-2 in flax, beside optax's Adam and SGD, in turn.

An update is that of the transformation and ``optax.apply_updates``, with donated buffers. Writes
benchmarks/results/jax-gpu.json or jax-cpu.json.
"""

import os
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from records import command_line, out_folder, write_record

import nero.jax

OPTIMISERS = {
    "Adam (optax)": optax.adam(1e-3),
    "SGD (optax)": optax.sgd(1e-3),
    "SGD with momentum (optax)": optax.sgd(1e-3, momentum=0.9),
    "Nero": nero.jax.nero(),
    "Nero with momentum": nero.jax.nero(momentum=0.9),
}
BURST_S = 0.05


class Contender:
    """An optimiser with its own parameters, state and compiled step."""

    def __init__(self, optimiser: Any, params: Any, grads: Any) -> None:
        self.params, self.grads = jax.tree.map(jnp.copy, params), grads
        self.state = jax.jit(optimiser.init)(self.params)
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = optimiser.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, grads).compile()
        self.count = max(1, min(200, int(BURST_S / self.burst(2))))

    def burst(self, count: int) -> float:
        """Return the seconds per step of a burst of steps."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            self.params, self.state = self.step(self.params, self.state, self.grads)
        self.wait()
        return (time.perf_counter() - start) / count

    def wait(self) -> None:
        """Wait until all steps are done."""
        jax.block_until_ready((self.params, self.state))  # type: ignore[no-untyped-call]


def gpt2(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    """Return the shapes of GPT-2's parameters, by flax's names."""

    def norm() -> dict[str, tuple[int, ...]]:
        return {"scale": (width,), "bias": (width,)}

    def dense(inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (inputs, outputs), "bias": (outputs,)}

    block = {
        "norm_1": norm(),
        "packed": dense(width, 3 * width),
        "project": dense(width, width),
        "norm_2": norm(),
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }
    tables = {"tokens": {"embedding": (vocabulary, width)}, "positions": {"embedding": (1024, width)}}
    return {**tables, **{f"block_{index}": block for index in range(layers)}, "norm": norm()}


def draw(shapes: Any, seed: int) -> Any:
    """Return random parameters."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        structure, [jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    )


def measure(shapes: Any, name: str, rounds: int) -> list[dict[str, Any]]:
    """Time every optimiser, in turn."""
    params, grads = jax.jit(nero.jax.balance)(draw(shapes, 0)), draw(shapes, 1)
    contenders = {each: Contender(optimiser, params, grads) for each, optimiser in OPTIMISERS.items()}
    times: dict[str, list[float]] = {each: [] for each in contenders}
    for _ in range(rounds):
        for each, contender in contenders.items():
            times[each].append(contender.burst(contender.count))
    middle = {each: statistics.median(seconds) for each, seconds in times.items()}
    return [
        {
            "shapes": name,
            "optimiser": each,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "milliseconds": round(1e3 * middle[each], 4),
            "of_adam": round(middle[each] / middle["Adam (optax)"], 3),
            "state_bytes": contender.state_bytes,
            "rounds": rounds,
        }
        for each, contender in contenders.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line."""
    arguments = command_line(__doc__, has_device=False).parse_args(argv)
    shapes, name = (gpt2(1, 32, 64), "GPT-2 tiny") if arguments.quick else (gpt2(12, 768, 50257), "GPT-2 small")
    rows = measure(shapes, name, 3 if arguments.quick else 20)
    device = jax.devices()[0]
    machine = device.device_kind if device.platform != "cpu" else f"{platform.machine()}, {os.cpu_count()} cores"
    record = {"machine": machine, "jax": jax.__version__, "optax": optax.__version__, "quick": arguments.quick}
    for row in rows:
        print(f"{row['optimiser']:<26}{row['milliseconds']:>10.3f} ms{row['of_adam']:>8.2f} x Adam")
    path = out_folder(arguments) / f"jax-{device.platform}.json"
    write_record(path, {**record, "step": rows})
    print(f"written to {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
