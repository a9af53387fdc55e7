"""Steps of contenders on given shapes."""

import contenders
import shapes
import step
import timing
import torch


def test_contender_that_fails_is_left_out():
    def refuse(_: object) -> torch.optim.Optimizer:
        raise RuntimeError("not today")

    bench = timing.Bench(torch.device("cpu"), timing.Budget(2, 0.0, 2, 0.0), 1e9, True, 0.0)
    bad = contenders.Contender("Bad", refuse)
    rows = step.measure(shapes.matrices(64, 1), [*contenders.REFERENCES, bad], bench)
    assert [row["optimiser"] for row in rows] == ["Adam (fused)", "SGD (fused)"]
    assert bench.notes == ["Bad, 1 matrices: RuntimeError: not today"]
