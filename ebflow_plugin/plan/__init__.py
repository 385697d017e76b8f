"""The plan of a flow, from which its energy is computed: the heart of the library.

In: the modules of a user's flow, classified by an adapter. Out: a :class:`~ebflow_plugin.plan.plan.Plan`, the
ordered steps from data to noise and the base density; it computes energies, latents, samples and log-determinants.
Start reading at ``plan.py``; the kinds of steps are in ``linear.py``, ``matrices.py`` and ``elementwise.py``.
"""
