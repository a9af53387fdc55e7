"""lr="auto" under DistributedDataParallel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Two processes of DistributedDataParallel. Each writes its errors, its depths and its final weights. The second is
#: forked after the imports, which take most of the time.
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, torch._dynamo, nero, nero.auto.depth  # DistributedDataParallel imports dynamo
from torch import distributed, nn

class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs, times):
        if not times:
            raise ValueError("times is zero")
        for _ in range(times):
            inputs = self.layer(inputs)
        return inputs

def error_of_step(optimiser):
    try:
        optimiser.step()
    except RuntimeError as error:
        return str(error)

folder = Path(sys.argv[1])
child = os.fork()
rank = int(child == 0)
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
errors, depths, weights = [], [], []
for wrapped_first in (False, True):
    torch.manual_seed(0)
    model = Loop()
    if wrapped_first:
        parallel = nn.parallel.DistributedDataParallel(model)
        optimiser = nero.Nero(parallel, lr="auto")
    else:
        optimiser = nero.Nero(model, lr="auto")
        model(torch.randn(4, 8), 1 + rank)  # outside of DistributedDataParallel
        errors.append(error_of_step(optimiser))
        parallel = nn.parallel.DistributedDataParallel(model)
        if rank == 0:
            model(torch.randn(4, 8), 2)
        try:
            parallel(torch.randn(4, 8), 2 * rank)  # fails on rank 0
        except ValueError:
            pass
        errors.append(error_of_step(optimiser))
    torch.manual_seed(rank)
    for times in (2 + 3 * rank, 1):
        optimiser.zero_grad()
        parallel(torch.randn(4, 8), times).square().mean().backward()
        optimiser.step()
    depths.append(optimiser.param_groups[0]["depth"])
    weights += model.layer.weight.flatten().tolist()
distributed.destroy_process_group()
(folder / f"{rank}.json").write_text(json.dumps([errors, depths, weights]))
if child:
    os.waitpid(child, 0)
"""


def test_processes_agree_on_the_greatest_depth(tmp_path: Path):
    """No process counts alone, and if one cannot count, none does until all can."""
    subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
        check=True,
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert "not known yet (this is one of several processes" in first[0][0] == second[0][0]
    assert "not known yet (ValueError: times is zero)" in first[0][1]
    assert "not known yet (another process could not count it)" in second[0][1]
    assert first[1] == second[1] == [5.0, 5.0]
    assert first[2] == pytest.approx(second[2])
