"""The clients' accountants: closed forms, exact laws of worst cases, and limits."""

import dataclasses
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp as dp_rdp
from scipy import stats

from tests.upcycled_fl.accounting.cases import (
    ANALYTIC,
    AVERAGE,
    EXACT,
    MOMENTS,
    OBJECTIVE,
    OUTPUT,
    PAIRS,
    PROVEN,
    PUBLISHED,
    RESIDUAL,
    compute_objective,
    compute_output,
)
from upcycled_fl.accounting import (
    LOGISTIC_LOSS,
    Accountant,
    Conversion,
    ExactMinimiser,
    ObjectiveBound,
    ObjectivePerturbation,
    OutputPerturbation,
    ResidualNoise,
    compute_output_sensitivity,
)


def _integrate_delta(epsilon, distance):
    """The hockey stick of N(distance, 1) and N(0, 1), by quadrature."""
    with mpmath.workdps(30):
        distance, epsilon = mpmath.mpf(distance), mpmath.mpf(epsilon)
        start = (
            epsilon / distance + distance / 2
        )  # Where the densities' ratio is e^eps.
        return float(
            mpmath.quad(
                lambda x: (
                    mpmath.npdf(x, distance) - mpmath.exp(epsilon) * mpmath.npdf(x)
                ),
                [start, start + 1, start + 5, start + 40],
            )
        )


class TestOutput:
    def test_published_figures(self):
        """The issue's: C.1 says 1.98 where 25,831 is proven (2 sqrt(A log) + A).

        The exact Gaussian curve has 25,690: the same noise, a conversion without slack.
        """
        assert compute_output(PUBLISHED) == pytest.approx(1.98, abs=0.005)
        assert compute_output(AVERAGE) == pytest.approx(4.21, abs=0.005)
        assert compute_output(PROVEN) == pytest.approx(25_831, abs=0.5)
        assert compute_output(PROVEN, ANALYTIC) == pytest.approx(25_690, abs=0.5)

    def test_the_papers_saving(self):
        """Section 6: "12.0 % less privacy loss", at 80 server steps, sigma .8 and 1."""
        upcycled = compute_output(PUBLISHED, num_releases=40)
        louder = dataclasses.replace(OUTPUT, local_stddev=1.0)
        fedprox = compute_output(PUBLISHED, perturbation=louder)
        assert 1 - upcycled / fedprox == pytest.approx(0.120, abs=0.002)
        # At equal client rounds Upcycled's smaller noise costs more.
        assert compute_output(PUBLISHED) > fedprox

    def test_theorem_c1_both_ways(self):
        """delta = exp(-A (eps / (2 A) - 1/2)^2) gives delta back."""
        a = 80 * 10**2 / (2 * 0.8**2 * 224**2)
        epsilon = compute_output(PUBLISHED)
        assert epsilon == pytest.approx(2 * math.sqrt(a * math.log(1e3)) + a, rel=1e-14)
        found = math.exp(-a * (epsilon / (2 * a) - 0.5) ** 2)
        assert found == pytest.approx(1e-3, rel=1e-10)

    def test_sensitivities(self):
        def compute(accountant, perturbation=OUTPUT):
            return compute_output_sensitivity(
                perturbation, num_examples=50, accountant=accountant
            )

        assert compute(PUBLISHED) == 0.2
        assert compute(AVERAGE) == 0.4
        assert compute(PROVEN) == 20.0
        exact = ExactMinimiser(lipschitz=2.0, mu=0.5, gradient_tolerance=0.01)
        solved = dataclasses.replace(OUTPUT, minimiser=exact)
        assert compute(PROVEN, solved) == pytest.approx(0.2, rel=1e-14)
        clipped = dataclasses.replace(solved, l2_clip=0.05)
        assert compute(PROVEN, clipped) == 0.1
        assert compute(AVERAGE, solved) == 0.4

    @pytest.mark.parametrize("delta", [1e-8, 1e-3, 0.2])
    @pytest.mark.parametrize("stddev", [0.05, 1.0, 30.0])
    def test_exact_curve_against_quadrature(self, stddev, delta):
        """M releases 2 tau apart are one Gaussian sqrt(M) 2 tau / sigma apart."""
        perturbation = OutputPerturbation(l2_clip=0.1, local_stddev=stddev)
        epsilon = compute_output(
            PROVEN, ANALYTIC, perturbation, num_releases=9, delta=delta
        )
        distance = 0.6 / stddev
        if epsilon == 0:
            assert 2 * stats.norm.cdf(distance / 2) - 1 <= delta
            return
        found = _integrate_delta(epsilon, distance)
        assert found == pytest.approx(delta, rel=1e-4)
        assert _integrate_delta(0.99 * epsilon, distance) > delta * 1.001

    @pytest.mark.parametrize("stddev", [0.5, 20.0, 500.0])
    def test_between_the_conversions_lies_dp_accounting(self, stddev):
        perturbation = dataclasses.replace(OUTPUT, local_stddev=stddev)
        accountant = dp_rdp.RdpAccountant(1 + np.geomspace(1e-3, 1e6, 2001))
        accountant.compose(dp_accounting.GaussianDpEvent(stddev / 20), 80)
        found = accountant.get_epsilon(1e-3)
        crude = compute_output(PROVEN, MOMENTS, perturbation)
        assert compute_output(PROVEN, ANALYTIC, perturbation) <= found <= crude

    def test_worst_case_learner_by_monte_carlo(self, rng):
        """A clipped model may turn from +tau to -tau with one example.

        A lower bound (false-failure rate 1e-6) on its delta over 5 releases: below the
        claim at the proven epsilon, and far above it at those of the averages.
        """
        perturbation = OutputPerturbation(l2_clip=1.0, local_stddev=3.0)
        arguments = dict(perturbation=perturbation, num_releases=5, delta=0.05)
        draws = 1.0 + 3.0 * rng.normal(size=(200_000, 5))
        loss = (((draws + 1) ** 2 - (draws - 1) ** 2) / (2 * 9)).sum(axis=1)

        def bound_delta(epsilon):
            gains = np.maximum(0, -np.expm1(epsilon - loss))
            # Hoeffding, for values in [0, 1].
            return gains.mean() - math.sqrt(math.log(1e6) / (2 * len(gains)))

        for conversion in Conversion:
            assert bound_delta(compute_output(PROVEN, conversion, **arguments)) < 0.05
        exact = compute_output(PROVEN, ANALYTIC, **arguments)
        assert bound_delta(0.7 * exact) > 0.05
        for accountant in (PUBLISHED, AVERAGE):
            assert bound_delta(compute_output(accountant, **arguments)) > 0.3

    def test_distance_of_minimisers(self, rng):
        """Linear losses reach 2 (u_1 / n + g) / mu; logistic ones stay within it."""
        mu, count, tolerance = 0.3, 5, 0.01

        def solve(products):
            w = 0.0
            for _ in range(60):
                share = 1 / (1 + np.exp(products * w))
                slope = np.mean(-products * share) + mu * w
                w -= slope / (np.mean(products**2 * share * (1 - share)) + mu)
            return w

        exact = ExactMinimiser(lipschitz=1.0, mu=mu, gradient_tolerance=tolerance)
        bound = compute_output_sensitivity(
            dataclasses.replace(OUTPUT, minimiser=exact),
            num_examples=count,
            accountant=PROVEN,
        )
        slopes = rng.uniform(-1, 1, size=count - 1).sum()
        found = [-((slopes + s) / count + s * tolerance) / mu for s in (-1, 1)]
        assert found[0] - found[1] == pytest.approx(bound, rel=1e-12)
        for _ in range(50):
            shared = rng.uniform(-1, 1, size=count - 1)
            first, second = (solve(np.append(shared, s)) for s in (-1, 1))
            residuals = 2 * tolerance / mu
            assert residuals < second - first + residuals <= bound

    @pytest.mark.parametrize(("accountant", "conversion"), PAIRS)
    def test_monotone(self, accountant, conversion):
        def compute(perturbation=OUTPUT, **changes):
            return compute_output(accountant, conversion, perturbation, **changes)

        base = compute()
        assert compute(num_releases=81) > base
        assert compute(delta=2e-3) < base
        assert compute(dataclasses.replace(OUTPUT, local_stddev=0.9)) < base
        assert compute(dataclasses.replace(OUTPUT, l2_clip=11.0)) > base
        more = compute(num_examples=225)
        assert more == base if accountant is PROVEN else more < base
        solved = dataclasses.replace(OUTPUT, minimiser=EXACT)
        assert (compute(solved) < base) == (accountant is PROVEN)
        if accountant is PROVEN:
            assert compute(solved, num_examples=225) < compute(solved)
            for change in (
                dict(lipschitz=1.1),
                dict(mu=0.09),
                dict(gradient_tolerance=1e-6),
            ):
                worse = dataclasses.replace(EXACT, **change)
                changed = dataclasses.replace(OUTPUT, minimiser=worse)
                assert compute(changed) > compute(solved)

    @pytest.mark.parametrize("count", [1, 2, 50, 10_000])
    def test_sandwich(self, count):
        published, average, proven = (
            compute_output(accountant, num_examples=count) for accountant in Accountant
        )
        assert published < average <= proven
        assert (average == proven) == (count == 1)
        for accountant in (AVERAGE, PROVEN):
            tight = compute_output(accountant, ANALYTIC, num_examples=count)
            assert tight < compute_output(accountant, num_examples=count)

    @pytest.mark.parametrize(("accountant", "conversion"), PAIRS)
    def test_limits(self, accountant, conversion):
        quiet, loud = (
            dataclasses.replace(OUTPUT, local_stddev=value) for value in (0.0, 1e12)
        )
        assert compute_output(accountant, conversion, quiet) == math.inf
        assert compute_output(accountant, conversion, loud) < 1e-8
        assert compute_output(accountant, conversion, quiet, num_releases=0) == 0


class _Logistic:
    """One-dimensional logistic regression under objective perturbation, exactly.

    `products` holds y x in [-1, 1] of every example; the model starts from w' = 0.
    The noise of density (alpha / 2) e^{-alpha |n|} is -(F'(w) + mu w).
    """

    def __init__(self, products, alpha, mu):
        self.products, self.alpha, self.mu = np.asarray(products), alpha, mu

    def compute_slope(self, w):
        share = 1 / (1 + np.exp(np.multiply.outer(w, self.products)))
        return np.mean(-self.products * share, axis=-1) + self.mu * np.asarray(w)

    def compute_log_density(self, w):
        share = 1 / (1 + np.exp(np.multiply.outer(w, self.products)))
        hessian = np.mean(self.products**2 * share * (1 - share), axis=-1) + self.mu
        slope = self.compute_slope(w)
        return np.log(self.alpha / 2 * hessian) - self.alpha * np.abs(slope)

    def get_density(self):
        """Returns the density in mpmath."""
        products = [mpmath.mpf(float(z)) for z in self.products]
        count = len(products)

        def density(w):
            shares = [1 / (1 + mpmath.exp(z * w)) for z in products]
            pairs = list(zip(products, shares, strict=True))
            slope = self.mu * w - mpmath.fsum(z * s for z, s in pairs) / count
            hessian = mpmath.fsum(z * z * s * (1 - s) for z, s in pairs) / count
            scale = self.alpha / 2 * (hessian + self.mu)
            return scale * mpmath.exp(-self.alpha * abs(slope))

        return density


class TestObjective:
    def test_theorem_c2_by_hand(self):
        """80 (2 * 20 * 1 * 0.1 + 2.8 / 4) / (224 * 0.1), and 2 * 1e5 * 1e-9 / 0.1."""
        expected = 80 * 4.7 / 22.4
        assert compute_objective(PUBLISHED) == pytest.approx(expected, rel=1e-14)
        residual = 80 * 2e-3
        found = compute_objective(PROVEN)
        assert found == pytest.approx(expected + residual, rel=1e-14)
        tight = dataclasses.replace(OBJECTIVE, bound=ObjectiveBound.DETERMINANT)
        expected = 80 * (40 / 224 + math.log1p(0.25 / 22.4)) + residual
        assert compute_objective(PROVEN, tight) == pytest.approx(expected, rel=1e-14)
        assert compute_objective(PUBLISHED, tight) == compute_objective(PUBLISHED)

    @pytest.mark.parametrize(
        ("shared", "first", "second"),
        [
            ([0.3, -0.2, 1.0], 1.0, -1.0),
            ([1.0, 1.0, 1.0], 1.0, 0.0),
            ([-0.5, 0.1, 0.9], 0.4, -1.0),
        ],
    )
    def test_exact_loss_of_the_minimiser(self, shared, first, second):
        """The exact hockey stick, by quadrature: 0 at epsilon, positive below."""
        alpha, mu = 3.0, 0.5
        one, two = (_Logistic([*shared, z], alpha, mu) for z in (first, second))
        perturbation = ObjectivePerturbation(
            noise_rate=alpha,
            mu=mu,
            residual=ResidualNoise(gradient_tolerance=1e-12, rate=1.0),
            bound=ObjectiveBound.DETERMINANT,
        )
        epsilon = compute_objective(
            PROVEN, perturbation, num_examples=4, num_releases=1
        )
        grid = np.linspace(-40, 40, 400_001)
        loss = one.compute_log_density(grid) - two.compute_log_density(grid)
        exact = np.max(np.abs(loss))
        # In one dimension gradients differ by u_1 / n at most, not 2 u_1 / n.
        assert 0.4 * alpha / 4 < exact <= epsilon
        p, q = one.get_density(), two.get_density()
        kink = float(grid[np.argmin(np.abs(one.compute_slope(grid)))])
        points = sorted([-30, -10, -5, -2, kink, 2, 5, 10, 30])
        assert float(mpmath.quad(p, points)) == pytest.approx(1.0, rel=1e-4)

        def compute_delta(claim):
            return float(
                mpmath.quad(
                    lambda w: (
                        max(p(w) - math.exp(claim) * q(w), 0)
                        + max(q(w) - math.exp(claim) * p(w), 0)
                    ),
                    points,
                )
            )

        assert compute_delta(epsilon) == 0
        assert compute_delta(0.9 * exact) > 0

    def test_two_dimensions_reach_the_noise_term(self):
        """Examples (-a, b) and (-a, -b), w far along the first axis.

        The start w' sets D's gradient to zero, so that the loss at w is
        alpha ||difference of gradients|| + log of the determinants' ratio.
        """
        alpha, mu, count = 500.0, 0.5, 4
        w, share = np.array([200.0, 0.0]), 1 / (1 + math.exp(-20.0))
        first, second = (np.array([-0.1, s * math.sqrt(0.99)]) for s in (1, -1))
        assert first @ w == second @ w == -20.0
        loss = alpha * np.linalg.norm((first - second) * share) / count
        perturbation = dataclasses.replace(
            OBJECTIVE, noise_rate=alpha, mu=mu, bound=ObjectiveBound.DETERMINANT
        )
        arguments = dict(num_examples=count, num_releases=1)
        epsilon = compute_objective(PROVEN, perturbation, **arguments)
        assert 0.99 * epsilon < loss <= epsilon

    def test_determinants(self, rng):
        """log(1 + x) holds and is reached; the theorem's 2.8 x is above it."""
        mu, count = 0.3, 4
        x = 0.25 / (count * mu)
        for _ in range(200):
            vectors = rng.normal(size=(count + 1, 3))
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            curvatures = rng.uniform(0, 0.25, size=count + 1)
            parts = [
                c * np.outer(v, v) / count
                for c, v in zip(curvatures, vectors, strict=True)
            ]
            shared = mu * np.eye(3) + sum(parts[2:])
            logs = [np.linalg.slogdet(shared + part)[1] for part in parts[:2]]
            assert abs(logs[0] - logs[1]) <= math.log1p(x)
        reached = math.log((mu + 0.25 / count) / mu)  # Against an example x = 0.
        assert reached == pytest.approx(math.log1p(x), rel=1e-12)
        assert math.log1p(x) < -math.log1p(-x) < 1.4 * x

    def test_residual_noise_covers_the_residual(self):
        """Solutions off by +r and -r, with noise: the charge is needed and enough."""
        alpha, mu, count, rate, radius = 4.0, 0.5, 40, 1.0, 0.5
        shared = [0.5, -0.5] * 19 + [0.2]
        grid = np.linspace(-25, 25, 20_001)
        points = np.linspace(-15, 15, 121)
        logs = []
        for product, shift in ((1.0, radius), (-1.0, -radius)):
            model = _Logistic([*shared, product], alpha, mu)
            density = np.exp(model.compute_log_density(grid))
            kernel = np.exp(-rate * np.abs(points[:, np.newaxis] - grid - shift))
            logs.append(np.log(kernel @ density))
        exact = np.max(np.abs(logs[0] - logs[1]))
        perturbation = ObjectivePerturbation(
            noise_rate=alpha,
            mu=mu,
            residual=ResidualNoise(gradient_tolerance=radius * mu, rate=rate),
        )
        arguments = dict(num_examples=count, num_releases=1)
        proven = compute_objective(PROVEN, perturbation, **arguments)
        assert exact <= proven
        assert exact > compute_objective(PUBLISHED, perturbation, **arguments)
        assert exact > 0.8 * proven

    @pytest.mark.parametrize("accountant", [PUBLISHED, PROVEN])
    def test_monotone(self, accountant):
        def compute(perturbation=OBJECTIVE, **changes):
            return compute_objective(accountant, perturbation, **changes)

        base = compute()
        assert compute(num_releases=81) > base
        assert compute(num_examples=225) < base
        assert compute(dataclasses.replace(OBJECTIVE, noise_rate=21.0)) > base
        assert compute(dataclasses.replace(OBJECTIVE, mu=0.2)) < base
        for change in (dict(lipschitz=1.1), dict(curvature=0.3)):
            loss = dataclasses.replace(LOGISTIC_LOSS, **change)
            assert compute(dataclasses.replace(OBJECTIVE, loss=loss)) > base
        for change in (dict(rate=2e5), dict(gradient_tolerance=2e-9)):
            residual = dataclasses.replace(RESIDUAL, **change)
            changed = dataclasses.replace(OBJECTIVE, residual=residual)
            assert (compute(changed) > base) == (accountant is PROVEN)

    def test_limits(self):
        """Noise without end leaves the curvature's part; no release costs nothing."""
        loud = dataclasses.replace(OBJECTIVE, noise_rate=1e-15)
        found = compute_objective(PUBLISHED, loud)
        assert found == pytest.approx(80 * 0.7 / 22.4, rel=1e-10)
        for accountant in (PUBLISHED, PROVEN):
            assert compute_objective(accountant, num_releases=0) == 0
        assert compute_objective(PROVEN) > compute_objective(PUBLISHED)
