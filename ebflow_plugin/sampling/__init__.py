"""Sampling.

In: a model and a generator. Out: Langevin chains by the score, imputed and denoised data; samples of the model with
weights for an unnormalised target density.
"""
