"""Language models of classic-books: a small and a larger GPT, and series of widths and depths.

A step has 64 windows of 256 tokens. An "epoch" is an interval of 100 steps, after which a sample of the validation text
is evaluated. The rate rises over the first 5 % of the steps and falls linearly to zero. A record holds the bits per
byte on the whole validation text, which texts of any tokenizer can be compared by.

``gpt`` has 10.6 million parameters without embedding and head, ``gpt-large`` 39.3 million. ``gpt-variants`` trains the
small one by variants of free Nero with momentum, and by Muon with a part of the network balanced. The series ask
whether the best rate stays where it is: widths 256, 512 and 1024 at depth 4, and depths 4 (``gpt-w256``), 8 and 16 at
width 256.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nero_lab.data import Books, Dataset
from nero_lab.models.gpt import GPT
from nero_lab.protocol import Contender, Seconds, Task, warm_up_then_linear
from nero_lab.tasks.today.contenders import CONTENDERS, VARIANTS, around

#: Intervals of 100 steps.
INTERVALS, LARGE_INTERVALS, SERIES_INTERVALS = 10, 15, 5
WARM_UP_SHARE = 0.05
BATCH = 64
#: Contenders of the larger network and of the series, and how many rates each has there: plain Nero is far behind.
LARGE = ("adamw", "adamw-clipped", "muon", "muon-balanced", "nero-momentum", "nero-momentum-free", "nero-momentum-auto")
SERIES = ("adamw", "adamw-clipped", "muon", "nero-momentum", "nero-momentum-free", "nero-momentum-auto")
LARGE_RATES, SERIES_RATES = 3, 5


@torch.no_grad()
def bits_per_byte(model: nn.Module, data: Dataset) -> dict[str, float]:
    """Evaluate the whole validation text; nothing if the model has diverged.

    Returns:
        ``full_valid_loss``, nats per token, and ``valid_bits_per_byte``, the same in bits per byte of the tokens that
        are predicted, which are all but the first.
    """
    assert isinstance(data, Books)
    nats = torch.zeros((), dtype=torch.float64, device=data.device)
    for inputs, labels in data.batches("all"):
        nats += F.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten(), reduction="sum")
    predicted = data.valid[1:].long()
    if not math.isfinite(total := nats.item()):
        return {}
    return {
        "full_valid_loss": total / len(predicted),
        "valid_bits_per_byte": total / math.log(2) / data.token_bytes[predicted].sum().item(),
    }


def language_model(
    name: str,
    title: str,
    depth: int,
    width: int,
    intervals: int,
    contenders: Mapping[str, Contender],
    seconds: float,
    seeds: int = 3,
) -> Task:
    """Return the task of a GPT of the given depth and width, and how many seconds a run takes in bf16."""
    return Task(
        name=name,
        study="today",
        shows="",
        title=title,
        dataset="books",
        model=partial(GPT, depth=depth, width=width),
        contenders=contenders,
        grid=(),
        epochs=intervals,
        batch=BATCH,
        schedule=warm_up_then_linear(WARM_UP_SHARE, intervals),
        metric="valid_loss",
        seconds=Seconds(bf16=seconds),
        verdict=bits_per_byte,
        seeds=seeds,
        precision="bf16",
        is_compiled=True,
    )


def _of_series(name: str, depth: int, width: int, seconds: float) -> Task:
    title = f"Does the best rate change with the size? Depth {depth}, width {width}"
    contenders = {each: around(each, SERIES_RATES) for each in SERIES}
    return language_model(name, title, depth, width, SERIES_INTERVALS, contenders, seconds, seeds=1)


_OF_LARGE = {each: around(each, LARGE_RATES) for each in LARGE}

TASKS: tuple[Task, ...] = (
    language_model("gpt", "Which optimiser trains a small GPT best?", 6, 384, INTERVALS, CONTENDERS, 61),
    language_model("gpt-large", "Which optimiser trains a larger GPT best?", 8, 640, LARGE_INTERVALS, _OF_LARGE, 219),
    language_model("gpt-variants", "Which parts of our contenders matter?", 6, 384, INTERVALS, VARIANTS, 88, seeds=1),
    *(_of_series(f"gpt-w{width}", 4, width, seconds) for width, seconds in ((256, 61), (512, 66), (1024, 68))),
    *(_of_series(f"gpt-d{depth}", depth, 256, seconds) for depth, seconds in ((8, 43), (16, 86))),
)
