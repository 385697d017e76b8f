"""log Z, the normalising constant, which the energy leaves out.

In: a plan, and the shape of one data point. Out: an :class:`~ebflow_plugin.log_z.estimate.Estimate`: exact and cached
until a parameter changes, by Lanczos quadrature, by importance sampling, or by annealing, with its standard error.
"""
