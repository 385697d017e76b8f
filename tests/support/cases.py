"""Every case there is. A test takes what it needs: `pytest.mark.parametrize("case", SUPPORTED, ids=str)`."""

from collections.abc import Iterable

import pytest

from case import Case, perturb, seeded, set_running_stats
from nflows_cases import NFLOWS_CASES
from nflows_models import NFLOWS_MODELS
from normflows_cases import NORMFLOWS_CASES
from normflows_models import NORMFLOWS_MODELS
from zuko_cases import ZUKO_CASES

__all__ = [
    "BROKEN",
    "CASES",
    "NFLOWS_CASES",
    "NFLOWS_MODELS",
    "NORMFLOWS_CASES",
    "NORMFLOWS_MODELS",
    "REFUSED",
    "SUPPORTED",
    "ZUKO_CASES",
    "Case",
    "first_of_each_class",
    "perturb",
    "seeded",
    "set_running_stats",
]

CASES: tuple[Case, ...] = (*NFLOWS_CASES, *NFLOWS_MODELS, *NORMFLOWS_CASES, *NORMFLOWS_MODELS, *ZUKO_CASES)
SUPPORTED = tuple(case for case in CASES if case.supported)
REFUSED = tuple(case for case in CASES if case.expect == "refused")
BROKEN = tuple(case for case in CASES if case.expect == "broken")


def first_of_each_class(cases: Iterable[Case]) -> list[object]:
    """The same cases for a parametrize; all but the first of each class and rank of events are marked slow.

    For what depends on the code of a class, and hardly on its options.
    """
    seen: set[tuple[str, int]] = set()
    marked: list[object] = []
    for case in cases:
        kind = case.name.split(":")[0], len(case.event_shape)
        marked.append(pytest.param(case, marks=pytest.mark.slow, id=str(case)) if kind in seen else case)
        seen.add(kind)
    return marked
