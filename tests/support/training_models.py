"""Small flows for the tests of the training loop, and what they share."""

import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear, SmoothLeakyReLU

TIMING = ("seconds", "steps_per_second")


def make_model(size=4, seed=0, actnorm=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    steps = [transforms.ActNorm(size)] if actnorm else []
    steps += [
        FullLinear(size, init="orthogonal", generator=generator),
        SmoothLeakyReLU(0.3),
        FullLinear(size, init="orthogonal", generator=generator),
    ]
    flow = flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([size]))
    return ebf.wrap(flow.to(dtype))


def coupling_model(context=None, hidden=8):
    torch.manual_seed(0)

    def net(inputs, outputs):
        return nets.ResidualNet(
            inputs, outputs, hidden_features=hidden, context_features=context, num_blocks=1, activation=torch.tanh
        )

    coupling = transforms.AffineCouplingTransform(torch.tensor([1, 0, 1, 0]), net)
    return ebf.wrap(flows.Flow(coupling, distributions.StandardNormal([4])))


def make_data(rows=200, size=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=torch.Generator().manual_seed(99))
    return (torch.randn(rows, size, generator=generator) @ mixing).to(dtype)


def without_timing(records):
    return [{name: value for name, value in record.items() if name not in TIMING} for record in records]


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
