"""Random numbers that are the same in every run."""

import torch


def rng(seed=0):
    """A generator for the CPU."""
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    """Standard normal numbers."""
    return torch.randn(*shape, generator=rng(seed), dtype=dtype)
