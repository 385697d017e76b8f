"""Fits in closed form, without a gradient.

In: a plan, and data as a stream of batches. Out: moments; full layers initialised to a whitening or Gaussianising map;
the calibration of the base after training.
"""
