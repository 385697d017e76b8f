"""bench launches: what counts as a kernel, and that ours launches no more than a step by hand."""

import torch

from ebflow_examples.bench.launches import count, launches
from ebflow_examples.bench.results import Settings

MORE = {"fc ML": 2}  # a sum over layers, where somebody by hand subtracts two numbers


def test_views_and_empty_tensors_launch_nothing():
    x = torch.ones(2, 3)
    assert count(lambda: x.mT[0].expand(4, 2).detach()) == 0
    assert count(lambda: torch.empty_like(x)) == 0
    assert count(lambda: (x * 2).exp().sum()) == 3


def test_ours_launches_no_more_than_by_hand():
    (table,) = launches(Settings(progress=lambda *_: None))
    counts = {row["step"]: row for row in table.rows}
    assert {"fc SSM", "fc DSM", "fc FDSSM", "fc ML", "cnn SSM", "cnn DSM", "cnn FDSSM"} <= set(counts)
    for step, row in counts.items():
        if row["by hand"] is not None:
            assert row["ours"] <= row["by hand"] + MORE.get(step, 0), row
