"""What an installation with one flow library alone, or none, can do, and what says that it is missing.

Usage: smoke.py nflows|normflows|zuko|none, in an environment with this library and no other.
"""

import importlib
import subprocess
import sys
from importlib.util import find_spec

import torch

import ebflow_plugin as ebf

LIBRARIES = ("nflows", "normflows", "zuko")


def nflows():
    from nflows import distributions, flows

    from ebflow_nflows import FullLinear

    return flows.Flow(FullLinear(3), distributions.StandardNormal([3]))


def normflows():
    from normflows import NormalizingFlow
    from normflows.distributions import DiagGaussian

    from ebflow_normflows import FullLinear

    return NormalizingFlow(DiagGaussian(3), [FullLinear(3)])


def zuko():
    from zuko.flows import MAF

    return MAF(3, transforms=1)


def check_present(library):
    """Wraps, verifies and trains a flow of the library."""
    flow = globals()[library]().double()
    x = torch.randn(20, 3, dtype=torch.float64)
    print(ebf.verify(flow, x))
    model = ebf.wrap(flow)
    ebf.fit(ebf.objectives.DSM(model), x, steps=2, batch_size=10, progress=False)
    print(f"{library}: {model.log_prob(x).mean():.3f}, sample {tuple(model.sample(2).shape)}")


def check_missing(library):
    """The layers of a missing library, and wrap(), say what to install."""
    layers = importlib.import_module(f"ebflow_{library}")
    try:
        layers.FullLinear(3)
    except ebf.errors.AdapterError as error:
        assert f"pip install {library}" in str(error) or f"[{library}]" in str(error), error
    else:
        raise AssertionError(f"FullLinear of {library} was made without it")
    try:
        ebf.wrap(torch.nn.Linear(2, 2))
    except ebf.errors.NotAFlowError as error:
        assert f"pip install {library}" in str(error), error
        print(f"missing {library}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("a Linear was wrapped")


def main():
    present = sys.argv[1]
    for library in LIBRARIES:
        assert (find_spec(library) is not None) == (library == present), f"{library} is not as told"
        (check_present if library == present else check_missing)(library)
    command = [sys.executable, "-m", "ebflow_examples", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    assert "ebflow-plugin[examples]" in said, said
    print(said)


if __name__ == "__main__":
    main()
