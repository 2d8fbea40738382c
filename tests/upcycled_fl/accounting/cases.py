"""The settings that the tests of the clients' accountants share."""

from upcycled_fl.accounting import (
    Accountant,
    Conversion,
    ExactMinimiser,
    ObjectivePerturbation,
    OutputPerturbation,
    ResidualNoise,
    compute_objective_epsilon,
    compute_output_epsilon,
)

PUBLISHED, AVERAGE, PROVEN = Accountant
MOMENTS, ANALYTIC = Conversion
# The paper's synthetic data: 224 examples a client on average, 80 odd steps.
RUN = dict(num_examples=224, num_releases=80, delta=1e-3)
OUTPUT = OutputPerturbation(l2_clip=10.0, local_stddev=0.8)
EXACT = ExactMinimiser(lipschitz=1.0, mu=0.1, gradient_tolerance=1e-9)
RESIDUAL = ResidualNoise(gradient_tolerance=1e-9, rate=1e5)
OBJECTIVE = ObjectivePerturbation(noise_rate=20.0, mu=0.1, residual=RESIDUAL)
PAIRS = [
    (PUBLISHED, MOMENTS),
    (AVERAGE, MOMENTS),
    (AVERAGE, ANALYTIC),
    (PROVEN, MOMENTS),
    (PROVEN, ANALYTIC),
]


def compute_output(accountant, conversion=MOMENTS, perturbation=OUTPUT, **changes):
    return compute_output_epsilon(
        perturbation,
        accountant=accountant,
        conversion=conversion,
        **(RUN | changes),
    )


def compute_objective(accountant, perturbation=OBJECTIVE, **changes):
    arguments = dict(num_examples=224, num_releases=80) | changes
    return compute_objective_epsilon(perturbation, accountant=accountant, **arguments)
