"""nero.jax under jit, vmap, scan and the wrappers of optax, and on sharded parameters."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import jax_step
import numpy as np
import optax

import nero.jax

STEPS = 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = nero.jax.balance(
    {"Dense_0": {"kernel": normal(0, 6, 4), "bias": jnp.zeros(4)}, "LayerNorm_0": {"scale": jnp.ones(4)}}
)
GRADS = [
    {
        "Dense_0": {"kernel": normal(3 * i, 6, 4), "bias": normal(3 * i + 1, 4)},
        "LayerNorm_0": {"scale": normal(3 * i + 2, 4)},
    }
    for i in range(1, STEPS + 1)
]


def trained(optimiser: Any, grads: Any = None, params: Any = None, update: Any = None) -> tuple[Any, Any]:
    """Return the parameters and the state after a step for each gradient."""
    params = PARAMS if params is None else params
    state, update = optimiser.init(params), jax.jit(optimiser.update) if update is None else update
    for grad in GRADS if grads is None else grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture(scope="module")
def plain() -> Any:
    """The parameters after the steps of nero.jax.nero() with its defaults."""
    return trained(nero.jax.nero())[0]


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance), found, wanted
    )


def test_steps_leave_neurons_balanced(plain: Any):
    assert nero.jax.is_balanced(plain)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "fix_norm": "initial", "learning_rate": optax.constant_schedule(0.01)}]
)
def test_update_compiles_once(options: dict[str, Any]):
    optimiser = nero.jax.nero(**options)
    update = jax.jit(optimiser.update)
    trained(optimiser, update=update)
    assert update._cache_size() == 1


def test_schedule_gives_the_rate_of_each_step():
    found, _ = trained(nero.jax.nero(optax.piecewise_constant_schedule(0.01, {2: 0.0})), GRADS)
    assert_close(found, trained(nero.jax.nero(), GRADS[:2])[0])


def test_parts_in_a_chain_are_nero(plain: Any):
    parts = optax.chain(nero.jax.scale_by_nero(), optax.scale_by_learning_rate(0.01), nero.jax.keep_balanced())
    assert_close(trained(parts)[0], plain)


def test_keep_balanced_holds_neurons_under_adam():
    found, _ = trained(optax.chain(optax.adam(0.1), nero.jax.keep_balanced()))
    free, _ = trained(optax.adam(0.1))
    assert nero.jax.is_balanced(found)
    assert not nero.jax.is_balanced(free)
    assert_close(found["Dense_0"]["bias"], free["Dense_0"]["bias"])


def test_injected_hyperparameters_step_alike_and_can_change(plain: Any):
    optimiser = optax.inject_hyperparams(nero.jax.nero)(learning_rate=0.01)
    found, state = trained(optimiser)
    assert_close(found, plain, 1e-5)
    assert state.inner_state[0].momentum_buffer is None
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, _ = jax.jit(optimiser.update)(GRADS[0], state, found)
    assert not any(np.any(update) for update in jax.tree.leaves(updates))


def test_injected_momentum_agrees_with_a_constant_one():
    options = {"momentum": 0.9, "longest_step": 3.0, "gain_penalty": 0.1, "scale": 0.5}
    found, _ = trained(optax.inject_hyperparams(nero.jax.nero)(**options))
    assert_close(found, trained(nero.jax.nero(**options))[0], 1e-5)


def test_state_without_momentum_raises_until_it_is_added():
    _, state = trained(nero.jax.nero(), GRADS[:1])
    optimiser = nero.jax.nero(momentum=0.9)
    with pytest.raises(ValueError, match=r"optax\.tree\.set.*momentum=None"):
        optimiser.update(GRADS[0], state, PARAMS)
    state = optax.tree.set(state, momentum_buffer=jax.tree.map(jnp.zeros_like, PARAMS))
    _, state = optimiser.update(GRADS[0], state, PARAMS)
    assert np.any(state[0].momentum_buffer["Dense_0"]["kernel"])


def test_injected_beta_in_half_precision_raises():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(TypeError, match="hyperparam_dtype"):
        optax.inject_hyperparams(nero.jax.nero)().init(params)
    optax.inject_hyperparams(nero.jax.nero, hyperparam_dtype=jnp.float32)().init(params)


@pytest.mark.parametrize("roles", [None, nero.jax.roles_of(PARAMS)], ids=["by name", "given"])
def test_masked_leaves_the_rest_to_others(roles: Any, plain: Any):
    mask = {"Dense_0": True, "LayerNorm_0": False}
    optimiser = optax.chain(
        optax.masked(nero.jax.nero(roles=roles), mask),
        optax.masked(optax.set_to_zero(), {"Dense_0": False, "LayerNorm_0": True}),
    )
    found, _ = trained(optimiser)
    assert_close(found, {**plain, "LayerNorm_0": PARAMS["LayerNorm_0"]})


def test_partition_gives_each_part_its_optimiser(plain: Any):
    optimiser = optax.partition(
        {"nero": nero.jax.nero(), "sgd": optax.sgd(0.1)}, {"Dense_0": "nero", "LayerNorm_0": "sgd"}
    )
    found, _ = trained(optimiser)
    assert_close(found["Dense_0"], plain["Dense_0"])
    assert_close(found["LayerNorm_0"], trained(optax.sgd(0.1))[0]["LayerNorm_0"])


def test_multi_steps_take_the_mean_of_gradients(plain: Any):
    twice = [grad for grad in GRADS for _ in range(2)]
    assert_close(trained(optax.MultiSteps(nero.jax.nero(), every_k_schedule=2), twice)[0], plain)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    found, _ = trained(
        optax.MultiSteps(nero.jax.nero(), 2), jax.tree.map(lambda g: g.astype(jnp.bfloat16), twice), half
    )
    assert found["Dense_0"]["kernel"].dtype == jnp.bfloat16


def test_tree_utilities_find_and_map_the_state():
    optimiser = nero.jax.nero(momentum=0.9)
    _, state = trained(optimiser)
    assert optax.tree.get(state, "grad_norm")["Dense_0"]["kernel"].shape == (1, 4)
    assert int(optax.tree.get(state, "count")) == STEPS
    doubled = optax.tree.map_params(optimiser, lambda leaf: 2 * leaf, state)
    assert_close(doubled[0].grad_norm, jax.tree.map(lambda leaf: 2 * leaf, state[0].grad_norm))
    assert int(doubled[0].count) == STEPS


def test_parameters_with_sharding_metadata_step_alike(plain: Any):
    linen = pytest.importorskip("flax.linen", reason="needs flax")
    params, *grads = (
        jax.tree.map(lambda leaf: linen.Partitioned(leaf, ("data",) + (None,) * (leaf.ndim - 1)), tree)
        for tree in (PARAMS, *GRADS)
    )
    found, _ = trained(nero.jax.nero(), grads, nero.jax.balance(params))
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert_close(linen.unbox(found), plain)


def test_vmap_steps_each_network_alike(plain: Any):
    optimiser = nero.jax.nero()
    stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    other = nero.jax.balance(jax.tree.map(lambda leaf: leaf + 1, PARAMS))
    params, grads = stack(PARAMS, other), [stack(grad, grad) for grad in GRADS]
    state, update = jax.vmap(optimiser.init)(params), jax.jit(jax.vmap(optimiser.update))
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.map(lambda leaf: leaf[0], params), plain)
    assert state[0].count.shape == (2,)


def test_state_has_the_structure_of_a_scan_and_of_shapes():
    """``init`` traced for shapes alone gives what it gives on arrays."""
    optimiser = nero.jax.nero(momentum=0.9)
    shapes = jax.eval_shape(optimiser.init, PARAMS)
    found = optimiser.init(PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(found)
    assert [leaf.dtype for leaf in jax.tree.leaves(shapes)] == [leaf.dtype for leaf in jax.tree.leaves(found)]
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(found))


SHARDED = """
import json, re, jax, numpy as np, nero.jax, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

COLLECTIVE = re.compile("all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all")
generator = np.random.default_rng(0)
shapes = {"kernel": (8, 4), "embedding": (6, 8)}
start, grads = ({name: generator.standard_normal(shape, "f4") for name, shape in shapes.items()} for _ in range(2))
start = nero.jax.balance(start)
optimiser = nero.jax.nero(momentum=0.9)

def update(grads, state, params):
    updates, state = optimiser.update(grads, state, params)
    return optax.apply_updates(params, updates), state

def run(kernel, embedding, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    specs = {"kernel": kernel, "embedding": embedding}
    params, placed = (
        {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in tree.items()}
        for tree in (start, grads)
    )
    state = optimiser.init(params)
    shards = {name: str(leaf.sharding.spec) for name, leaf in state[0].grad_norm.items()}
    compiled = jax.jit(update).lower(placed, state, params).compile()
    params, _ = compiled(placed, state, params)
    found = {name: np.asarray(leaf).tolist() for name, leaf in params.items()}
    return {"params": found, "collectives": COLLECTIVE.findall(compiled.as_text()), "shards": shards}

print(json.dumps({
    "alone": run(P(), P(), AxisType.Auto),
    "whole": run(P(None, ("data", "model")), P("data"), AxisType.Auto),
    "cut": run(P("data", "model"), P(None, "model"), AxisType.Auto),
    "whole, explicit": run(P(None, ("data", "model")), P("data"), AxisType.Explicit),
    "cut, explicit": run(P("data", "model"), P(None, "model"), AxisType.Explicit),
}))
"""


def test_sharded_step_agrees_and_keeps_whole_neurons_local():
    """A step over a mesh of 2 x 2 devices; one test, since its process takes seconds."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for layout in found:
        for name, wanted in found["alone"]["params"].items():
            np.testing.assert_allclose(found[layout]["params"][name], wanted, rtol=1e-5, atol=1e-6)
    assert found["whole"]["collectives"] == found["whole, explicit"]["collectives"] == []
    assert set(found["cut"]["collectives"]) == {"all-reduce"}  # of numbers per neuron; no weight is gathered
    assert "model" in found["whole"]["shards"]["kernel"]
    assert "data" in found["whole"]["shards"]["embedding"]


def test_benchmark_rehearsal_writes_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = {name: jax_step.OPTIMISERS[name] for name in ("Adam (optax)", "Nero")}
    monkeypatch.setattr(jax_step, "gpt2", lambda *_: {"embedding": (64, 32), "bias": (32,)})
    monkeypatch.setattr(jax_step, "OPTIMISERS", kept)
    assert jax_step.main(["--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("jax-*.json")
    rows = {row["optimiser"]: row for row in json.loads(path.read_text())["step"]}
    assert rows["Adam (optax)"]["of_adam"] == 1
    assert rows["Nero"]["milliseconds"] > 0
    assert rows["Nero"]["state_bytes"] < rows["Adam (optax)"]["state_bytes"]
