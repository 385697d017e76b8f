"""What can be reproduced, by the name that is typed."""

from __future__ import annotations

__all__ = ["EXPERIMENTS", "OWN_DATA", "WHATS"]

EXPERIMENTS = {
    "table1": "Table 1 and Fig. 1: divergences and densities on sine, swirl and checkerboard",
    "table2": "Table 2: NLL and steps per second of fc and cnn on images, the paper's way and ours, in equal time",
    "fig2": "Fig. 2: step time against D, NLL against training time",
    "table3": "Table 3 and Fig. 3: what EMA and MaP do, and the norm of the gradient",
    "table4": "Table 4: against the relative gradient, in equal time",
    "fig4": "Fig. 4: images drawn from a Glow that was trained by score matching",
    "fig5": "Fig. 5: imputation by Langevin steps",
    "tableA3": "Table A.3: estimates of log Z",
    "deep": "deep models fitted in closed form, beside the paper's fc: NLL and seconds, no gradient step",
    "figA4": "Fig. A.4: full linear layers against triangular and LU ones",
    "dequantization": "Uniform and smooth noise between the grey levels, in equal time",
    "glow": "A Glow with 3 x 3 in the place of 1 x 1 convolutions, in equal time on CIFAR-10",
    "race": "A race to a known floor: objectives in equal time on textures, D = 3072",
}
OWN_DATA = ("table1", "tableA3", "figA4", "glow", "race")  # whose data are fixed
WHATS = {**EXPERIMENTS, "all": "all of these in turn", "report": "RESULTS.md from what is there"}
