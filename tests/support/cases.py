"""Every case there is. A test takes what it needs: `pytest.mark.parametrize("case", SUPPORTED, ids=str)`."""

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
    "perturb",
    "seeded",
    "set_running_stats",
]

CASES: tuple[Case, ...] = (*NFLOWS_CASES, *NFLOWS_MODELS, *NORMFLOWS_CASES, *NORMFLOWS_MODELS, *ZUKO_CASES)
SUPPORTED = tuple(case for case in CASES if case.supported)
REFUSED = tuple(case for case in CASES if case.expect == "refused")
BROKEN = tuple(case for case in CASES if case.expect == "broken")
