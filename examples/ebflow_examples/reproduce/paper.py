"""The numbers of the paper, as (mean, half-width of the 95 % interval)."""

from __future__ import annotations

__all__ = ["ABLATION", "ANCHORS", "IMAGES", "LOG_Z", "PLANE", "RELATED", "THROUGHPUT"]

Number = tuple[float, float]

#: Table 1: data set -> metric -> objective.
PLANE: dict[str, dict[str, dict[str, Number]]] = {
    "sine": {
        "fisher": {
            "ml": (0.686, 0.073), "sml": (0.665, 0.105), "ssm": (0.625, 0.084), "dsm": (0.666, 0.044),
            "fdssm": (0.666, 0.133),
        },
        "kl": {
            "ml": (4.56, 0.00), "sml": (4.56, 0.00), "ssm": (4.56, 0.01), "dsm": (4.57, 0.02),
            "fdssm": (4.57, 0.01),
        },
    },
    "swirl": {
        "fisher": {
            "ml": (1.42, 0.48), "sml": (1.42, 0.53), "ssm": (1.35, 0.10), "dsm": (1.34, 0.06), "fdssm": (1.37, 0.07),
        },
        "kl": {
            "ml": (4.21, 0.00), "sml": (4.21, 0.01), "ssm": (4.25, 0.04), "dsm": (4.22, 0.02),
            "fdssm": (4.25, 0.08),
        },
    },
    "checkerboard": {
        "fisher": {
            "ml": (72.4, 115.0), "sml": (1.23, 0.75), "ssm": (0.707, 0.193), "dsm": (0.703, 0.199),
            "fdssm": (0.708, 0.162),
        },
        "kl": {
            "ml": (4.80, 0.02), "sml": (4.81, 0.02), "ssm": (4.85, 0.05), "dsm": (4.82, 0.05),
            "fdssm": (4.83, 0.03),
        },
    },
}  # fmt: skip

#: Table 2: data -> model -> objective -> NLL of the converged model.
IMAGES: dict[str, dict[str, dict[str, Number]]] = {
    "mnist": {
        "fc": {
            "ml": (1092.4, 0.1), "sml": (1092.3, 0.6), "ssm": (1092.8, 0.3), "dsm": (1099.2, 0.2),
            "fdssm": (1104.1, 0.5),
        },
        "cnn": {
            "ml": (1101.3, 1.3), "sml": (1098.3, 6.6), "ssm": (1107.5, 1.4), "dsm": (1109.5, 2.4),
            "fdssm": (1122.1, 3.1),
        },
    },
    "cifar10": {
        "fc": {
            "ml": (11912.9, 10.5), "sml": (11915.6, 5.6), "ssm": (11917.7, 15.5), "dsm": (11940.0, 6.6),
            "fdssm": (12347.8, 6.8),
        },
        "cnn": {
            "ml": (11408.7, 26.7), "sml": (11553.6, 151.7), "ssm": (11435.5, 12.0), "dsm": (11462.3, 7.9),
            "fdssm": (11766.0, 36.8),
        },
    },
}  # fmt: skip

#: Table 2: data -> model -> objective -> batches per second on a V100.
THROUGHPUT: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "fc": {"ml": 8.00, "sml": 12.27, "ssm": 33.11, "dsm": 66.67, "fdssm": 130.21},
        "cnn": {"ml": 0.21, "sml": 0.29, "ssm": 7.09, "dsm": 18.32, "fdssm": 38.76},
    },
    "cifar10": {
        "fc": {"ml": 5.05, "sml": 7.35, "ssm": 29.85, "dsm": 57.14, "fdssm": 62.50},
        "cnn": {"ml": 0.02, "sml": 0.03, "ssm": 7.35, "dsm": 18.41, "fdssm": 39.84},
    },
}

#: Others' models, in bits/dim, by data: Papamakarios et al. (2017), with margin 1e-6 on MNIST and 0.05 on CIFAR-10.
ANCHORS: dict[str, dict[str, float]] = {
    "mnist": {"a Gaussian (Papamakarios et al. 2017)": 2.01, "MAF (Papamakarios et al. 2017)": 1.89},
    "cifar10": {"MAF, margin 0.05 (Papamakarios et al. 2017)": 4.31},
}

#: Table 3: model -> (EMA, MaP) -> objective -> NLL. It has no row for MaP without EMA.
ABLATION: dict[str, dict[tuple[bool, bool], dict[str, Number]]] = {
    "fc": {
        (False, False): {"ssm": (1757.5, 28.0), "dsm": (4660.3, 19.8), "fdssm": (3267.0, 99.2)},
        (True, False): {"ssm": (1720.5, 0.8), "dsm": (4455.0, 1.6), "fdssm": (3166.3, 17.3)},
        (True, True): {"ssm": (1092.8, 0.3), "dsm": (1099.2, 0.2), "fdssm": (1104.1, 0.5)},
    },
    "cnn": {
        (False, False): {"ssm": (3518.0, 33.9), "dsm": (3170.0, 7.2), "fdssm": (3593.3, 12.5)},
        (True, False): {"ssm": (3504.5, 2.4), "dsm": (3180.0, 2.9), "fdssm": (3560.3, 1.7)},
        (True, True): {"ssm": (1107.5, 1.4), "dsm": (1109.5, 2.6), "fdssm": (1122.1, 3.1)},
    },
}

#: Table 4: NLL by objective; the relative gradient's is from Gresele et al.
RELATED: dict[str, Number] = {**IMAGES["mnist"]["fc"], "ml_relative": (1375.2, 1.4)}

#: Fig. 4: NLL of the Glow.
GLOW = 728.0

#: Table A.3: M -> D -> error rate of importance sampling.
LOG_Z: dict[int, dict[int, float]] = {
    50: {50: 0.004211, 100: 0.099940, 200: 0.355314},
    100: {50: 0.003503, 100: 0.034608, 200: 0.076239},
    200: {50: 0.002332, 100: 0.015411, 200: 0.011175},
}
