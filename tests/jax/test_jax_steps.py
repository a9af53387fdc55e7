"""Steps of nero.jax against the oracle, over the table of cases, and inputs that are odd."""

import functools
import inspect
import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("optax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from cases import CASES, ROUNDING, TOLERANCE, Case, Oracle

import nero.jax
import nero.rule

DTYPES = {torch.float64: jnp.float64, torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}
STEPS = 5
#: Cases that differ in shape alone, or in memory layout, are one to JAX; "maximize" is a negated gradient to optax.
SAME = (
    *("wide", "tall", "one", "fan-in 3", "long", "conv3d", "1x1", "depth", "position", "experts", "transposed "),
    *("bounded, norm", "bounded, transposed", "tensor lr", "from zero, long", "matrix", "gain, no memory"),
)
TABLE = [case for case in CASES if case.layout == "contiguous" and not case.name.startswith(SAME)]
SHORT = ("linear", "conv2d", "norm at its start", "from zero", "bounded", "bias", "gain pulled to one")


def with_momentum(case: Case, nesterov: bool) -> Case:
    return replace(case, options={**case.options, "momentum": 0.9, "nesterov": nesterov})


SHORT_TABLE = [case for case in CASES if case.name in SHORT]
WITH_MOMENTUM = [with_momentum(case, index % 2 == 0) for index, case in enumerate(SHORT_TABLE)]


def optimiser_of(case: Case) -> optax.GradientTransformation:
    options = {key: value for key, value in case.options.items() if key not in ("lr", "maximize")}
    return nero.jax.nero(float(case.options.get("lr", 0.01)), roles={"w": case.role}, **options)


def balanced(case: Case, start: jax.Array) -> dict[str, jax.Array]:
    constraints = {key: value for key, value in case.options.items() if key in ("fix_mean", "fix_norm")}
    return nero.jax.balance({"w": start}, roles={"w": case.role}, **constraints)


def trained(case: Case, start: jax.Array, grads: jax.Array) -> tuple[Any, Any]:
    """Return the parameters and the state after a scan over gradients."""
    optimiser = optimiser_of(case)
    params = balanced(case, start)

    def step(carry, grad):
        params, state = carry
        updates, state = optimiser.update({"w": grad}, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimiser.init(params)), grads)[0]


def as_torch(array: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)))


def as_state(state: Any) -> dict[str, torch.Tensor]:
    """Return the state of a case's parameter as the oracle reads it."""
    found = state[0]
    named = {
        "step": as_torch(found.count),
        "grad_norm": as_torch(found.grad_norm["w"]),
        "skipped": as_torch(found.skipped["w"]).sum(),
    }
    buffers = found.momentum_buffer
    return named if buffers is None else {**named, "momentum_buffer": as_torch(buffers["w"])}


@pytest.mark.parametrize(
    ("dtype", "cases"),
    [(torch.float64, [*TABLE, *WITH_MOMENTUM]), (torch.float32, SHORT_TABLE)],
    ids=["float64", "float32"],
)
def test_steps_agree_with_oracle(dtype: torch.dtype, cases: list[Case]):
    generator = torch.Generator().manual_seed(2)
    starts = [case.start(generator, dtype) for case in cases]
    grads = [torch.stack([case.tensor(generator, dtype) for _ in range(STEPS)]) for case in cases]
    with jax.enable_x64(dtype == torch.float64):
        signs = [-1 if case.options.get("maximize") else 1 for case in cases]
        arguments = jax.tree.map(
            lambda tensor: jnp.asarray(tensor.numpy(), DTYPES[dtype]),
            (starts, [sign * grad for sign, grad in zip(signs, grads, strict=True)]),
        )
        # all at once, which takes less time to compile than each alone
        run = jax.jit(lambda starts, grads: [trained(*each) for each in zip(cases, starts, grads, strict=True)])
        results = run(*arguments)
        for case, start, grad, (params, state) in zip(cases, starts, grads, results, strict=True):
            reference = Oracle(case, start)
            for each in grad:
                reference.step(each)
            assert params["w"].dtype == DTYPES[dtype]
            reference.check(as_torch(params["w"]), as_state(state), TOLERANCE[dtype])


@functools.cache
def compiled(steps: int, **options: Any) -> Any:
    optimiser = nero.jax.nero(**options)

    def run(params, grads):
        def body(carry, _):
            params, state = carry
            updates, state = optimiser.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, optimiser.init(params)), length=steps)[0]

    return jax.jit(run)


def step(params: Any, grads: Any, steps: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return the parameters and the state after steps with the same gradient."""
    return compiled(steps, **options)(params, grads)


def random_like(params: Any, seed: int = 0, size: float = 1.0) -> Any:
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(size * generator.standard_normal(leaf.shape), leaf.dtype), params)


PARAMS = nero.jax.balance(random_like({"kernel": jnp.zeros((6, 4)), "bias": jnp.zeros(4), "scale": jnp.ones(4)}))


def test_default_scale_is_that_of_torch():
    assert nero.jax.rule.SCALE_AT_ORIGIN == nero.rule.SCALE_AT_ORIGIN


def test_bad_and_zero_gradients_leave_their_neurons():
    """A gradient of NaN, infinite or zero: the neuron keeps its bits, all others move, and only bad ones count."""
    grads = random_like(PARAMS, 1)
    grads["kernel"] = grads["kernel"].at[2, 0].set(jnp.nan).at[0, 1].set(jnp.inf).at[:, 2].set(0.0)
    grads["bias"] = grads["bias"].at[1].set(jnp.nan).at[2].set(0.0)
    params, state = step(PARAMS, grads)
    is_same = {name: np.all(params[name] == PARAMS[name], axis=0) for name in params}
    assert is_same["kernel"].tolist() == [True, True, True, False]
    assert np.asarray(params["bias"] == PARAMS["bias"]).tolist() == [False, True, True, False]
    assert state[0].skipped["kernel"].tolist() == [[1, 1, 0, 0]]
    assert state[0].skipped["bias"].tolist() == [0, 1, 0, 0]
    assert state[0].grad_norm["kernel"][0, :3].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "longest_step": 3.0}])
def test_zero_gradients_divide_nothing_by_zero(options: dict[str, Any]):
    optimiser = nero.jax.nero(**options)
    params = {**PARAMS, "embedding": jnp.zeros((2, 3))}
    grads = jax.tree.map(jnp.zeros_like, params)
    with jax.debug_nans(True), jax.debug_infs(True):
        updates, _ = optimiser.update(grads, optimiser.init(params), params)  # not compiled: each operation is checked
    assert not any(np.any(update) for update in jax.tree.leaves(updates))


def test_bad_gradient_keeps_average_and_momentum():
    grads = random_like(PARAMS, 1)
    optimiser = nero.jax.nero(momentum=0.9)
    update = jax.jit(optimiser.update)
    _, before = update(grads, optimiser.init(PARAMS), PARAMS)
    _, after = update({**grads, "kernel": grads["kernel"].at[0, 0].set(jnp.nan)}, before, PARAMS)
    for old, new in (
        (each(before[0]), each(after[0])) for each in (lambda s: s.grad_norm, lambda s: s.momentum_buffer)
    ):
        assert np.array_equal(old["kernel"][:, 0], new["kernel"][:, 0])
        assert not np.any(old["kernel"][:, 1:] == new["kernel"][:, 1:])


@pytest.mark.parametrize("size", [1e-25, 1e25, 3e37])
def test_step_is_free_of_the_gradients_scale(size: float):
    (wanted, _), (found, _) = (step(PARAMS, random_like(PARAMS, 1, each)) for each in (1.0, size))
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_learning_rate_of_zero_keeps_every_bit():
    params = random_like(PARAMS, 3)  # not balanced
    found, state = step(params, random_like(PARAMS, 1), learning_rate=0.0)
    assert all(np.array_equal(found[name], params[name]) for name in params)
    assert np.all(state[0].grad_norm["kernel"] > 0)


def test_constant_neuron_waits_for_a_gradient():
    params = {"kernel": jnp.ones((5, 2))}
    grads = {"kernel": jnp.zeros((5, 2)).at[0, 1].set(1.0)}
    assert np.array_equal(nero.jax.balance(params)["kernel"], params["kernel"])
    found = step(params, grads)[0]["kernel"]
    assert np.array_equal(found[:, 0], np.ones(5))
    np.testing.assert_allclose(np.linalg.norm(found[:, 1]), 1.0, rtol=1e-6)


def test_neurons_that_are_not_balanced_are_projected_by_a_step():
    found, _ = step(random_like(PARAMS, 3), random_like(PARAMS, 1))
    assert nero.jax.is_balanced(found)


def test_half_precision_rounds_once_per_step():
    """The step is that of float32, rounded: the update is float32, and the sum is rounded by apply_updates."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    grads = random_like(params, 1)
    found, state = step(params, grads, momentum=0.5)
    wide, _ = step(*(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (params, grads)))
    assert state[0].grad_norm["kernel"].dtype == jnp.float32
    assert state[0].momentum_buffer["kernel"].dtype == jnp.bfloat16
    for name in found:
        assert found[name].dtype == jnp.bfloat16
        wanted = wide[name].astype(jnp.bfloat16).astype(jnp.float32)
        ulp = 2 * ROUNDING[torch.bfloat16] * np.abs(wanted)
        # a float32 that lies between two numbers of bfloat16 may round to either
        off = np.abs(found[name].astype(jnp.float32) - wanted)
        assert np.all(off <= ulp)
        assert np.mean(off > 0) < 0.1


def test_half_precision_stops_at_its_largest_number():
    params = {"bias": jnp.full(2, 60000.0, jnp.float16)}
    found, _ = step(params, {"bias": jnp.array([-1.0, 1.0], jnp.float16)}, learning_rate=0.5)
    assert found["bias"].tolist() == [65504.0, 30000.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be"),
        ({"beta": 1.0}, "beta must be in"),
        ({"momentum": 1.5}, "momentum must be in"),
        ({"longest_step": 0.5}, "longest_step must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"gain_penalty": math.nan}, "gain_penalty must be"),
        ({"fix_norm": "start"}, "fix_norm True, False or 'initial'"),
        ({"beta": "0.9"}, "beta must be a number, in"),
        ({"beta": None}, "beta must be in"),
        ({"learning_rate": [0.1]}, "learning_rate must be"),
        ({"learning_rate": {"kernel": jnp.ones((30, 30))}}, "^learning_rate must be .{,99}$"),  # parameters by mistake
        ({"learning_rate": jnp.array([0.1, 0.2])}, r"learning_rate must have one element, got the shape \(2,\)"),
        ({"learning_rate": "0.1"}, "learning_rate must be a number"),
        (
            {"learning_rate": "auto"},
            "PyTorch alone.*0.1 divided by the number of layers of a plain chain, and longest_step=3",
        ),
        ({"nesterov": "no"}, "nesterov must be True or False"),
    ],
)
def test_bad_option_raises(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        nero.jax.nero(**options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (nero.jax.nero, {"lr": 0.1}, "unknown option 'lr' of nero.jax.nero: .*learning_rate"),
        (nero.jax.nero, {"beta1": 0.9}, "Nero has it as momentum"),
        (nero.jax.nero, {"weight_decay": 0.1}, "no weight decay.*leave it out"),
        (nero.jax.nero, {"b1": 0.9}, "momentum=0.9"),
        (nero.jax.nero, {"eps": 1e-8}, "scale-free"),
        (nero.jax.nero, {"fix_nrom": True}, "did you mean fix_norm?"),
        (nero.jax.nero, {"use_muon": True}, "the options are learning_rate, beta"),
        (nero.jax.nero, {"on_nonfinite": "skip"}, "always left out"),
        (nero.jax.scale_by_nero, {"b2": 0.99}, "nero.jax.scale_by_nero.*beta=0.999"),
        (nero.jax.keep_balanced, {"overrides": {}}, "nero.jax.keep_balanced.*roles=nero.jax.roles_of"),
    ],
)
def test_unknown_option_raises_with_remedy(make: Any, options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        make(**options)
    assert not set(options) & set(inspect.signature(make).parameters)
    assert {"others", "options", "kwargs"}.isdisjoint(inspect.signature(make).parameters)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (nero.jax.nero, (0.01, 0.9), r"nero\.jax\.nero got 0\.9 without a name: write beta=\.\.\., momentum="),
        (nero.jax.scale_by_nero, (0.9,), r"scale_by_nero got 0\.9 without a name: write beta=\.\.\., momentum="),
        (nero.jax.keep_balanced, (True,), r"keep_balanced got True without a name: write fix_mean=\.\.\., fix_norm="),
    ],
)
def test_option_without_a_name_raises_with_remedy(make: Any, values: tuple[Any, ...], message: str):
    with pytest.raises(TypeError, match=message):
        make(*values)


def test_update_without_parameters_says_what_to_pass():
    optimiser = nero.jax.nero()
    with pytest.raises(ValueError, match="params"):
        optimiser.update(PARAMS, optimiser.init(PARAMS))


def test_missing_gradient_names_its_parameter():
    optimiser = nero.jax.nero()
    with pytest.raises(ValueError, match="'bias' has no gradient"):
        optimiser.update({**PARAMS, "bias": None}, optimiser.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "params", [{}, {"kernel": jnp.ones((0, 4)), "bias": jnp.ones(0)}, {"kernel": jnp.ones((4, 0))}]
)
def test_empty_trees_and_arrays_are_stepped(params: Any):
    optimiser = nero.jax.nero(momentum=0.9)
    with pytest.raises(ValueError, match="no neurons"):  # as nero.is_balanced does
        nero.jax.is_balanced(nero.jax.balance(params))
    updates, _ = optimiser.update(params, optimiser.init(params), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_numbers_of_python_are_stepped_as_arrays():
    params, optimiser = {"bias": 0.5}, nero.jax.nero(0.1)
    updates, _ = optimiser.update({"bias": 2.0}, optimiser.init(params), params)
    np.testing.assert_allclose(updates["bias"], -0.05, rtol=1e-6)


def test_step_needs_no_implicit_promotion_of_dtypes():
    params = {"kernel": jnp.ones((4, 3), jnp.bfloat16), "scale": jnp.ones(3)}
    optimiser = nero.jax.nero(momentum=0.9, gain_penalty=0.1, longest_step=3)
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = optimiser.update(nero.jax.balance(params), optimiser.init(params), params)
    assert updates["kernel"].dtype == jnp.float32
