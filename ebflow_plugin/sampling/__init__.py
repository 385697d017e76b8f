"""Sampling, and estimates from samples.

In: a model, or its plan, and a generator. Out: samples by the inverse of each step, Langevin chains, imputed and
denoised data, divergences from a known density.
"""
