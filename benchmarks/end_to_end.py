"""The optimiser's share of a training step: forward pass, backward pass, step and zero_grad."""

import contextlib
import statistics
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from rich.table import Table
from timing import Bench, Clock, Job, Row, Step, burst_length, difference, milliseconds, take_turns
from torch import Tensor, nn
from torch.nn import functional

import nero

# learning rates at which nothing diverges while it is timed
OPTIMISERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam (fused)": lambda model: torch.optim.Adam(model.parameters(), lr=1e-5, fused=True),
    "SGD (fused)": lambda model: torch.optim.SGD(model.parameters(), lr=1e-5, fused=True),
    "Nero": lambda model: nero.Nero(model, lr=1e-3),
}


class Perceptron(nn.Module):
    """The perceptron of Section 5.3: √2·max(0, x) between square layers."""

    def __init__(self, depth: int = 100, width: int = 784, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, classes)
        for layer in [*self.layers, self.head]:  # keeps the size of signals
            nn.init.normal_(layer.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x)) * 2**0.5
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        grown: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return grown


class GPT2(nn.Module):
    """GPT-2 with its head tied to the embedding."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class Workload(NamedTuple):
    """A network and a batch to train it on."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    is_bfloat16: bool
    is_reduced: bool


class Trainer:
    """A copy of a workload's network with its own optimiser."""

    def __init__(self, workload: Workload, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.workload, self.model = workload, deepcopy(workload.model)
        self.optimiser = make(self.model)

    def backward(self) -> None:
        """Run the forward and the backward pass."""
        inputs, targets = self.workload.inputs, self.workload.targets
        is_bfloat16 = self.workload.is_bfloat16
        with torch.autocast(inputs.device.type, torch.bfloat16) if is_bfloat16 else contextlib.nullcontext():
            logits = self.model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    def train(self) -> None:
        """Do a training step."""
        self.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def train_without_step(self) -> None:
        """Do a training step without the optimiser's step."""
        self.backward()
        self.optimiser.zero_grad()

    def seconds_within(self, clock: Clock, count: int) -> float:
        """Return the seconds of the optimiser's step during training, on the device if there is one."""
        clock.synchronize()
        marks = []
        for _ in range(count):
            self.backward()
            begin = clock.mark()
            self.optimiser.step()
            marks.append((begin, clock.mark()))
            self.optimiser.zero_grad()
        clock.synchronize()
        return statistics.median(clock.seconds_between(begin, end) for begin, end in marks)


def jobs(bench: Bench) -> list[Job]:
    """Return one job per network."""
    return [lambda: measure(perceptron(bench), bench), lambda: measure(transformer(bench), bench)]


def perceptron(bench: Bench) -> Workload:
    """Make the 100-layer perceptron, in float32."""
    depth, width, batch = (3, 32, 8) if bench.is_quick else (100, 784, 250)
    inputs = torch.randn(batch, width, device=bench.device)
    targets = torch.randint(10, (batch,), device=bench.device)
    model = Perceptron(depth, width).to(bench.device)
    return Workload(f"{depth}-layer MLP", model, inputs, targets, False, bench.is_quick)


def transformer(bench: Bench) -> Workload:
    """Make GPT-2 small in bfloat16; on a CPU, a smaller one in float32."""
    if bench.device.type == "cuda" and not bench.is_quick:
        model, name, vocabulary, batch, length = GPT2(), "GPT-2 small", 50257, 8, 1024
    else:
        vocabulary, width, batch, length = (64, 32, 2, 8) if bench.is_quick else (8192, 256, 2, 128)
        model, name = GPT2(2, width, 4, vocabulary, length), f"GPT-2 of 2 layers, {width} wide"
    is_reduced = name != "GPT-2 small"
    text = torch.randint(vocabulary, (batch, length + 1), device=bench.device)
    return Workload(name, model.to(bench.device), text[:, :-1], text[:, 1:], not is_reduced, is_reduced)


def measure(workload: Workload, bench: Bench) -> list[Row]:
    """Time training steps with the optimiser's step and without it, in turn."""
    clock = Clock(bench.device)
    trainers = {name: Trainer(workload, make) for name, make in OPTIMISERS.items()}
    steps: dict[str, Step] = {}
    for name, trainer in trainers.items():
        steps[name], steps[f"{name}, without"] = trainer.train, trainer.train_without_step
    for step in steps.values():
        clock.burst(step)
    budget = bench.budget._replace(burst_s=4 * bench.budget.burst_s, seconds=2 * bench.budget.seconds)
    counts = {name: burst_length(step, clock, budget) for name, step in steps.items()}
    times = take_turns(steps, counts, clock, budget, always=steps, tick=bench.tick)
    rows = []
    for name, trainer in trainers.items():
        whole, without = times[name], times[f"{name}, without"]
        optimiser, within = difference(whole, without), trainer.seconds_within(clock, budget.min_rounds)
        total = statistics.median(whole.values())
        rows.append(
            {
                "model": workload.name,
                "reduced": workload.is_reduced,
                "parameters": sum(map(torch.numel, trainer.model.parameters())),
                "tensors": len(list(trainer.model.parameters())),
                "batch": list(workload.inputs.shape),
                "precision": "bfloat16 autocast" if workload.is_bfloat16 else "float32",
                "optimiser": name,
                "rounds": len(whole),
                "milliseconds": milliseconds(total),
                "milliseconds_without": milliseconds(statistics.median(without.values())),
                "optimiser_milliseconds": milliseconds(optimiser),
                "optimiser_milliseconds_within": milliseconds(within),
                "optimiser_per_cent": round(100 * optimiser / total, 2),
                "optimiser_per_cent_within": round(100 * within / total, 2),
            }
        )
        bench.tick()
    return rows


def table(rows: list[Row]) -> Table:
    """Format the rows of one network for a terminal."""
    first = rows[0]
    made = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    made.title = f"{first['model']}, batch {first['batch']}, {first['precision']}"
    made.add_column("optimiser", no_wrap=True)
    for title in ("training step, ms", "without optimiser", "difference", "share", "within", "share"):
        made.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{row[kind]:.4g}" for kind in ("milliseconds", "milliseconds_without")]
        for kind in ("", "_within"):
            times += [f"{row[f'optimiser_milliseconds{kind}']:.3g}", f"{row[f'optimiser_per_cent{kind}']:.1f} %"]
        made.add_row(row["optimiser"], *times)
    return made
