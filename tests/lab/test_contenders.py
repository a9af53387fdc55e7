"""The optimisers of the study of today: their grids, rates, groups, state and runs that resume."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from lab.helpers import RecordingObserver, finish, make_data
from lab.loop_cases import saved_and_loaded
from torch import nn

import nero
from nero_lab import baselines
from nero_lab.baselines.library import Together, hidden_matrices
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.supervised import Supervised
from nero_lab.protocol import Contender, Seconds, SettingError, Task, linear_decay
from nero_lab.store import Store
from nero_lab.sweep import search, train
from nero_lab.tasks import TASKS, depth
from nero_lab.tasks.today.contenders import CONTENDERS, VARIANTS, around

NAMES = list(CONTENDERS)
each_contender = pytest.mark.parametrize("name", NAMES)


class Block(nn.Module):
    """A residual block with a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12, bias=False)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return signal + self.down(self.up(self.norm(signal)).relu())


class Network(nn.Module):
    """A linear embedding of patches, blocks and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Linear(3 * 16, 12), nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        signal = self.patches(nn.functional.avg_pool2d(images, 8).flatten(1))
        for block in self.blocks:
            signal = block(signal)
        return self.head(signal)


TASK = Task(
    name="small",
    shows="",
    title="",
    dataset="cifar10",
    model=Network,
    contenders=CONTENDERS,
    grid=(0.01,),
    epochs=2,
    batch=8,
    schedule=linear_decay(2),
    metric="test_accuracy",
    seconds=Seconds(),
)


@each_contender
def test_contender_resumed_run_equals_undisturbed(name):
    data, settings = make_data(examples=20), TASK.settings(name)
    whole = Supervised(TASK, settings, data)
    states = []
    while not whole.is_finished:
        states.append(whole.state())
        whole.advance()
    assert len(states) == 6
    for state in (states[1], states[4]):
        again = finish(Supervised(TASK, settings, data, saved_and_loaded(state)))
        assert again.curve == whole.curve
        for key, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[key], value), key


@each_contender
def test_contender_learns_at_scheduled_rates(name):
    training = Supervised(TASK, TASK.settings(name, lr=0.003, epochs=2), make_data(examples=20))
    ratios = [1.0, 0.15, 0.15] if "muon" in name else [1.0] * len(training.optimiser.param_groups)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    for step in range(4):
        training.advance()
        rates = [float(group["lr"]) for group in training.optimiser.param_groups]
        assert rates == pytest.approx([0.003 * (1 - step / 6) * ratio for ratio in ratios])
    for parameter, start in zip(training.model.parameters(), before, strict=True):
        assert not torch.equal(parameter, start)
        assert parameter.isfinite().all()
    if name.endswith("balanced") or (name.startswith("nero") and not name.endswith("free")):
        assert nero.is_balanced(training.model)


def test_grid_seven_rates_surround_best():
    for contender in CONTENDERS.values():
        assert len(contender.grid) == 7
        assert contender.grid[3] == contender.best
        ratios = [larger / rate for rate, larger in zip(contender.grid[:-1], contender.grid[1:], strict=True)]
        assert ratios == pytest.approx([2.0] * 6, rel=0.01)


def test_search_follows_grid_of_each_contender():
    contenders = {"own": Contender("sgd", 1.0, grid=(1.0, 2.0)), "task": Contender("sgd", 0.01)}
    contenders["none"] = Contender("sgd", 3.0, grid=())
    task, asked = replace(TASK, contenders=contenders), []

    def run(runs, more):
        asked.append(([(each.optimiser, each.lr, each.seed) for each in runs], more))
        return [{"optimiser": each.optimiser, "lr": each.lr, "curve": {"test_accuracy": [each.lr]}} for each in runs]

    assert search(task, list(contenders), 2, "float32", run) == {"own": 2.0, "task": 0.01, "none": 3.0}
    assert asked[0] == ([("own", 1.0, 0), ("own", 2.0, 0), ("task", 0.01, 0)], True)
    final = [("own", 2.0), ("task", 0.01), ("none", 3.0)]
    assert asked[1] == ([(name, rate, seed) for name, rate in final for seed in range(2)], False)
    asked.clear()
    assert search(task, ["own"], 1, "float32", run, rates=()) == {"own": 1.0}
    assert depth.by_depth(TASK).grid_of("auto") == depth.TRUSTS


@pytest.mark.parametrize("name", ["normuon", "soap", "lion", "muon"])
def test_optimiser_not_installed_names_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.delattr(torch.optim, "Muon")
    wanted = "torch 2.9" if name == "muon" else r"pytorch_optimizer.*\.\[lab\]"
    with pytest.raises(ValueError, match=wanted):
        baselines.make(name, Network(), 0.01)
    with pytest.raises(SettingError, match=wanted):
        TASK.check_installed(name)


def test_weight_decay_spares_gains_and_biases():
    for name in ("adamw", "muon", "normuon", "soap", "lion"):
        groups = baselines.make(name, Network(), 0.01, weight_decay=0.25).param_groups
        decays = {weight.dim() > 1: group["weight_decay"] for group in groups for weight in group["params"]}
        assert decays == {True: 0.25, False: 0.0}
        assert sum(len(group["params"]) for group in groups) == len(list(Network().parameters()))


class Tied(nn.Module):
    """Layers whose head has no name, and shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.filters = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Conv2d(1, 2, 3)
        self.outer = nn.Linear(4, 7)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 7)
        self.outer.weight = self.table.weight


def test_hidden_matrices_leave_out_embedding_and_head():
    model = Network(1)
    found = [
        next(name for name, each in model.named_parameters() if each is weight) for weight in hidden_matrices(model)
    ]
    assert found == ["blocks.0.up.weight", "blocks.0.down.weight"]
    tied = Tied()
    (weight,) = hidden_matrices(tied)
    assert weight is tied.inner.weight


def test_muon_at_tensor_rate_equals_torch_muon():
    torch.manual_seed(0)
    ours, theirs = Network(), Network()
    theirs.load_state_dict(ours.state_dict())
    one = baselines.make("muon", ours, torch.zeros(()))
    baselines.prime(one)
    other = torch.optim.Muon(hidden_matrices(theirs), lr=0.02)
    for _ in range(3):
        baselines.set_rate(one, 0.02)
        for weight, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
            twin.grad = torch.randn_like(twin)
            weight.grad = twin.grad.clone()
        one.step()
        other.step()
    for weight, twin in zip(hidden_matrices(ours), hidden_matrices(theirs), strict=True):
        torch.testing.assert_close(weight, twin, rtol=0, atol=1e-6)
    assert one.param_groups[0]["lr"] == pytest.approx(0.02)


def test_together_runs_hooks_once_and_shares_state():
    model = Network()
    optimiser = baselines.make("muon", model, 0.01)
    assert isinstance(optimiser, Together)
    calls = []
    optimiser.register_step_post_hook(lambda *_: calls.append(1))

    model(torch.ones(2, 3, 32, 32)).square().sum().backward()
    optimiser.step()
    assert calls == [1]
    assert set(optimiser.state) == set(model.parameters())
    assert all(part.state is optimiser.state for part in optimiser.parts)
    with pytest.raises(ValueError, match="more than one"):
        Together([torch.optim.SGD([model.head.bias], lr=1.0), torch.optim.Adam([model.head.bias])])


def test_soap_by_replayed_graphs_takes_their_gradients(monkeypatch):
    """A replay fills the tensors of its own graph, which are not those that the parameters hold."""
    data, settings = make_data(examples=20), TASK.settings("soap")
    plain = finish(Supervised(TASK, settings, data))
    kept = {}

    def replay(step, *inputs):
        fresh = step.function(*inputs)
        held = kept.setdefault(inputs[0].shape, [gradient.clone() for gradient in fresh])
        for static, gradient in zip(held, fresh, strict=True):
            static.copy_(gradient)
            gradient.fill_(torch.nan)
        return held

    monkeypatch.setattr(CapturedStep, "__call__", replay)
    captured = finish(Supervised(TASK, settings, data))
    assert len(kept) == 2  # batches of eight, and the last of four
    assert captured.curve == plain.curve


def test_bf16_run_computes_in_bfloat16_on_float32_weights():
    seen = set()

    class Spied(Network):
        def forward(self, images):
            logits = super().forward(images)
            seen.add(logits.dtype)
            return logits

    task = replace(TASK, model=Spied, precision="bf16")
    settings = task.settings("adamw")
    assert settings.precision == "bf16"
    assert task.run_name(settings).endswith("-bf16")
    training = finish(Supervised(task, settings, make_data(examples=20)))
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}
    exact = finish(Supervised(task, task.settings("adamw", precision="float32"), make_data(examples=20)))
    assert training.curve["train_loss"] != exact.curve["train_loss"]
    assert training.curve["test_loss"] == pytest.approx(exact.curve["test_loss"], rel=0.01)
    with pytest.raises(SettingError, match="float32 or tf32"):
        TASKS["cgan"].settings("nero", precision="bf16")


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "soap", "nero"])
def test_record_holds_parameters_and_state_bytes(name, tmp_path):
    task = replace(TASK, epochs=1)
    (record,) = train(task, [task.settings(name)], make_data(examples=8), Store(tmp_path), RecordingObserver())
    model = Network()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert record["parameters"] == parameters
    hidden = sum(weight.numel() for weight in hidden_matrices(model))
    steps = len(list(model.parameters()))  # a float each in torch's AdamW
    wanted = {
        "adamw": 4 * (2 * parameters + steps),
        "lion": 4 * parameters,
        "muon": 4 * (2 * parameters - hidden + steps - 4),
        # two matrices of every axis, for each of six weights
        "soap": 4
        * (2 * parameters + 2 * sum(n * n for each in model.parameters() if each.dim() > 1 for n in each.shape)),
    }
    assert record["state_bytes"] == wanted[name] if name in wanted else 0 < record["state_bytes"] < parameters


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every input
def test_compiled_blocks_are_shared_by_layers_and_runs(monkeypatch):
    from torch._dynamo.utils import counters

    from nero_lab.loops import supervised

    compile_plainly = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compile_plainly(function, backend="eager", dynamic=False)
    )

    class Compiled(Supervised):
        def _build(self):
            super()._build()
            self._measure = supervised._compile(self.model)

    data, task = make_data(examples=16), replace(TASK, model=partial(Network, 3))
    graphs = [counters["stats"]["unique_graphs"]]
    for name in ("adamw", "nero-auto"):
        settings = task.settings(name, epochs=1)
        compiled, plain = finish(Compiled(task, settings, data)), finish(Supervised(task, settings, data))
        assert compiled.curve["train_loss"] == pytest.approx(plain.curve["train_loss"], rel=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] - graphs[0] == 4  # a block and the loss, in training and evaluation
    assert graphs[2] == graphs[1]
    assert not any("orig_mod" in name for name in compiled.model.state_dict())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile has its own
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@each_contender
def test_contender_captured_steps_match_eager_steps(name, precision, monkeypatch):
    task = replace(TASK, is_compiled=precision == "bf16")
    settings, data = task.settings(name, precision=precision), make_data(examples=20).to("cuda")
    captured = finish(Supervised(task, settings, data))
    assert len(captured._learn.graphs) == 2  # batches of eight, and the last of four
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, *inputs: self.function(*inputs))
    plain = finish(Supervised(task, settings, data))
    for key, values in plain.curve.items():
        if key.endswith("loss"):
            assert captured.curve[key] == pytest.approx(values, rel=0.01)


def test_variant_balances_the_part_that_it_names():
    model = Network()
    optimiser = baselines.make("muon", model, 0.1, balanced="blocks")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    assert nero.is_balanced(model.blocks)
    assert not nero.is_balanced(model.head)
    assert not nero.is_balanced(model.patches)


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.optimiser == "nero"])
def test_variant_of_nero_changes_the_run(name):
    task = replace(TASK, contenders=CONTENDERS | VARIANTS)
    data = make_data(examples=20)
    curves = [
        finish(Supervised(task, task.settings(each, lr=0.02), data)).curve for each in ("nero-momentum-free", name)
    ]
    assert curves[0] != curves[1]


def test_few_rates_surround_the_best_of_the_small_gpt():
    assert around("muon", 3).grid == (0.02, 0.04, 0.08)
    assert around("adamw", 5).grid == (0.00075, 0.0015, 0.003, 0.006, 0.012)
    assert around("muon", 3).options == CONTENDERS["muon"].options
