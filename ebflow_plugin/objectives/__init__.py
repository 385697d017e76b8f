"""Objectives: losses of an EBFlow, each an ``nn.Module`` that is called on a batch.

    objective = SSM(model)              # or make_objective("ssm", model)
    loss = objective(x)                 # a scalar; loss.backward() fills the gradients of the flow's parameters
    loss = objective(x, weights=w)      # of rows with weights

=========== ============================================================== ==================================
name        formula (sum over dimensions, mean over the batch)             a training step costs
=========== ============================================================== ==================================
ML          E[E(x)] + log Z                                                determinants: O(D³); with
                                                                           log_det="stochastic" products,
                                                                           "relative" O(D²)
SML         E_data[E(x)] - E_model[E(x)]                                   solves: O(D³), one energy of 2B
SM          E[½‖∇E‖² - tr ∇²E]                                             D Hessian products
SSM         ½ E‖∇E‖² - E[vᵀ∇²E v]                                          one Hessian product
FDSSM       D/ε² · E[2E - E₊ - E₋ + ⅛(E₊ - E₋)²]                           one energy of 3B
DSM         ½ E‖∇E(x̃) + (x - x̃)/σ²‖²                                       one gradient
LatentMatch 2 E‖z - r‖ - E‖z - z'‖ - E‖r - r'‖, z = g(x), r ~ p_u          one pass to the latents, B² distances
ReverseKL   E_model[log q(x) - log f(x)] of a target f, without data        solves: O(D³), one gradient
=========== ============================================================== ==================================
"""

from __future__ import annotations

from ebflow_plugin.objectives.base import Objective, WeightedSum
from ebflow_plugin.objectives.latent_match import LatentMatch
from ebflow_plugin.objectives.likelihood import ML, SML
from ebflow_plugin.objectives.registration import make_objective, register_objective
from ebflow_plugin.objectives.reverse import ReverseKL
from ebflow_plugin.objectives.schedule import NoiseSchedule
from ebflow_plugin.objectives.score_matching import DSM, FDSSM, SM, SSM

__all__ = [
    "DSM",
    "FDSSM",
    "ML",
    "SM",
    "SML",
    "SSM",
    "LatentMatch",
    "NoiseSchedule",
    "Objective",
    "ReverseKL",
    "WeightedSum",
    "make_objective",
    "register_objective",
]
