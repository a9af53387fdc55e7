"""The Triton backend against the oracle, its errors, and its behaviour on a GPU."""

import sys
from collections import deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import TOLERANCE, Case, Oracle
from interpreter import INTERPRETED
from test_sweeps import rest_of, sweeps_of
from torch import Tensor, nn

import nero
from nero.backends import available
from nero.backends.triton import sweep, tables
from nero.backends.triton.sweep import Upload
from nero.backends.triton.tables import RECORD_FIELDS

DEVICE = "cpu" if INTERPRETED else "cuda"
#: A fan-in of several pieces; interpreted, the time grows with the square of their number.
LONG = 30_000 if INTERPRETED else 300_000


def rows(neurons: int, fan_in: int) -> Case:
    return Case(f"{neurons} of {fan_in}", (neurons, fan_in), "neuron" if fan_in > 1 else "gain")


def columns(fan_in: int, neurons: int) -> Case:
    return Case(f"{neurons} columns of {fan_in}", (fan_in, neurons), axes=(0,))


def check(cases: list[Case], steps: int = 2, dtype: torch.dtype = torch.float32) -> nero.Nero:
    """Compare all cases, in one optimiser, with the oracle."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(case.start(generator, dtype, DEVICE)) for case in cases]
    references = [Oracle(case, parameter) for case, parameter in zip(cases, parameters, strict=True)]
    groups = [case.group(parameter) for case, parameter in zip(cases, parameters, strict=True)]
    optimiser = nero.Nero(groups, backend="triton")
    for _ in range(steps):
        for case, parameter, reference in zip(cases, parameters, references, strict=True):
            parameter.grad = case.tensor(generator, dtype, DEVICE)
            reference.step(parameter.grad)
        optimiser.step()
    assert not rest_of(optimiser), "the kernels step all of them"
    for parameter, reference in zip(parameters, references, strict=True):
        reference.check(parameter, optimiser.state[parameter], TOLERANCE[dtype])
    return optimiser


@pytest.mark.parametrize("fan_in", [1, 2, 3, 63, 64, 65, 4608, LONG])
def test_turn_every_fan_in_agrees_with_oracle(fan_in: int):
    check([rows(3 if fan_in < 10_000 else 1, fan_in)])


@pytest.mark.parametrize("fan_in", [64, 65, 256, 257, 1024, 1025, 2047, 16_384, 16_385])
def test_columns_of_every_length_agree_with_oracle(fan_in: int):
    """Neurons side by side, whose number is a multiple of eight and is not, and further apart than their elements."""
    cases = [columns(fan_in, 3), columns(fan_in, 8), Case("gaps", (2, fan_in), layout="gaps")]
    check(cases if fan_in < 10_000 else cases[:1], steps=1 if fan_in > 10_000 else 2)


def test_sweep_of_every_tile_agrees_with_oracle():
    """Rows of every width and alignment, columns, segments, gains: all in one sweep."""
    widths = [5, 8, 24, 130, 256, 257, 511, 513, 600, 1000, 1024, 1500, 2304, 5000, 9000]
    cases = [rows(3, width) for width in widths] + [columns(300, 70), columns(9, 5)]
    cases += [Case("kernels", (40, 6, 3, 3), axes=(0, 2, 3)), Case("gains", (700,), "gain")]
    optimiser = check(cases)
    assert len(sweeps_of(optimiser)) == 1


def test_turn_many_neurons_agrees_with_oracle():
    check([rows(700, 5), rows(150, 40), columns(40, 150)])


def test_tensors_too_large_for_indices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "MAX_COUNT", 8)
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((8, 8), (9, 8), (8, 9), (8,), (9,))]
    optimiser = nero.Nero(parameters, backend="triton")
    optimiser.step()
    assert [tuple(each.shape) for each in rest_of(optimiser)] == [(9, 8), (8, 9), (9,)]


def test_step_of_many_small_and_empty_tensors():
    count = 150 if INTERPRETED else 10_000
    parameters = [nn.Parameter(torch.full((10,), 2.0, device=DEVICE)) for _ in range(count)]
    parameters += [nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in ((0,), (0, 4), (4, 0))]
    optimiser = nero.Nero(parameters, backend="triton", lr=0.25)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    for parameter in parameters[:count]:
        assert torch.allclose(parameter.detach(), torch.tensor(1.5, device=DEVICE))


def test_stride_of_axis_of_one_is_ignored():
    """Gradients of 1x1 convolutions have such strides: no copy is made, and the fast check still passes."""
    weight = nn.Parameter(torch.randn(6, 8, 1, 1, device=DEVICE))
    optimiser = nero.Nero([weight], backend="triton")
    grad = torch.randn(6, 8, device=DEVICE).as_strided((6, 8, 1, 1), (8, 1, 8, 8))
    for _ in range(2):
        weight.grad = grad
        optimiser.step()
    (sweep,) = sweeps_of(optimiser)
    assert sweep._known == [grad.data_ptr()]
    assert sweep._is_unchanged(weight, grad)


def test_groups_with_own_rates_share_a_sweep():
    parameters = [nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(4)]
    tensors = [torch.tensor(0.25, device=DEVICE, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    rates = [0.5, 0.125, *tensors]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    groups[1]["maximize"] = True
    optimiser = nero.Nero(groups, backend="triton")
    for factor in (1.0, 2.0):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimiser.step()
        for lr in tensors:
            lr.mul_(2)
        optimiser.param_groups[0]["lr"] *= 2
        optimiser.param_groups[1]["lr"] *= 2
        moved = [0.5, -0.125, 0.25, 0.25]
        for parameter, change in zip(parameters, moved, strict=True):
            wanted = 1 - change * (1 if factor == 1 else 3)
            torch.testing.assert_close(parameter.detach(), torch.full((3,), wanted, device=DEVICE))
    assert len(sweeps_of(optimiser)) == 1


def test_unsupported_tensor_raises_only_if_chosen_by_name():
    double = nn.Linear(3, 2).double().to(DEVICE)
    with pytest.raises(ValueError, match=r"weight is torch.float64.*backend='foreach'"):
        nero.Nero(double, backend="triton")
    sparse = nn.Embedding(5, 3, sparse=True).to(DEVICE)
    optimiser = nero.Nero(sparse, backend="triton")
    sparse(torch.tensor([1], device=DEVICE)).sum().backward()
    with pytest.raises(ValueError, match=r"the gradient of weight is sparse.*backend='foreach'"):
        optimiser.step()
    for layer in (double, sparse):
        quiet = nero.Nero(layer)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
        quiet.step()
        assert all(quiet.state[each]["step"] == 1 for each in layer.parameters())


@pytest.mark.parametrize("sparse", [False, True])
def test_unsupported_tensor_raises_before_any_changes(sparse: bool):
    late, odd = (
        nn.Parameter(torch.randn(3, 4, dtype=dtype, device=DEVICE), requires_grad=False)
        for dtype in (torch.float32, torch.float32 if sparse else torch.float64)
    )
    with pytest.warns(UserWarning, match="nothing to train"):
        optimiser = nero.Nero([late, odd], backend="triton")
    before = [late.detach().clone(), odd.detach().clone()]
    late.requires_grad_(), odd.requires_grad_()
    late.grad = torch.randn_like(late)
    odd.grad = torch.ones_like(odd).to_sparse() if sparse else torch.ones_like(odd)
    with pytest.raises(ValueError, match=r"cannot step parameter 1 of group 0.*(sparse|float64)"):
        optimiser.step()
    assert torch.equal(late, before[0])
    assert torch.equal(odd, before[1])
    assert not optimiser.state


def test_triton_missing_raises_only_if_chosen_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(available, "is_installed", lambda _: False)
    monkeypatch.setitem(sys.modules, "nero.backends.triton.project_kernel", None)
    available.triton_works.cache_clear()
    layer = nn.Linear(3, 2).to(DEVICE)
    with pytest.raises(ModuleNotFoundError, match=r"weight, needs triton \(pip install triton\).*backend='foreach'"):
        nero.Nero(layer, backend="triton")
    with nullcontext() if INTERPRETED else pytest.warns(UserWarning, match="Triton does not run on cuda"):
        optimiser = nero.Nero(layer)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimiser.step()
    assert not sweeps_of(optimiser)
    available.triton_works.cache_clear()


def test_cpu_tensor_without_interpreter_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = "weight is on cpu, and the kernels run on CUDA devices; use backend='foreach'"
    with pytest.raises(ValueError, match=message):
        nero.Nero(nn.Linear(3, 2), backend="triton")


def test_record_fields_match_the_kernels():
    from nero.backends.triton import record_kernels

    places = [getattr(record_kernels, field.upper()).value for field in RECORD_FIELDS]
    assert places == list(range(record_kernels.FIELDS.value))


def test_buffer_waits_until_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch):
    class Event:
        is_done = False

        def query(self) -> bool:
            return self.is_done

        def record(self, stream: object) -> None:
            assert stream == "current"
            self.is_done = False

    monkeypatch.setattr(sweep, "DROPPED", deque())
    events = [Event() for _ in range(3)]
    upload = Upload(torch.zeros(2, dtype=torch.int64))
    buffers = [upload._buffer() for _ in range(4)]
    monkeypatch.setattr(upload, "_is_cuda", True)
    monkeypatch.setattr(upload, "_buffer", iter(buffers).__next__)  # the first is for a capture
    monkeypatch.setattr(torch.cuda, "Event", iter(events).__next__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    for number in (1, 2):
        assert upload.write([number, 0]).tolist() == [number, 0]
        upload.mark(0)
    events[1].is_done = True  # the first copy is read before the second
    upload.write([3, 0])
    upload.mark(0)
    events[0].is_done = True
    upload.write([4, 0])
    upload.mark(0)
    assert [int(tensor[0]) for tensor, _ in buffers[1:]] == [4, 2, 3]
    buffer, _ = upload.capture([5, 0])
    assert buffer is buffers[0][0]
    assert buffer.tolist() == [5, 0]
    with pytest.raises(RuntimeError, match="between two captures"):
        upload.capture([6, 0])


def test_dropped_buffers_live_until_the_device_has_read_them(monkeypatch: pytest.MonkeyPatch):
    event = SimpleNamespace(is_read=False, record=lambda _: None, query=lambda: event.is_read)
    dropped: deque[tuple[sweep.Buffer, object]] = deque()
    monkeypatch.setattr(sweep, "DROPPED", dropped)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)

    def step() -> int:
        upload = Upload(torch.zeros(2, dtype=torch.int64))
        on_cpu = SimpleNamespace(_table=upload._table, _is_cuda=False)
        upload._is_cuda, upload._buffer = True, partial(Upload._buffer, on_cpu)
        upload.write([1, 2])
        upload.mark(0)
        return upload._buffers[0][0][0].data_ptr()

    addresses = [step(), step()]  # the first upload is gone before the second writes
    assert [buffer[0].data_ptr() for buffer, _ in dropped] == addresses
    event.is_read = True
    step()
    assert len(dropped) == 1  # that of the last upload


@pytest.mark.filterwarnings("ignore:neurons of .* are shorter than one")  # of the transposed view
def test_launches_wait_for_what_they_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "_can_overlap", lambda _: True)
    shapes = [(7, 511), (2, 20_003), (9, 8), (3, 5000)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made = made_tables(parameters)
    names = [launch.kernel.__name__ for launch, _ in made.launches]
    lets, first, last, lets_then = 1, 2, 4, 8
    overlaps = [made.counting.constants["OVERLAP"], *(launch.constants["OVERLAP"] for launch, _ in made.launches)]
    assert names == ["measure", "turn", "step", "step", "step"]
    assert overlaps == [lets, first | lets_then, lets | first, lets | last, lets | last, last]
    assert [made.counting.is_early, *(launch.is_early for launch, _ in made.launches)] == [False] + [True] * 5
    tied = nn.Parameter(parameters[2].detach().t())
    made = made_tables([*parameters, tied])
    launches = [made.counting, *(launch for launch, _ in made.launches)]
    assert not any(launch.constants["OVERLAP"] or launch.is_early for launch in launches)


def made_tables(parameters: list[nn.Parameter]) -> tables.Tables:
    """Return the tables of the sweep that steps these parameters."""
    optimiser = nero.Nero(parameters, backend="triton", pretrained=False)  # some share memory, and unbalance others
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(tables.Launch, "__call__", lambda *_: None)
        optimiser.step()
    (made,) = sweeps_of(optimiser)
    return made._tables


def test_step_after_a_failed_one_reads_its_own_gradients(monkeypatch: pytest.MonkeyPatch):
    """The table may hold the addresses of the step that failed after it had counted."""
    parameter = nn.Parameter(torch.randn(3, 8))
    optimiser = nero.Nero([parameter], backend="triton")
    mine, other = torch.randn(3, 8), torch.randn(3, 8)
    parameter.grad = mine
    optimiser.step()
    (launch, _), *_ = sweeps_of(optimiser)[0]._tables.launches
    with monkeypatch.context() as patch:
        patch.setattr(launch, "kernel", None)
        patch.setattr(launch, "compiled", None)
        parameter.grad = other
        with pytest.raises(TypeError):
            optimiser.step()
    parameter.grad, before = mine, parameter.detach().clone()
    optimiser.step()
    moved = (parameter.detach() - before).flatten()
    assert (
        torch.cosine_similarity(moved, -mine.flatten(), 0) > torch.cosine_similarity(moved, -other.flatten(), 0) + 0.3
    )


def test_buffer_counts_as_unread_even_if_its_launch_fails(monkeypatch: pytest.MonkeyPatch):
    parameter = nn.Parameter(torch.randn(3, 8))
    optimiser = nero.Nero([parameter], backend="triton")
    parameter.grad = torch.randn(3, 8)
    optimiser.step()
    (own,) = sweeps_of(optimiser)
    marked: list[int] = []
    monkeypatch.setattr(own._upload, "mark", marked.append)
    monkeypatch.setattr(own, "_tables", own._tables._replace(counting=None))
    with pytest.raises(TypeError):
        optimiser.step()
    assert marked == [0]


@pytest.mark.gpu
def test_overlapping_launches_read_what_this_step_has_counted():
    """Steps of many launches, whose rate and gradients change at each, are queued without a wait."""
    torch.manual_seed(0)
    shapes = [(700, 511), (3, 40_003), (900, 3), (64,), (300, 2048), (60, 9000)]
    start = [torch.randn(shape, device="cuda") for shape in shapes] + [torch.randn(96, 80, device="cuda").t()]
    grads = [[torch.randn_like(each) for each in start] for _ in range(20)]
    ends = []
    for backend in ("foreach", "triton"):
        parameters = [nn.Parameter(each.clone()) for each in start]
        optimiser = nero.Nero(parameters, momentum=0.9, backend=backend)
        for number in range(60):
            optimiser.param_groups[0]["lr"] = 0.0 if number % 3 else 0.02 / (1 + number)
            for parameter, grad in zip(parameters, grads[number % 20], strict=True):
                parameter.grad = grad
            optimiser.step()
        ends.append(parameters)
    for expected, parameter in zip(*ends, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("rounding", "momentum"), [("nearest", 0.0), ("stochastic", 0.0), ("stochastic", 0.9)])
def test_no_step_after_the_first_synchronises(rounding: str, momentum: float):
    """The first looks at the weights, which may be new. Steps with new gradients do not wait for the device."""
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 4)).cuda().to(torch.bfloat16)
    optimiser = nero.Nero(model, rounding=rounding, momentum=momentum)
    inputs = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    for number in range(3):
        optimiser.zero_grad(set_to_none=True)
        model(inputs).square().sum().backward()
        try:
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            optimiser.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {state["step"].item() for state in optimiser.state.values()} == {3.0}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 10)).cuda()


def by_hand(rates: list[float], momentum: float = 0.0) -> list[Tensor]:
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, backend="eager", momentum=momentum)
    for lr in rates:
        for group in optimiser.param_groups:
            group["lr"] = lr
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.gpu
def test_cuda_graph_replays_with_a_scheduler():
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, lr=torch.tensor(0.01, device="cuda"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)

    def train() -> None:
        optimiser.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimiser.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    for _ in range(4):
        graph.replay()
        schedule.step()
    wanted = by_hand([0.01] * 4 + [0.005, 0.0025, 0.00125])
    for found, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), each, rtol=1e-4, atol=1e-5)
    assert {state["step"].item() for state in optimiser.state.values()} == {7.0}
    # and steps outside of the graph go on from there, as does the graph
    train()
    graph.replay()
    assert {state["step"].item() for state in optimiser.state.values()} == {9.0}


@pytest.mark.gpu
def test_captured_step_alone_serves_a_loop_and_a_checkpoint():
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, lr=torch.tensor(0.01, device="cuda"))

    def backward() -> None:
        optimiser.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()

    for rates in ([0.01, 0.01, 0.005], [0.005, 0.005, 0.02]):
        backward()
        optimiser.step()  # a capture needs a step before it, also after a checkpoint was loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimiser.step()
        for lr in rates[1:]:
            for group in optimiser.param_groups:
                group["lr"].fill_(lr)
            backward()
            graph.replay()
        optimiser.load_state_dict(optimiser.state_dict())  # the graph of before goes on with the tensors of before
    wanted = by_hand([0.01, 0.01, 0.005, 0.005, 0.005, 0.02])
    for found, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), each, rtol=1e-4, atol=1e-5)
    assert {state["step"].item() for state in optimiser.state.values()} == {6.0}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_before_first_step_raises():
    model = network()
    optimiser = nero.Nero(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="take a step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimiser.step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler has advice to give
def test_compiled_training_step_agrees_with_eager():
    model, inputs = network(), torch.ones(8, 64, device="cuda").cumsum(1) / 64
    optimiser = nero.Nero(model, lr=torch.tensor(0.01, device="cuda"))

    @torch.compile
    def train() -> None:
        model(inputs).square().mean().backward()
        optimiser.step()

    for lr in (0.01, 0.02, 0.005):
        optimiser.zero_grad()
        for group in optimiser.param_groups:
            group["lr"].fill_(lr)
        train()
    for found, each in zip(model.parameters(), by_hand([0.01, 0.02, 0.005]), strict=True):
        torch.testing.assert_close(found.detach(), each, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_auto_without_working_triton_uses_foreach(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nero.backends.triton.project_kernel.project", None)
    available.triton_works.cache_clear()
    layer = nn.Linear(9, 4).cuda()

    def trained() -> nero.Nero:
        optimiser = nero.Nero(layer)
        layer(torch.ones(2, 9, device="cuda")).sum().backward()
        optimiser.step()
        return optimiser

    with pytest.warns(UserWarning, match="Triton does not run on cuda"):
        optimiser = trained()
    assert not sweeps_of(optimiser)
    available.triton_works.cache_clear()


@pytest.mark.gpu
def test_training_with_cuda_as_the_default_device():
    torch.set_default_device("cuda")
    try:
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8).bfloat16())
        optimiser = nero.Nero(model, momentum=0.9, rounding="stochastic")
        other = nn.Linear(16, 8)
        sgd = torch.optim.SGD(other.parameters(), 0.1)
        nero.balance_after_step(sgd, other)
        for _ in range(3):
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.grad = torch.randn_like(parameter)
            optimiser.step()
            sgd.step()
        assert nero.is_balanced(model)
        assert nero.is_balanced(other)
        assert len(sweeps_of(optimiser)) == 1
    finally:
        torch.set_default_device(None)


@pytest.mark.gpu
def test_parameters_on_two_devices_step_alike():
    parts = [nn.Linear(9, 4), nn.Linear(9, 4).cuda()]
    parts[1].load_state_dict(parts[0].state_dict())
    optimiser = nero.Nero([each for part in parts for each in part.parameters()])
    for part in parts:
        part(torch.ones(2, 9, device=part.weight.device).cumsum(1)).square().sum().backward()
    optimiser.step()
    assert [sweep._device.type for sweep in sweeps_of(optimiser)] == ["cuda"]
    for one, other in zip(*(part.parameters() for part in parts), strict=True):
        torch.testing.assert_close(one.detach(), other.detach().cpu(), rtol=0, atol=1e-6)
