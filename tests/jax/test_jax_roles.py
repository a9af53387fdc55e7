"""Roles by the names and shapes of flax and haiku, balance, and an import without torch."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("optax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import nero.jax
from nero.jax import Role, roles_of
from nero.jax.roles import name_of


def shapes(**named: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return parameters that have shapes alone; two underlines stand for a slash."""
    return {name.replace("__", "/"): jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in named.items()}


def by_name(roles: Any) -> dict[str, str | tuple[int, ...]]:
    """Return fan-in axes, or the kind of a gain or bias, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(roles)
    return {name_of(path): role.fan_in_axes or role.kind for path, role in leaves}


ATTENTION = {
    **{f"{name}/kernel": (0,) for name in ("query", "key", "value")},
    **{f"{name}/bias": "bias" for name in ("query", "key", "value", "out")},
    "out/kernel": (0, 1),
}


def test_roles_of_linen():
    linen = pytest.importorskip("flax.linen", reason="needs flax")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = linen.Embed(5, 8)(tokens) + self.param("pos_embedding", linen.initializers.ones, (1, 6, 8))
            x = linen.MultiHeadDotProductAttention(2)(x, x)
            x = linen.PReLU()(linen.LayerNorm()(linen.Conv(4, (3,))(x)))
            return linen.WeightNorm(linen.Dense(3))(linen.ConvTranspose(4, (3, 3))(x[..., None]).mean(-1))

    params = jax.eval_shape(Network().init, jax.random.key(0), jnp.zeros((2, 6), int))["params"]
    attention = {f"MultiHeadDotProductAttention_0/{name}": role for name, role in ATTENTION.items()}
    assert by_name(roles_of(params)) == {
        "Embed_0/embedding": (1,),
        "pos_embedding": (2,),
        **attention,
        "Conv_0/kernel": (0, 1),
        "Conv_0/bias": "bias",
        "LayerNorm_0/scale": "gain",
        "LayerNorm_0/bias": "bias",
        "PReLU_0/negative_slope": "bias",
        "ConvTranspose_0/kernel": (0, 1, 2),
        "ConvTranspose_0/bias": "bias",
        "Dense_0/kernel": (0,),
        "Dense_0/bias": "bias",
        "WeightNorm_0/Dense_0/kernel/scale": "gain",
    }


def test_roles_of_nnx():
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")

    class Network(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
            self.layers = nnx.List([nnx.Linear(8, 1, rngs=rngs), nnx.Linear(1, 3, rngs=rngs)])
            self.lora = nnx.LoRA(8, 2, 4, rngs=rngs)

    roles = by_name(roles_of(nnx.state(nnx.eval_shape(Network), nnx.Param)))
    assert {name: role for name, role in roles.items() if "attention" in name} == {
        f"attention/{name}": role for name, role in ATTENTION.items()
    }
    assert roles["layers/0/kernel"] == roles["lora/lora_a"] == roles["lora/lora_b"] == (0,)
    assert roles["layers/1/kernel"] == "gain"  # of fan-in 1


@pytest.mark.parametrize("overrides", [None, {"kernel": (0,)}], ids=["roles by name", "given roles"])
def test_optimizer_of_nnx_turns_a_layer(overrides: Any):
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")
    layer = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    params = nnx.state(layer, nnx.Param)
    roles = None if overrides is None else roles_of(params, overrides)
    nnx.update(layer, nero.jax.balance(params, roles=roles))
    before = np.array(layer.kernel[...])[:, 0]
    optimizer = nnx.Optimizer(layer, nero.jax.nero(0.1, roles=roles), wrt=nnx.Param)

    @nnx.jit
    def train(layer, optimizer):
        grads = nnx.grad(lambda layer: layer(jnp.arange(8.0)).sum())(layer)
        optimizer.update(layer, grads)

    train(layer, optimizer)
    after = np.array(layer.kernel[...])[:, 0]
    np.testing.assert_allclose(np.linalg.norm(after), 1.0, rtol=1e-6)
    assert 0.9 < before @ after < 0.9999


def test_roles_of_haiku_by_its_names():
    params = {
        "mlp/~/linear_0": shapes(w=(8, 4), b=(4,)),
        "conv2_d": shapes(w=(3, 3, 2, 5), b=(5,)),
        "conv1_d": shapes(w=(3, 2, 5)),
        "conv2_d_transpose": shapes(w=(3, 3, 5, 2), b=(5,)),
        "embed": shapes(embeddings=(10, 4)),
        "layer_norm": shapes(scale=(4,), offset=(4,)),
        "multi_head_attention/query": shapes(w=(8, 8)),
    }
    assert by_name(roles_of(params)) == {
        "mlp/~/linear_0/w": (0,),
        "mlp/~/linear_0/b": "bias",
        "conv2_d/w": (0, 1, 2),
        "conv2_d/b": "bias",
        "conv1_d/w": (0, 1),
        "conv2_d_transpose/w": (0, 1, 3),
        "conv2_d_transpose/b": "bias",
        "embed/embeddings": (1,),
        "layer_norm/scale": "gain",
        "layer_norm/offset": "bias",
        "multi_head_attention/query/w": (0,),
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Dense_0__kernel", (12, 8, 4)),  # twelve layers of a scan
        ("query__kernel", (12, 8, 2, 4)),
        ("qkv__kernel", (64, 3, 4, 16)),  # several axes of outputs
        ("out__kernel", (12, 8, 8)),  # twelve layers of a scan, not of attention
        ("Conv_0__kernel", (3, 3, 3, 2, 4)),  # three axes of space, or three layers of a scan
        ("weight", (8, 4)),  # (in, out), or (out, in)
    ],
)
def test_roles_that_names_do_not_tell_raise(name: str, shape: tuple[int, ...]):
    params = shapes(**{name: shape})
    own = name.replace("__", "/")
    for call in (roles_of, nero.jax.nero().init, nero.jax.is_balanced):
        with pytest.raises(ValueError, match=r"pass roles=nero\.jax\.roles_of\(params, ") as error:
            call(params)
        assert f"{own} {shape}" in str(error.value)
        assert f"{{'{own}$': axes}}" in str(error.value)
    assert roles_of(params, {f"{own}$": (1,)}) == {own: Role("neuron", (1,))}


@pytest.mark.parametrize(
    ("query", "out"),
    [((4, 32, 4, 8), (4, 4, 8, 32)), ((12, 8, 8), (12, 8, 8))],
    ids=["as many layers as heads", "dense layers"],
)
def test_attention_stacked_by_a_scan_raises(query: tuple[int, ...], out: tuple[int, ...]):
    params = shapes(query__kernel=query, out__kernel=out, stem__kernel=(7, 7, 3, 8))
    with pytest.raises(ValueError, match=r"out/kernel.*; query/kernel.*; stem/kernel"):
        roles_of(params)
    with pytest.raises(ValueError, match=r"axes of out/kernel"):
        roles_of(params, {"query": (1,), "stem": (0, 1, 2)})


def test_roles_of_array_without_name_raise():
    params = jnp.ones(12)
    flattened = {"Dense_0": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}}
    for call in (
        lambda: nero.jax.nero().init(params),
        lambda: nero.jax.balance(params),
        lambda: optax.flatten(nero.jax.nero()).init(flattened),
    ):
        with pytest.raises(ValueError, match=r"one array of shape \(.*leave out optax\.flatten"):
            call()
    nero.jax.nero(roles=Role("bias")).init(params)
    with pytest.raises(ValueError, match="do not tell the fan-in axes"):
        nero.jax.nero().init(jnp.ones((8, 4)))
    nero.jax.nero().init(jnp.array(1.0))


def test_overrides_search_the_path_and_the_last_match_counts():
    params = {"Dense_0": shapes(kernel=(8, 4), bias=(4,)), "Dense_1": shapes(kernel=(4, 2))}
    roles = roles_of(params, {"kernel": (1,), r"_1/kernel$": "bias", "bias": Role("gain", has_offset=True)})
    assert by_name(roles) == {"Dense_0/kernel": (1,), "Dense_0/bias": "gain", "Dense_1/kernel": "bias"}
    with pytest.raises(ValueError, match=r"\['Dense_2'\] match no parameter"):
        roles_of(params, {"Dense_2": "gain"})
    with pytest.raises(ValueError, match=r"'\*/bias' is not one: nothing to repeat"):
        roles_of(params, {"*/bias": "gain"})
    with pytest.raises(ValueError, match="'Dense_0/bias' does not fit"):
        roles_of(params, {"bias": (1,)})


def test_roles_of_other_parameters_raise():
    params = {"kernel": jnp.ones((3, 4))}
    for roles in ({"kernel": Role("neuron", (2,))}, {"other": Role("bias", ())}):
        with pytest.raises(ValueError, match="'kernel'"):
            nero.jax.nero(roles=roles).init(params)
    with pytest.raises(TypeError, match=r"int32.*optax\.partition"):
        nero.jax.nero().init({"bias": jnp.arange(3)})


def test_gain_penalty_leaves_gains_around_zero():
    params = {"scale": jnp.zeros(3), "gain": jnp.zeros(3)}
    roles = roles_of(params, {"scale": Role("gain", has_offset=True)})
    optimiser = nero.jax.nero(0.1, gain_penalty=0.5, roles=roles)
    updates, _ = jax.jit(optimiser.update)(params, optimiser.init(params), params)
    assert updates["scale"].tolist() == [0, 0, 0]
    np.testing.assert_allclose(updates["gain"], 0.1, rtol=1e-6)


def test_factors_that_may_start_at_zero_are_gains_without_penalty():
    assert by_name(roles_of(shapes(log_alpha=()))) == {"log_alpha": "bias"}
    roles = roles_of(shapes(block__alpha=(), block__attn_gate=(8,), rezero=(1,)))
    assert all(role.kind == "gain" and not role.is_pulled for role in roles.values())


def test_neuron_override_takes_all_axes_but_the_first():
    params = shapes(conv__weight=(4, 3, 2, 2), linear__weight=(8, 4), linear__bias=(8,), norm__weight=(8,))  # equinox
    roles = roles_of(params, {"weight": "neuron", "norm.*weight": "gain"})
    assert by_name(roles) == {
        "conv/weight": (1, 2, 3),
        "linear/weight": (1,),
        "linear/bias": "bias",
        "norm/weight": "gain",
    }


def test_square_windows_are_convolutions_under_any_name():
    assert by_name(roles_of(shapes(stem__kernel=(7, 7, 3, 64)))) == {"stem/kernel": (0, 1, 2)}


def test_first_norms_are_not_checked():
    with pytest.raises(ValueError, match=r"give fix_norm=False"):
        nero.jax.is_balanced({"kernel": jnp.ones((4, 2))}, fix_norm="initial")


def test_balance_is_idempotent_and_keeps_norms_if_told():
    generator = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(generator.standard_normal((50, 7)), jnp.bfloat16), "bias": jnp.ones(2)}
    params["kernel"] = params["kernel"].at[:, 0].set(0)
    once = nero.jax.balance(params)
    assert jax.tree.all(jax.tree.map(np.array_equal, nero.jax.balance(once), once))
    assert not nero.jax.is_balanced(once)  # a neuron is zero
    assert nero.jax.is_balanced({"kernel": once["kernel"][:, 1:]})
    assert not nero.jax.is_balanced(params)
    kept = nero.jax.balance(params, fix_norm="initial")["kernel"].astype(jnp.float32)
    sizes = [np.linalg.norm(each, axis=0) for each in (kept, params["kernel"].astype(jnp.float32))]
    np.testing.assert_allclose(*sizes, rtol=0.01)
    np.testing.assert_allclose(kept.mean(0), 0, atol=0.01)


@pytest.mark.parametrize("call", [nero.jax.balance, nero.jax.is_balanced, roles_of, nero.jax.nero().init])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (torch.nn.Linear(3, 2), "params must be an array of JAX, got Linear: for PyTorch, use nero.Nero"),
        ({"kernel": torch.ones(3, 2)}, "parameter 'kernel' must be an array of JAX, got Tensor: for PyTorch"),
        ({"kernel": "0.1"}, "'kernel' .* got str: give a pytree of arrays"),
    ],
    ids=["module", "tensor", "string"],
)
def test_leaves_that_are_no_arrays_raise(params: Any, message: str, call: Any):
    with pytest.raises(TypeError, match=message):
        call(params)


def test_import_needs_no_torch():
    code = "import sys, nero.jax, nero; assert 'torch' not in sys.modules; print(nero.jax.nero, nero.__version__)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)


def test_roles_are_read_for_what_is_not_masked():
    params = {"Dense_0": {"kernel": jnp.ones((3, 2))}, "head": jnp.ones((2, 2))}
    labels = {"Dense_0": "nero", "head": "adam"}
    with pytest.raises(ValueError, match="head"):
        nero.jax.nero().init(params)
    state = optax.partition({"nero": nero.jax.nero(), "adam": optax.adam(1e-3)}, labels).init(params)
    assert optax.tree.get(state, "grad_norm")["Dense_0"]["kernel"].shape == (1, 2)
