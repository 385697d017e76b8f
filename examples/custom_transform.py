"""Register a transform of your own that is linear in x: training then needs no determinant of it.

    python examples/custom_transform.py   # about 10 seconds on one core, on time series made here, D = 256

The transform is a filter of time series, a convolution with zeros beyond the ends. The map costs D multiplications for
each tap, its log-det the determinant of a D x D Toeplitz matrix. A class that nobody registered keeps its own log-det:
exact, only slower. The series come from such a filter run backwards, so that the NLL has a known goal.
"""

import os
import time
import warnings

import torch
from nflows import distributions, flows, transforms
from torch import Tensor, nn

import ebflow_plugin as ebf

STEPS, D = 5 if os.environ.get("EBFLOW_SMOKE") else 400, 256
torch.manual_seed(0)


class Filter(transforms.Transform):
    """y[t] = sum over k of taps[k] x[t + k - 3]."""

    def __init__(self, taps: Tensor) -> None:
        super().__init__()
        self.taps = nn.Parameter(taps)

    def convolve(self, x: Tensor) -> Tensor:
        """The map, without its log-det."""
        return nn.functional.conv1d(x[:, None], self.taps[None, None], padding="same")[:, 0]

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The map and its log-det, as nflows wants them."""
        return self.convolve(x), torch.linalg.slogdet(self.convolve(torch.eye(D).to(x)))[1].expand(len(x))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The inverse and its log-det, for samples. Row i of the matrix is the image of the unit vector i."""
        matrix = self.convolve(torch.eye(D).to(y))
        return torch.linalg.solve(matrix, y, left=False), -torch.linalg.slogdet(matrix)[1].expand(len(y))


taps = torch.eye(7)[3], torch.tensor([0.0, 0.05, -0.5, 1.0, -0.5, 0.05, 0.0])
flow, teacher = (flows.Flow(Filter(start), distributions.StandardNormal([D])) for start in taps)
with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # the warning tells that Filter is not known
    train, test, unknown = teacher.sample(2500), teacher.sample(500), ebf.wrap(flow)
ebf.register_linear(Filter, apply=Filter.convolve, cost=f"{D} × {D} determinant")
model = ebf.wrap(flow)
print(f"{model.report}\n\nsame log_prob: {torch.allclose(unknown.log_prob(test), model.log_prob(test))}")
for name, energy in (("unknown", unknown.energy), ("registered", model.energy)):
    start, _ = time.perf_counter(), [energy(test) for _ in range(20)]
    print(f"energy of {len(test)} series, {name:10} {(time.perf_counter() - start) / 20 * 1000:6.2f} ms")
print(
    f"{len(ebf.verify(model, test[:4]).checks)} checks hold\nNLL before {-model.log_prob(test).mean():.2f}", flush=True
)
ebf.fit(ebf.objectives.SSM(model), train, steps=STEPS, optimizer=lambda p: torch.optim.Adam(p, 0.02), progress=False)
print(f"NLL after  {-model.log_prob(test).mean():.2f}, of the true density {-teacher.log_prob(test).mean():.2f}")
print("taps      ", *(f"{tap:.2f}" for tap in flow._transform.taps))
