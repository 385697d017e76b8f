"""log Z, the normalising constant, which the energy leaves out.

In: a plan, or a model, and the shape of one data point. Out: the exact value, cached until a parameter changes; or an
:class:`~ebflow_plugin.log_z.estimate.Estimate` with its standard error, by Lanczos quadrature or importance sampling.
"""
