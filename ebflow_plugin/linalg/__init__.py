"""Linear algebra: what a linear step needs, with no notion of a flow.

In: matrices and convolutions, as weights or as products with vectors. Out: log-determinants, solves, estimates; the
memo that keeps a factorisation until its tensors change; random vectors on the device of a generator.
"""
