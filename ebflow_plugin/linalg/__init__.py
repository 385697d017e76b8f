"""Linear algebra for linear steps, independent of flows.

In: matrices and convolutions, as weights or as products with vectors. Out: log-determinants, solves, estimates; the
memo that caches a factorisation until its tensors change; random vectors on the device of a generator.
"""
