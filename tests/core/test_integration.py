"""Schedulers, GradScaler, sparse gradients, sharding, SAM, autocast and torch.compile."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from training import fill_grads, network, train

import nero

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_table_of_schedulers_is_complete():
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    } - {"LRScheduler"}
    assert known <= set(SCHEDULERS)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # by SequentialLR of torch 2.8
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_scheduler_sets_the_angle(make, tensor: bool):
    """Each step turns a neuron by the scheduled rate, measured on the weights."""
    weight = nn.Parameter(torch.randn(3, 50, dtype=torch.float64))
    lr = torch.tensor(0.01, dtype=torch.float64) if tensor else 0.01
    optimiser = nero.Nero([weight], lr=lr, beta=0.0)
    scheduler = make(optimiser)
    for step in range(7):
        before = weight.detach().clone()
        grad = torch.randn(3, 50, dtype=torch.float64)
        grad -= grad.mean(1, keepdim=True)
        grad -= (grad * before).sum(1, keepdim=True) * before
        weight.grad = grad
        rate = float(optimiser.param_groups[0]["lr"])
        optimiser.step()
        turned = (before * weight.detach()).sum(1).clamp(-1, 1).acos()
        torch.testing.assert_close(turned, torch.full((3,), math.atan(rate), dtype=torch.float64), rtol=1e-4, atol=1e-7)
        scheduler.step(*([1.0 + step] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def test_tensor_lr_equals_float_lr(backend: str):
    one, other = network(), network()
    train(one, nero.Nero(one, lr=0.03, backend=backend), range(3))
    train(other, nero.Nero(other, lr=torch.tensor([0.03], dtype=torch.float64), backend=backend), range(3))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("how", ["default", "param_groups"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_scheduler_changes_tensor_lr_like_a_float(make, how: str):
    """Each group has a tensor of its own, so a rate is changed once per step and not once per group."""
    if make is SCHEDULERS["SequentialLR"] and torch.__version__ < "2.11":
        pytest.skip("an old SequentialLR keeps a tensor at its first rate, under every optimiser")
    sequences = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        model = network()
        made = nero.Nero(model, lr=lr) if how == "default" else nero.Nero(nero.param_groups(model, lr=lr))
        optimiser = nero.Nero(network(), lr=lr)
        optimiser.load_state_dict(made.state_dict())
        assert len(optimiser.param_groups) == 4
        rates = []
        for each in (made, optimiser):
            scheduler = make(each)
            for step in range(7):
                rates += [float(group["lr"]) for group in each.param_groups]
                scheduler.step(*([1.0 + step] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        assert float(lr) == 0.01
        sequences.append(rates)
    assert sequences[0] == pytest.approx(sequences[1])


def test_tensor_lr_of_older_checkpoint_is_separated():
    """In 0.1.0 all groups shared a tensor, and a checkpoint keeps that."""
    model = network()
    saved, rate = nero.Nero(model, lr=torch.tensor(0.01)).state_dict(), torch.tensor(0.02)
    for group in saved["param_groups"]:
        group["lr"] = rate
    optimiser = nero.Nero(model)
    optimiser.load_state_dict(saved)
    optimiser.add_param_group({"params": nn.Linear(2, 2), "lr": rate})
    assert len({id(group["lr"]) for group in optimiser.param_groups} | {id(rate)}) == len(optimiser.param_groups) + 1
    assert [float(group["lr"]) for group in optimiser.param_groups] == pytest.approx([0.02] * 6)


def test_tensor_lr_of_a_group_is_kept():
    rate = torch.tensor(0.01)
    optimiser = nero.Nero([{"params": nn.Linear(3, 2).parameters(), "lr": rate}])
    assert optimiser.param_groups[0]["lr"] is rate


def test_grad_scaler_does_not_change_the_steps():
    model, plain = network(), network()
    optimiser, reference = nero.Nero(model), nero.Nero(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    batch = torch.randn(4, 2, 4, 4)
    for step in range(4):
        optimiser.zero_grad(), reference.zero_grad()
        loss, reference_loss = model(batch).square().mean(), plain(batch).square().mean()
        if step == 2:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        if step != 2:  # the scaler leaves such a step out
            reference_loss.backward()
            reference.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert not optimiser.skipped


def test_clipping_is_invisible_and_accumulation_adds():
    torch.manual_seed(1)
    batches = torch.randn(6, 4, 2, 4, 4)
    results = []
    for how in ("plain", "clipped", "accumulated"):
        model = network().eval().double()
        optimiser = nero.Nero(model)
        for one, two in batches.double().view(3, 2, 4, 2, 4, 4):
            optimiser.zero_grad()
            if how == "accumulated":
                model(one).square().sum().backward()
                model(two).square().sum().backward()
            else:
                model(torch.cat([one, two])).square().sum().backward()
            if how == "clipped":  # the same factor for all, at every step: nothing that Nero could see
                total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                nn.utils.clip_grad_norm_(model.parameters(), float(total) * 1e-3)
            optimiser.step()
        results.append(model)
    for a, b, c in zip(*(model.parameters() for model in results), strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-10)
        assert b.isfinite().all()


@pytest.mark.parametrize("role", ["neuron", "gain"])
def test_sparse_gradient_equals_dense_step(backend: str, role: str):
    torch.manual_seed(0)
    backend = "auto" if backend == "triton" else backend  # whose kernels take dense ones alone
    dense, sparse = nn.Embedding(10, 6, padding_idx=3), nn.Embedding(10, 6, padding_idx=3, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    optimisers = [nero.Nero([{"params": each.parameters(), "role": role}], backend=backend) for each in (dense, sparse)]
    for tokens in ([1, 2, 2, 3], [2, 5, 7], [1, 3], [9, 9, 9, 0]):
        before = sparse.weight.detach().clone()
        for table, optimiser in zip((dense, sparse), optimisers, strict=True):
            optimiser.zero_grad()
            (table(torch.tensor(tokens)) * torch.arange(6)).square().sum().backward()
            optimiser.step()
        rest = [row for row in range(10) if row not in tokens or row == 3]
        assert torch.equal(sparse.weight[rest], before[rest]), "rows without gradient are not touched"
    torch.testing.assert_close(sparse.weight, dense.weight, rtol=0, atol=1e-6)
    for name in ("step", "grad_norm", "skipped"):
        a, b = (o.state[t.weight][name] for o, t in zip(optimisers, (dense, sparse), strict=True))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_sparse_gradient_of_pulled_gains_equals_dense():
    tables = [nn.Embedding(6, 1, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimiser = nero.Nero([{"params": table.parameters(), "role": "gain"}], gain_penalty=1.0)
        for _ in range(3):
            optimiser.zero_grad()
            table(torch.tensor([1, 2])).sum().backward()
            optimiser.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_sparse_gradient_across_neurons_is_densified():
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 6, sparse=sparse)
        optimiser = nero.Nero([{"params": table.parameters(), "role": "neuron", "fan_in_axes": (0,)}])
        table(torch.tensor([1, 4])).square().sum().backward()
        optimiser.step()
        results.append(table.weight.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant:UserWarning")
def test_sparse_nonfinite_gradient_is_skipped():
    table = nn.Embedding(10, 6, sparse=True)
    optimiser = nero.Nero(table)
    before = table.weight.detach().clone()
    values = torch.ones(2, 6)
    values[0, 0] = math.nan
    values[1] = torch.arange(6)
    table.weight.grad = torch.sparse_coo_tensor(torch.tensor([[2, 5]]), values, (10, 6))
    optimiser.step()
    assert optimiser.skipped == {"weight": 1}
    assert torch.equal(table.weight[2], before[2])
    assert not torch.equal(table.weight[5], before[5])


def test_step_under_autocast_and_default_device(backend: str):
    """Neither may change the arithmetic of the step."""
    results = []
    for odd in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 40))
        optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0,)}], backend=backend)
        for _ in range(3):
            weight.grad = torch.randn(64, 40)
            if odd:
                with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
                    optimiser.step()
            else:
                optimiser.step()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_state_cast_in_inference_mode_can_be_stepped_outside(backend: str):
    if backend == "triton":
        pytest.skip("the kernels take no float64")
    layer = nn.Linear(4, 3)
    optimiser = nero.Nero(layer, momentum=0.9, backend=backend)
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter).cumsum(0)
            optimiser.step()
        layer.double()
    assert {state["step"].item() for state in optimiser.state.values()} == {3.0}


@pytest.fixture
def mesh():
    """A device mesh of one process."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("longest", [math.inf, 1.05])
def test_sharded_parameters_take_the_same_steps(backend: str, longest: float, mesh):
    """FSDP2 swaps the parameters for sharded ones; their state is sharded alike."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    plain = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    sharded = copy.deepcopy(plain)
    for module in sharded:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    optimisers = [nero.Nero(model, longest_step=longest, backend=backend) for model in (plain, sharded)]
    for seed in range(3):
        fill_grads(plain, seed)
        plain[2].weight.grad[0, 0] = math.nan if seed == 1 else 1.0
        for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
            b.grad = distribute_tensor(a.grad, mesh, [Shard(0)])
        for optimiser in optimisers:
            optimiser.step()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a, rtol=0, atol=1e-6)
    assert isinstance(optimisers[1].state[sharded[0].weight]["grad_norm"], DTensor)
    assert optimisers[0].skipped == optimisers[1].skipped == {"2.weight": 1}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:Guards may run slower on Python 3.13.0")
def test_compiled_step_is_one_graph_for_any_lr():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, plain = network(), network()
    optimiser = nero.Nero(model, lr=torch.tensor(0.01), longest_step=1.05)
    reference = nero.Nero(plain, lr=0.01, longest_step=1.05)
    counter = CompileCounter()
    step = torch.compile(lambda: optimiser.step(), backend=counter, fullgraph=True)
    for seed in range(5):
        fill_grads(model, seed), fill_grads(plain, seed)
        step()
        reference.step()
        for group, other in zip(optimiser.param_groups, reference.param_groups, strict=True):
            other["lr"] *= 0.5
            group["lr"].fill_(other["lr"])  # as a scheduler does
    assert counter.frame_count == 1
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_compiled_step_takes_sparse_gradients():
    torch._dynamo.reset()
    tables = [nn.Embedding(10, 4, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimisers = [nero.Nero(table, lr=torch.tensor(0.1)) for table in tables]
    steps = [optimisers[0].step, torch.compile(lambda: optimisers[1].step(), backend="eager")]
    for seed in range(3):
        rows = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(seed))
        for table, optimiser, step in zip(tables, optimisers, steps, strict=True):
            optimiser.zero_grad()
            (table(rows) * torch.arange(4.0)).sum().backward()
            step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("base", [nero.Nero, torch.optim.SGD])
def test_sam_keeps_the_model_balanced(base: type[torch.optim.Optimizer]):
    sam_of = pytest.importorskip("pytorch_optimizer").SAM
    layer = nn.Linear(8, 4)
    sam = sam_of(layer.parameters(), base, rho=0.05, lr=0.01)
    if base is not nero.Nero:
        nero.balance_after_step(sam, layer)
    start = layer.weight.detach().clone()
    for half in (sam.first_step, sam.second_step):
        layer(torch.randn(3, 8)).square().sum().backward()
        half(zero_grad=True)
    assert nero.is_balanced(layer)
    assert not torch.equal(layer.weight, start)


def test_groups_given_one_rate_tensor_get_their_own():
    rate, layers = torch.tensor(0.1), [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimiser = nero.Nero([{"params": layer.parameters(), "lr": rate} for layer in layers])
    torch.optim.lr_scheduler.LambdaLR(optimiser, [lambda _: 1.0, lambda _: 0.1])
    assert [group["lr"].item() for group in optimiser.param_groups] == pytest.approx([0.1, 0.01])
