"""Example-level privacy of every client of Upcycled-FL, by three named accountants.

NumPy, SciPy and dp-accounting only; no TensorFlow.
"""

from upcycled_fl.accounting.calibration import (
    EpsilonTarget,
    calibrate_objective_perturbation,
    calibrate_output_perturbation,
)
from upcycled_fl.accounting.epsilon import (
    choose_conversion,
    compute_objective_epsilon,
    compute_output_epsilon,
    compute_output_sensitivity,
)
from upcycled_fl.accounting.parameters import (
    LOGISTIC_LOSS,
    SOFTMAX_LOSS,
    Accountant,
    Conversion,
    ExactMinimiser,
    LinearModelLoss,
    ObjectiveBound,
    ObjectivePerturbation,
    OutputPerturbation,
    Perturbation,
    ResidualNoise,
    check_feature_norms,
)
from upcycled_fl.accounting.privacy import compute_privacy
from upcycled_fl.accounting.releases import (
    ServerRule,
    count_client_releases,
    count_server_releases,
)
from upcycled_fl.accounting.statement import (
    AS_PUBLISHED_OBJECTIVE_WORDS,
    AS_PUBLISHED_OUTPUT_WORDS,
    AVERAGING_WORDS,
    ClientPrivacyStatement,
)

__all__ = [
    "AS_PUBLISHED_OBJECTIVE_WORDS",
    "AS_PUBLISHED_OUTPUT_WORDS",
    "AVERAGING_WORDS",
    "Accountant",
    "ClientPrivacyStatement",
    "Conversion",
    "EpsilonTarget",
    "ExactMinimiser",
    "LOGISTIC_LOSS",
    "LinearModelLoss",
    "SOFTMAX_LOSS",
    "ObjectiveBound",
    "ObjectivePerturbation",
    "OutputPerturbation",
    "Perturbation",
    "ResidualNoise",
    "ServerRule",
    "calibrate_objective_perturbation",
    "calibrate_output_perturbation",
    "check_feature_norms",
    "choose_conversion",
    "compute_objective_epsilon",
    "compute_output_epsilon",
    "compute_output_sensitivity",
    "compute_privacy",
    "count_client_releases",
    "count_server_releases",
]
