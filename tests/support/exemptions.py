"""Which models are exempt from a contract because a library's own code breaks it: by the names of its classes."""

# Classes of the libraries whose own code asks for values: splines (masks, a look for input outside of the domain),
# normflows' Residual (a fixed-point iteration, a random series), and networks of normflows that start themselves.
ASKING = frozenset(
    [
        *(f"Piecewise{shape}CDF" for shape in ("Linear", "Quadratic", "Cubic", "RationalQuadratic")),
        *(f"Piecewise{shape}CouplingTransform" for shape in ("Linear", "Quadratic", "Cubic", "RationalQuadratic")),
        *(
            f"MaskedPiecewise{shape}AutoregressiveTransform"
            for shape in ("Linear", "Quadratic", "Cubic", "RationalQuadratic")
        ),
        "PiecewiseRationalQuadraticCoupling",
        "MaskedPiecewiseRationalQuadraticAutoregressive",
        "Residual",
    ]
)


def asking(model):
    """The exempt classes of a model: of its steps, and ActNorms inside of a network."""
    nonlinear = [step.module for step in model.plan.steps if step.linearity != "linear"]
    inside = {type(part).__name__ for module in nonlinear for part in module.modules()}
    return inside & (ASKING | {"ActNorm"})
