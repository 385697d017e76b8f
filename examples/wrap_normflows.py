"""Wrap a normflows Glow (multi-scale, on 8 x 8 images) and train it by denoising score matching.

    python examples/wrap_normflows.py     # about 40 seconds on one core; scikit-learn's digits; a picture in runs/

The images are integers 0 to 16. The steps in front make them continuous and unbounded, score matching sees what comes
after them (MaP), and bits/dim are those of the integers. Glow's networks have ReLUs, which DSM does not mind.
"""

import os
import warnings
from pathlib import Path

import normflows as nf
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import ebflow_plugin as ebf

warnings.filterwarnings("ignore", message=".*torch.lu is deprecated.*")  # normflows' 1 x 1 convolution
STEPS, BLOCKS = (3, 1) if os.environ.get("EBFLOW_SMOKE") else (500, 2)
torch.manual_seed(0)

digits = torch.tensor(load_digits().images[:, None], dtype=torch.float32)[torch.randperm(1797)]  # (1797, 1, 8, 8)
train, test = digits[:1500], digits[1500:]

levels = [[*(nf.flows.GlowBlock(channels, 32) for _ in range(BLOCKS)), nf.flows.Squeeze()] for channels in (8, 4)]
bases = [nf.distributions.DiagGaussian(shape) for shape in ((8, 2, 2), (2, 4, 4))]
glow = nf.MultiscaleFlow(bases, levels, [nf.flows.Merge()], class_cond=False)

model = ebf.wrap(glow, preprocess=[ebf.Dequantize(17), ebf.Rescale(0.05, 0.95), ebf.Logit()])
model.initialize(train)  # ActNorm, from clean data
print(model.report)
print(f"\n{len(ebf.verify(model, test[:4]).checks)} checks of this model hold on its own data\n", flush=True)


@torch.no_grad()
def bits(when: str) -> None:
    """Prints the exact bits/dim of the test images."""
    print(f"bits/dim {when:24} {model.bits_per_dim(test).mean():.3f}", flush=True)


bits("before")
dsm, adam = ebf.objectives.DSM(model, sigma=0.3), torch.optim.Adam(model.parameters(), lr=5e-3)
result = ebf.fit(dsm, train[200:], steps=STEPS, batch_size=100, optimizer=adam, validation=train[:200], ema=True)
result.load_best(model)
bits(f"after {STEPS} steps of DSM")
model.calibrate(train)  # the closed-form fit of the base; `glow` itself stays as it is
bits("calibrated")

figure, axes = plt.subplots(2, 10, figsize=(10, 2.2), layout="constrained")
images = torch.cat([test[:10], model.sample(10, generator=torch.Generator().manual_seed(0), temperature=0.8)])
for panel, image in zip(axes.flat, images, strict=True):
    panel.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=16)
    panel.axis("off")
Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/wrap_normflows.png", dpi=100)
print("test images, and samples below them, are in runs/wrap_normflows.png")
