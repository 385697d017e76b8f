"""The adapter for toy_library: all that ebf.wrap() needs to know about it."""

import torch

from ebflow_plugin.adapting import Adapter, Base, MatrixStep, NonlinearStep, OpaqueStep, Plan, Smoothness
from ebflow_plugin.errors import UnsupportedStepError


class MixStep(MatrixStep):  # linear: says where W is; products, determinants and solves are the core's
    def weight(self):
        return self.module.matrix


class Calls:  # how the library calls a layer, and the form of its log-det
    def call_forward(self, x, context):
        return self.module(x)

    def call_inverse(self, y, context):
        x = self.module.inverse(y)
        return x, -self.module(x)[1]


class SinhStep(Calls, NonlinearStep):  # smooth, as every known step is by default
    reason = "elementwise"


class UnknownStep(Calls, OpaqueStep):  # an unknown class: its own log-det, and one warning
    pass


class NormalBase(Base):
    smoothness = Smoothness.SMOOTH  # otherwise SSM warns that its score may jump

    def log_prob(self, latents, context):
        return self.module.log_prob(latents[0])

    def sample(self, n, context, like):
        return (torch.randn(n, self.module.features, device=like.device, dtype=like.dtype),)


RULES = {"Mix": MixStep, "Sinh": SinhStep}  # by exact class; a class that only composes others is a Container


class ToyAdapter(Adapter):
    name = "toy_library"
    flows = "Flow objects of toy_library"
    models = ("Flow",)
    packages = ("toy_library",)
    rules = RULES
    opaque = UnknownStep

    def plan(self, flow, overrides=None):
        self.refuse_own_density(flow)
        overrides = self.check_overrides(overrides, flow)
        members = ((f"layers.{index}", layer) for index, layer in enumerate(flow.layers))
        steps = [step for path, layer in members for step in self.walk(layer, path, False, overrides)]
        return Plan(tuple(steps), NormalBase(flow.base, "base", ((flow.base.features,),)), adapter=self.name)

    def full_layer(self, features, images):  # for unconstrain() and its `constrained` classes, of which there are none
        raise UnsupportedStepError("toy_library has no linear layers to replace")

    def inverse_of(self, module):
        raise UnsupportedStepError("toy_library runs no layer backwards")


ADAPTER = ToyAdapter()
