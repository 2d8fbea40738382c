"""CENTAUR's linear representation learning: section 5 and algorithm 3 of the paper.

Data flow. `users` says who takes part (`LinearProblem`), which examples a phase may see
(`Subsets`), and makes client values: blocks of users. `client_work` computes every
user's contribution to every matrix of a stack, and clips it. `mechanism` adds the
server's noise to the sum. `process` makes one TFF computation of these, a release:

    stack --broadcast--> work, clip, sum --noise, / n--> update --> next stack

`power_method` (the start), `alternation` (the rounds) and `baselines` are such
processes, which the execution engine runs. `selection` chooses among a start's trials.
`training` runs a start and the rounds after it, and writes both into one ledger of
`accounting`, which says what the ledger costs. `geometry` has the distance to B*, and
`measurement` fits the laws of what was measured.
"""

from centaur.linear.accounting import (
    Adjacency,
    Noise,
    ReleaseLedger,
    Releases,
    calibrate_noise,
    compute_epsilon,
    compute_statement,
)
from centaur.linear.alternation import build_alternation
from centaur.linear.baselines import build_normal_equations, build_whole_matrix
from centaur.linear.geometry import (
    compute_distance,
    orthonormalize,
    sample_orthonormal,
)
from centaur.linear.measurement import (
    PowerLaw,
    Rate,
    compute_contraction,
    compute_floor,
    compute_rate,
    fit_power_law,
)
from centaur.linear.mechanism import StackedGaussianFactory
from centaur.linear.power_method import build_power_method
from centaur.linear.process import Step, build_process, run_releases
from centaur.linear.selection import (
    NoMajorityError,
    Selection,
    compute_radius,
    select_trials,
)
from centaur.linear.training import (
    RoundsConfig,
    Start,
    StartConfig,
    Trajectory,
    run_process,
    run_rounds,
    run_start,
)
from centaur.linear.users import (
    Examples,
    GeneratedUsers,
    LinearProblem,
    StoredUsers,
    Subsets,
    Users,
    build_block_seeds,
)

__all__ = [
    "Adjacency",
    "Examples",
    "GeneratedUsers",
    "LinearProblem",
    "NoMajorityError",
    "Noise",
    "PowerLaw",
    "Rate",
    "ReleaseLedger",
    "Releases",
    "RoundsConfig",
    "Selection",
    "StackedGaussianFactory",
    "Start",
    "StartConfig",
    "Step",
    "StoredUsers",
    "Subsets",
    "Trajectory",
    "Users",
    "build_alternation",
    "build_block_seeds",
    "build_normal_equations",
    "build_power_method",
    "build_process",
    "build_whole_matrix",
    "calibrate_noise",
    "compute_contraction",
    "compute_distance",
    "compute_epsilon",
    "compute_floor",
    "compute_radius",
    "compute_rate",
    "compute_statement",
    "fit_power_law",
    "orthonormalize",
    "run_process",
    "run_releases",
    "run_rounds",
    "run_start",
    "sample_orthonormal",
    "select_trials",
]
