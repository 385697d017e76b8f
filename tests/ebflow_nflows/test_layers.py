"""What the report says of the determinants of our layers. The layers: tests/ebflow_plugin/layers."""

import pytest
import torch
from nflows import distributions, flows, transforms

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d
from ebflow_plugin.adapting.rules import REGISTERED


@pytest.mark.parametrize(
    ("options", "shape", "said", "size"),
    [
        ({"kernel_size": 1}, (4, 14, 14), "1 determinant of 4 × 4", 4),
        ({"kernel_size": 3}, (4, 14, 14), "1 banded determinant of 784 × 784", 784),
        ({"kernel_size": 3, "padding_mode": "circular"}, (4, 5, 5), "25 determinants of 4 × 4", 4),
        ({"kernel_size": 1, "groups": 2}, (4, 5, 5), "2 determinants of 2 × 2", 2),
        ({"kernel_size": 3}, (4, 3, 3), "1 determinant of 36 × 36", 36),
    ],
)
def test_the_determinants_of_convolutions_are_those_that_are_computed(options, shape, said, size, monkeypatch):
    layer = FullConv2d(shape[0], **options)
    flow = flows.Flow(layer, distributions.StandardNormal(shape))
    assert f"energy() skips {said};" in ebf.describe(flow).summary
    seen = []
    slogdet = torch.linalg.slogdet
    monkeypatch.setattr(torch.linalg, "slogdet", lambda matrix: seen.append(matrix.shape[-1]) or slogdet(matrix))
    layer.log_det(shape)
    assert "banded" in said or set(seen) == {size}


def test_the_report_never_denies_a_determinant_that_a_row_names():
    class Unseen(transforms.Transform):
        def forward(self, inputs, context=None):
            return inputs, inputs.new_zeros(len(inputs))

    layers = transforms.CompositeTransform([Unseen(), FullConv2d(2, kernel_size=3)])
    report = ebf.describe(flows.Flow(layers, distributions.StandardNormal([2, 4, 4])))
    assert report.rows[1].log_det_cost == "D × D determinant"
    assert "energy() skips 1 determinant of D × D;" in report.summary
    ebf.register_linear(Unseen, cost="256 × 256 determinant")
    try:
        report = ebf.describe(flows.Flow(Unseen(), distributions.StandardNormal([256])))
        assert "no dense determinant" not in report.summary
    finally:
        REGISTERED.pop(Unseen, None)
