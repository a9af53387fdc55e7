"""The parameter shapes of the benchmark."""

import pytest
import shapes


@pytest.mark.parametrize(("total", "tensors"), [(100_000_000, 10_000), (16_000_000, 10), (2**31, 2048)])
def test_matrices_add_up_to_the_total(total: int, tensors: int):
    made = shapes.matrices(total, tensors)
    assert made.total == pytest.approx(total, rel=0.01)
    assert sum(map(len, made.by_axes.values())) == tensors


def test_gpt2_xl_has_the_published_size():
    assert shapes.gpt2_xl().total == pytest.approx(1.5576e9, rel=1e-3)
    assert shapes.gpt2_xl().distinct.total < 2e8
