"""The depth of a network, counted along the operations of a forward pass."""

import copy
import gc
import math
import weakref
from itertools import pairwise

import pytest
import torch
from networks import NORMS, Block, Branches, CustomForward, TiedEmbedding, X, rms, uniform_perceptron
from torch import nn

import nero


@pytest.mark.parametrize("layers", [1, 2, 7, 50])
def test_layers_in_a_row_count_one_each(layers):
    assert nero.depth_of(uniform_perceptron(layers), X) == layers


def test_deepest_of_concatenated_branches_counts():
    assert nero.depth_of(Branches(), X) == 4


class WithToken(nn.Module):
    """Two layers, and a learned token that joins the signal between them."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(8, 8), nn.Linear(8, 8)
        self.token = nn.Parameter(torch.randn(1, 8))

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.how == "cat":
            hidden = torch.cat([self.token, hidden])
        elif self.how == "where":
            hidden = torch.where(torch.arange(len(inputs))[:, None] > 1, hidden, self.token)
        else:
            hidden = hidden.clone()
            hidden[0] = self.token[0]
        return self.last(hidden)


@pytest.mark.parametrize("how", ["cat", "where", "assign"])
def test_learned_token_is_a_branch_not_a_layer(how):
    assert nero.depth_of(WithToken(how), X) == 2


@pytest.mark.parametrize("alpha", [1.0, 0.1, -2.0])
def test_added_branches_count_by_their_shares(alpha):
    first, second, third = Block(2, alpha=alpha), Block(3, alpha=alpha), nn.Linear(8, 8)
    assert nero.depth_of(first, X) == 2  # the other branch is the input
    both = nn.Sequential(first, second)
    hidden = first(X)
    shares = [each.square().mean().item() for each in (hidden, alpha * second.body(hidden))]
    assert nero.depth_of(both, X) == pytest.approx(rms(2, 5, shares=shares))
    assert nero.depth_of(nn.Sequential(*both, third), X) == pytest.approx(1 + rms(2, 5, shares=shares))


def test_zero_branch_counts_like_the_branch_it_is_added_to():
    block = Block(3)
    nn.init.zeros_(block.body[-1].weight)
    assert nero.depth_of(nn.Sequential(nn.Linear(8, 8), block), X) == pytest.approx(rms(1, 4, shares=[1, 1]))


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-24, torch.float32), (1e20, torch.float32), (1e36, torch.float32), (1e200, torch.float64)]
)
def test_shares_survive_squares_that_overflow(scale, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Block(1), Block(1)).to(dtype)
    assert nero.depth_of(model, scale * X.to(dtype)) == pytest.approx(nero.depth_of(model, X.to(dtype)), rel=1e-5)


@pytest.mark.parametrize("by", [1e-6, 1e6, -3e38])
def test_added_constants_and_inputs_do_not_count(by):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = uniform_perceptron(3)

        def forward(self, inputs):
            return self.body(inputs) + by * torch.ones(2) - inputs[:, :2]

    assert nero.depth_of(Shifted(), X) == 3


def test_bias_added_by_hand_does_not_count():
    class Layer(nn.Linear):
        def forward(self, inputs):
            return inputs @ self.weight.T + self.bias

    assert nero.depth_of(nn.Sequential(*(Layer(8, 8) for _ in range(10))), X) == 10


def test_depth_grows_by_log_with_norms_before_blocks():
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def counted(norm, count):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(2, norm, width=64) for _ in range(count)))
        nero.balance_(model)
        return nero.depth_of(model, inputs)

    found = {norm: [counted(norm, count) for count in (4, 16, 64)] for norm in ("behind", *NORMS)}
    grown = {norm: [after - before for before, after in pairwise(each)] for norm, each in found.items()}
    assert grown["behind"] == pytest.approx([12, 48], rel=0.1)  # one per block: half of its layers
    for norm in NORMS:
        assert grown[norm] == pytest.approx([2 * math.log(4)] * 2, rel=0.2)  # the logarithm of their number


def test_depth_of_common_architectures():
    images = torch.randn(2, 3, 8, 8)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    convolutions(images)
    assert nero.depth_of(convolutions, images) == 2
    assert nero.depth_of(TiedEmbedding(), torch.arange(4)) == 2
    normed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), uniform_perceptron(2))
    assert nero.depth_of(normed, X) == 3
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(3)]
    encoder = nn.Sequential(*layers)
    nero.balance_(encoder)
    found = nero.depth_of(encoder, X[None])
    assert 3 < found < 12  # of four layers per block
    assert nero.depth_of(encoder.eval(), X[None]) == pytest.approx(found)  # not fused into one operation


def test_depth_of_leaves_the_model_unchanged():
    model = nn.Sequential(nn.BatchNorm1d(8), uniform_perceptron(2))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    nero.depth_of(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="mat1"):
        nero.depth_of(model[1], torch.randn(2, 3))
    assert nero.depth_of(model, X) == 2


def test_copied_inputs_keep_views_and_attributes():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, inputs, cache, slot):
            slot.copy_(self.first(inputs * inputs.factor))
            return self.second(cache)

    inputs, cache = X.clone(), torch.zeros_like(X)
    inputs.factor = 2.0
    assert nero.depth_of(Caching(), inputs, cache, cache[:]) == 2
    assert not cache.any()


def test_modules_that_share_hooks_are_counted():
    model = uniform_perceptron(3)
    waiting = nero.Nero(model, lr="auto")

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = model, copy.copy(model)

        def forward(self, inputs):
            return self.one(inputs) + self.other(inputs)

    assert nero.depth_of(Both(), X) == pytest.approx(3)
    model(X)
    assert waiting.param_groups[0]["depth"] == 3


def test_model_without_layers_raises():
    with pytest.raises(ValueError, match="no trained layer was found"):
        nero.depth_of(nn.ReLU(), X)
    with pytest.raises(ValueError, match="no trained layer was found"):
        nero.depth_of(nn.BatchNorm1d(8), X)


def test_model_on_meta_device_has_no_depth():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.ones(2, 8)
    for each in (model, model[0]):
        with pytest.raises(
            ValueError, match=r"on the meta device, .*: allocate it \(module\.to_empty\) and initialise"
        ):
            nero.depth_of(each, inputs)


def test_frozen_layers_do_not_count():
    model = uniform_perceptron(10)
    model[:-1].requires_grad_(False)
    assert nero.depth_of(model, X) == 1
    optimiser = nero.Nero(model[-1].parameters(), lr=0.01)
    model.requires_grad_(True)
    optimiser.count_depth(model)
    model(X)
    assert optimiser.param_groups[0]["depth"] == 1


@pytest.mark.parametrize(
    ("join", "shares"),
    [
        (lambda a, b: a + b, True),
        (lambda a, b: a - b, True),
        (torch.add, True),
        (lambda a, b: torch.stack([a, b]).sum(0), False),
        (lambda a, b: 2 * torch.lerp(a, b, 0.5), False),
        (lambda a, b: torch.addcmul(a, b, torch.ones(())), False),
        (lambda a, b: torch.addmm(a, b, torch.eye(2)), False),
        (lambda a, b: torch.baddbmm(a[None], b[None], torch.eye(2)[None])[0], False),
        (lambda a, b: torch.einsum("kij->ij", torch.stack([a, b])), False),
    ],
)
def test_only_plain_sums_count_by_shares(join, shares):
    torch.manual_seed(0)
    depth = nero.depth_of(CustomForward(lambda self, inputs: join(self.head(inputs), self.body(inputs))), X)
    assert 1 < depth < 4 if shares else depth == 4


def test_infinite_masks_are_accepted():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.bias = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, inputs):
            mask = torch.arange(8) > 3
            return (self.bias(inputs).masked_fill(mask, -math.inf) + self.scores(inputs)).softmax(-1)

    assert nero.depth_of(Attending(), X) == 2


def test_replaced_buffers_are_restored():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("runs", torch.zeros(()))
            self.register_buffer("made", None)
            self.register_buffer("bank", torch.zeros(0, 8))
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, inputs):
            self.runs = self.runs + 1
            self.made = torch.ones(3)
            self.bank.data = torch.cat([self.bank, inputs.detach()])  # as observers of quantisation grow
            self.mean.data = self.mean.double() + 1
            return self.layer(inputs)

    model = Counting()
    assert nero.depth_of(model, X) == 1
    assert model.runs == 0
    assert model.made is None
    assert model.bank.shape == (0, 8)
    assert torch.equal(model.mean, torch.zeros(8))
    assert model.mean.dtype == torch.float32


class CustomKernel(torch.autograd.Function):
    """A custom kernel, whose operations torch does not see."""

    @staticmethod
    def forward(_, inputs, make):
        out = make(inputs)
        out.numpy()[...] = 2 * inputs.detach().numpy()
        return out

    @staticmethod
    def backward(_, gradient):
        return 2 * gradient, None


def fill_buffer(self, inputs):
    out = torch.zeros(4, 2)
    out[:, :1] = self.body(inputs)[:, :1]
    return self.head(out)


def store_output(self, inputs):
    self.loss = self.head(self.body(inputs))


def call_itself(self, inputs):
    if inputs.shape[0] > 1:
        return self.head(self(inputs[:1]))
    return self.body(inputs)


def run_under_autocast(self, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        self.body(inputs)
        return self.head(self.body(inputs))


def ask_for_gradient(self, inputs):
    return self.head(self.body(inputs.clone().requires_grad_()))


def masked(self, inputs):
    """Multiply by a sum of boolean masks."""
    first = self.body(inputs)
    second = self.head(first)
    return second * ((first > 0) + (second > 0))


def run_on_noise(self, _):
    return self.head(self.body(torch.randn(3, 2)))


@pytest.mark.parametrize(
    ("product", "depth"),
    [
        (lambda v, w, x: x @ v @ w, 2),
        (lambda v, w, x: x @ (v @ w), 1),  # the same product, with a single layer of weights
        (lambda v, w, x: (x @ v) * (x @ w), 1),
    ],
)
def test_product_counts_as_its_deepest_factor(product, depth):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = lambda inputs: product(model[0].weight, model[1].weight, inputs)
    assert nero.depth_of(model, torch.randn(4, 2)) == depth


@pytest.mark.parametrize(
    "run", [fill_buffer, store_output, call_itself, run_under_autocast, ask_for_gradient, masked, run_on_noise]
)
def test_unusual_forward_passes_are_traced(run):
    assert nero.depth_of(CustomForward(run), X) == 5


def test_gradient_taken_in_forward_is_traced():
    def force(self, places):
        places = places.detach().requires_grad_()
        energy = self.head(self.head(2 * places).tanh()).sum()
        return energy, torch.autograd.grad(energy, places, create_graph=True)[0]

    assert nero.depth_of(CustomForward(force), X) == 2


def test_function_transforms_in_forward_are_traced():
    def force(self, places):
        return torch.func.vmap(torch.func.grad(lambda place: self.head(2 * place).tanh().sum()))(places)

    assert nero.depth_of(CustomForward(force), X[:, :2]) == 2


@pytest.mark.filterwarnings("ignore")  # FlexAttention says that it should be compiled
def test_higher_order_operators_are_traced():
    from torch.nn.attention.flex_attention import flex_attention

    def attend(self, inputs):
        heads = inputs[None, None]
        return self.head(flex_attention(heads, heads, heads)[..., :2])

    assert nero.depth_of(CustomForward(attend), X) == 1


def test_branch_that_may_hide_layers_raises():
    def chosen(self, inputs):
        return torch.cond(inputs.sum() > 0, lambda inputs: self.head(inputs), lambda inputs: 2 * inputs, (inputs,))

    with pytest.raises(ValueError, match=r"cond may hold layers that cannot be seen.*give depth"):
        nero.depth_of(CustomForward(chosen), X)


def test_complex_branches_count_by_their_shares():
    def added(self, inputs):
        first = self.head(inputs)
        return torch.complex(torch.zeros(4, 2), 2 * first) + torch.complex(self.body(first), first)

    model = CustomForward(added)
    first = model.head(X[:, :2])
    shares = [each.square().sum().item() for each in (2 * first, torch.cat([model.body(first), first]))]
    assert nero.depth_of(model, X) == pytest.approx(rms(1, 5, shares=shares))


@pytest.mark.parametrize(
    "make",
    [lambda x: torch.from_numpy(x.detach().numpy().copy()), lambda x: torch.empty(x.shape), torch.empty_like,
     lambda x: x.new_empty(x.shape)],
)  # fmt: skip
def test_untraceable_operation_raises_at_step(make):
    model = CustomForward(lambda self, inputs: self.head(CustomKernel.apply(self.body(inputs), make)))
    with pytest.raises(ValueError, match="cannot be traced"):
        nero.depth_of(model, X)
    optimiser = nero.Nero(model, lr="auto")
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"not known yet \(ValueError: a tensor of shape .* cannot be traced"):
        optimiser.step()


def test_interrupted_count_leaves_no_dispatch_mode():
    def stop(*_):
        raise KeyboardInterrupt

    model = CustomForward(stop)
    nero.Nero(model, lr="auto")
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    model.run = lambda self, inputs: self.body(inputs)
    assert nero.depth_of(model, X) == 4


def test_network_that_runs_on_its_buffer_is_counted():
    model = CustomForward(lambda self, _: self.head(self.body(self.places)))
    model.register_buffer("places", torch.randn(3, 2))
    assert nero.depth_of(model, X) == 5


def test_counted_pass_frees_its_graph():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert nero.depth_of(model, torch.randn(2, 4)) == 1
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None
