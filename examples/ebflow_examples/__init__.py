"""The example CLI ``ebflow``: demo, inspect, train, eval, sample, impute, density, profile, bench and reproduce.

``ebflow --help`` shows the commands; ``python -m ebflow_examples`` is the same.
"""
