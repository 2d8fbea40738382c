"""Privacy accounting: what a mechanism costs, and how much noise a target needs.

NumPy, SciPy and dp-accounting only; no TensorFlow.
"""

from distributed_dp.accounting.amplification import (
    amplify_fixed_replace_one,
    amplify_poisson_published,
    amplify_poisson_symmetric,
)
from distributed_dp.accounting.calibration import calibrate, compute_granularity
from distributed_dp.accounting.cohort import (
    CohortBounds,
    CohortScheme,
    compute_cohort_bounds,
)
from distributed_dp.accounting.conversion import (
    EpsilonAtOrder,
    calibrate_analytic_gaussian,
    compute_delta_analytic_gaussian,
    compute_epsilon_analytic_gaussian,
    compute_epsilon_from_rdp,
    compute_epsilon_from_zcdp,
)
from distributed_dp.accounting.parameters import (
    Accountant,
    Accounting,
    AmplificationBound,
    DDGaussParameters,
    DistributedParameters,
    GaussianParameters,
    Mechanism,
    NormBound,
    Parameters,
    Sampling,
    SkellamParameters,
    compute_max_squared_norm,
)
from distributed_dp.accounting.pld import compute_epsilon_pld
from distributed_dp.accounting.privacy import compute_privacy, compute_server_privacy
from distributed_dp.accounting.rdp import (
    compute_closeness,
    compute_rdp_ddgauss,
    compute_rdp_gaussian,
    compute_rdp_skellam,
    compute_tau,
    compute_zcdp_ddgauss,
)
from distributed_dp.accounting.sampler import SAMPLER_TOTAL_VARIATION
from distributed_dp.accounting.statement import AS_PUBLISHED_WORDS, PrivacyStatement
from distributed_dp.accounting.utility import (
    compute_coordinate_stddev,
    compute_utility_bound,
    compute_wraparound_probability,
)

__all__ = [
    "AS_PUBLISHED_WORDS",
    "Accountant",
    "Accounting",
    "AmplificationBound",
    "CohortBounds",
    "CohortScheme",
    "DDGaussParameters",
    "DistributedParameters",
    "EpsilonAtOrder",
    "GaussianParameters",
    "Mechanism",
    "NormBound",
    "Parameters",
    "PrivacyStatement",
    "SAMPLER_TOTAL_VARIATION",
    "Sampling",
    "SkellamParameters",
    "amplify_fixed_replace_one",
    "amplify_poisson_published",
    "amplify_poisson_symmetric",
    "calibrate",
    "calibrate_analytic_gaussian",
    "compute_closeness",
    "compute_cohort_bounds",
    "compute_coordinate_stddev",
    "compute_delta_analytic_gaussian",
    "compute_epsilon_analytic_gaussian",
    "compute_epsilon_from_rdp",
    "compute_epsilon_from_zcdp",
    "compute_epsilon_pld",
    "compute_granularity",
    "compute_max_squared_norm",
    "compute_privacy",
    "compute_rdp_ddgauss",
    "compute_rdp_gaussian",
    "compute_rdp_skellam",
    "compute_server_privacy",
    "compute_tau",
    "compute_utility_bound",
    "compute_wraparound_probability",
    "compute_zcdp_ddgauss",
]
