"""Upcycled-FL and the baselines on quadratics, every quantity solved by hand.

Client i's loss is F_i(w) = 1/2 mean_j (<x_j, w> - y_j)^2 = 1/2 w' H_i w - g_i' w + ...
with H_i = X' X / n_i and g_i = X' y / n_i. Clients take full-batch steps until float32
has no more digits of their minimiser.
"""

import collections
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulation import execution, learning
from simulation.algorithm import FederatedAveraging
from simulation.model import Model
from upcycled_fl import baselines, finalizer, schedule

DIM = 3
SIZES = (4, 6, 10)
P = np.array(SIZES) / sum(SIZES)
LR, NUM_STEPS = 0.3, 60
MU, LAMBDA = 1.0, 1.0
START = np.float32([2.0, -1.0, 0.5])


@pytest.fixture(scope="module", autouse=True)
def engine():
    return execution.set_execution_context()


def build_linear_regression() -> Model:
    def predict(weights, x, seed):
        del seed
        return tf.linalg.matvec(x, weights[0])

    return Model(
        name="linear_regression",
        initialize=lambda rng: (START,),
        predict=predict,
        compute_loss=lambda y, outputs: 0.5 * tf.square(y - outputs),
        metrics={},
        example_spec=collections.OrderedDict(
            x=tf.TensorSpec([None, DIM], tf.float32),
            y=tf.TensorSpec([None], tf.float32),
        ),
    )


def draw_clients(curvatures=(0.5, 1.0, 2.0)) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients with these eigenvalues of H_i, in bases and with optima of their own."""
    rng = np.random.default_rng(4)
    clients = []
    for size in SIZES:
        left = np.linalg.qr(rng.normal(size=[size, DIM]))[0]
        right = np.linalg.qr(rng.normal(size=[DIM, DIM]))[0]
        scales = np.sqrt(size * np.array(curvatures))
        x = (left * scales @ right).astype(np.float32)
        optimum = 3 * rng.normal(size=DIM)
        noise = 0.1 * rng.normal(size=size)
        clients.append((x, (x @ optimum + noise).astype(np.float32)))
    return clients


CLIENTS = draw_clients()


def compute_parts(clients=CLIENTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns the H_i and the g_i."""
    pairs = [(np.float64(x), np.float64(y)) for x, y in clients]
    h = np.stack([x.T @ x / len(y) for x, y in pairs])
    return h, np.stack([x.T @ y / len(y) for x, y in pairs])


H, G = compute_parts()
# The minimiser of sum_i p_i F_i, and those of the F_i.
MINIMISER = np.linalg.solve(np.tensordot(P, H, 1), P @ G)
OWN_MINIMISERS = np.linalg.solve(H, G[..., None])[..., 0]


def solve_proximal(w, mu, h=H, g=G) -> np.ndarray:
    """argmin F_i(v) + mu / 2 ||v - w||^2 of each client: (H_i + mu)^-1 (g_i + mu w)."""
    return np.linalg.solve(h + mu * np.eye(DIM), (g + mu * w)[..., None])[..., 0]


def build_process(algorithm, wrap=None, *, lr=LR):
    return learning.build_learning_process(
        build_linear_regression(),
        tff.aggregators.MeanFactory(),
        algorithm,
        client_optimizer=tff.learning.optimizers.build_sgdm(lr),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        initial_weights=(START,),
        wrap_finalizer=wrap,
    )


def upcycle(*coefficients):
    return functools.partial(
        finalizer.build_upcycled_finalizer, coefficients=coefficients
    )


def run(process, num_rounds, clients=CLIENTS, num_steps=NUM_STEPS) -> list[Any]:
    """Returns the weights, the state and what clients keep after each round."""
    initial = getattr(process, "initial_client_state", ())
    state, kept, found = process.initialize(), [initial] * len(clients), []
    for _ in range(num_rounds):
        data = [
            learning.build_client_data(
                {"x": x, "y": y},
                np.tile(np.arange(1, len(y) + 1, dtype=np.int32), [num_steps, 1]),
                noise_seed=np.int32([0, 0]),
                training_seed=np.int32([0, 0]),
                num_joined=len(clients),
                client_state=own,
            )
            for (x, y), own in zip(clients, kept, strict=True)
        ]
        output = process.next(state, data)
        state = output.state
        kept = output.client_states if initial else kept
        found.append((state.global_model_weights.trainable[0], state, kept))
    return found


def assert_close(got, wanted, rtol=1e-5):
    assert np.linalg.norm(got - wanted) <= rtol * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def fedprox(engine):
    return build_process(FederatedAveraging(proximal_strength=MU))


@pytest.fixture(scope="module")
def upcycled(engine):
    """With c = mu / (mu + lambda) = 1 / 2 in every round."""
    constant = schedule.ConstantLambda(mu=MU, lambda_value=LAMBDA)
    table = schedule.compute_coefficient_table(constant, 1)
    assert table.tolist() == [0.5]
    return build_process(FederatedAveraging(proximal_strength=MU), upcycle(*table))


class TestUpcycled:
    def test_odd_and_even_steps(self, engine):
        """Algorithm 1: odd by the clients' exact minimisers, even by the rule."""
        coefficients = (0.75, 0.5, 0.125)
        process = build_process(
            FederatedAveraging(proximal_strength=MU), upcycle(*coefficients)
        )
        even = START.astype(np.float64)
        for m, (found, state, _) in enumerate(run(process, 5)):
            odd = P @ solve_proximal(even, MU)
            c = coefficients[min(m, 2)]
            assert_close(state.finalizer["odd_weights"][0], odd)
            # Other pulls and weights are told apart.
            for wrong in (
                P @ solve_proximal(even, 1.05 * MU),
                np.mean(solve_proximal(even, MU), axis=0),
            ):
                difference = np.linalg.norm(wrong - odd)
                assert difference > 1e-3 * np.linalg.norm(odd)
            even = odd + c * (odd - even)
            assert_close(found, even)
            assert np.linalg.norm(even - odd) > 1e-4 * np.linalg.norm(odd)
            assert state.finalizer["upcycled_steps"] == m + 1

    def test_the_limit_is_fedproxs(self, fedprox, upcycled):
        """w = sum_i p_i (H_i + mu)^-1 (g_i + mu w), which is not the minimiser."""
        inverse = np.linalg.inv(H + MU * np.eye(DIM))
        matrix = MU * np.tensordot(P, inverse, 1)
        constant = np.einsum("i,ijk,ik->j", P, inverse, G)
        limit = np.linalg.solve(np.eye(DIM) - matrix, constant)
        for process in (fedprox, upcycled):
            assert_close(run(process, 30)[-1][0], limit)
        assert np.linalg.norm(limit - MINIMISER) > 0.05 * np.linalg.norm(MINIMISER)

    @pytest.mark.parametrize(
        ("curvature", "plain", "with_even"),
        [
            # m = mu / (h + mu), and (1 + c) m - c at c = 1 / 2.
            (0.5, 2 / 3, 1 / 2),
            (1.0, 1 / 2, 1 / 4),
            # Where FedProx is fast already the even step goes too far.
            (4.0, 1 / 5, -1 / 5),
            (5.0, 1 / 6, -1 / 4),
        ],
    )
    def test_contraction(self, fedprox, upcycled, curvature, plain, with_even):
        """H_i = h I: each round multiplies the distance to the minimiser."""
        clients = draw_clients([curvature] * DIM)
        h, g = compute_parts(clients)
        limit = np.linalg.solve(np.tensordot(P, h, 1), P @ g)
        for process, factor in ((fedprox, plain), (upcycled, with_even)):
            distance = START - limit
            for found, _, _ in run(process, 3, clients):
                assert_close(found - limit, factor * distance, rtol=1e-4)
                distance = found - limit

    def test_fewer_rounds_to_the_same_distance(self, fedprox, upcycled):
        """0.5^10 < (2/3)^17 < 0.5^9: 10 rounds are ahead of 17 of FedProx."""
        clients = draw_clients([0.5] * DIM)
        h, g = compute_parts(clients)
        limit = np.linalg.solve(np.tensordot(P, h, 1), P @ g)
        far = [np.linalg.norm(w - limit) for w, _, _ in run(fedprox, 17, clients)]
        near = [np.linalg.norm(w - limit) for w, _, _ in run(upcycled, 10, clients)]
        assert near[9] < far[16] < near[8]


class TestServerRate:
    def test_around_scaffold_bit_for_bit(self, engine):
        self.compare(baselines.Scaffold(participation=1.0), 0.0)

    @pytest.mark.slow
    def test_around_feddyn(self, engine):
        self.compare(baselines.FedDyn(participation=1.0, proximal_strength=2.0), 0.0)

    def compare(self, algorithm, rtol):
        """Constant lambda is the baseline at the server's rate 1 + mu / (mu + lambda):
        weights, the server's own and the clients' states."""
        coefficient = np.float32(0.3 / (0.3 + 0.21))
        scale = functools.partial(
            finalizer.build_scaled_finalizer, factor=float(1 + coefficient)
        )
        found = run(build_process(algorithm, upcycle(coefficient)), 4, num_steps=5)
        scaled = run(build_process(algorithm, scale), 4, num_steps=5)
        plain = run(build_process(algorithm), 4, num_steps=5)

        def assert_same(got, wanted):
            assert np.linalg.norm(got - wanted) <= rtol * np.linalg.norm(wanted)

        def compare_all(got, wanted):
            (_, state, kept), (_, other, other_kept) = got, wanted
            got = (state.global_model_weights, state.finalizer["inner"], kept)
            wanted = (other.global_model_weights, other.finalizer, other_kept)
            for pair in zip(*map(tf.nest.flatten, (got, wanted)), strict=True):
                assert_same(*pair)

        for got, wanted in zip(found, scaled, strict=True):
            compare_all(got, wanted)
        assert np.linalg.norm(found[0][0] - plain[0][0]) > 0.1


class TestBaselines:
    ROUNDS = 40

    def test_feddyn_finds_the_minimiser_and_fedavg_does_not(self, engine):
        """With exact local work FedAvg is at the mean of the clients' minimisers."""
        average = run(build_process(FederatedAveraging()), 3, num_steps=150)
        wrong = P @ OWN_MINIMISERS
        assert_close(average[-1][0], wrong)
        assert np.linalg.norm(wrong - MINIMISER) > 0.1 * np.linalg.norm(MINIMISER)
        algorithm = baselines.FedDyn(participation=1.0, proximal_strength=1.0)
        *_, (found, state, kept) = run(build_process(algorithm), self.ROUNDS)
        assert_close(found, MINIMISER)
        # g_i is the gradient of F_i there; their mean, the server's h, is 0.
        gradients = H @ MINIMISER - G
        scale = np.linalg.norm(gradients)
        assert np.linalg.norm([own for (own,) in kept] - gradients) < 1e-5 * scale
        (drift,) = state.finalizer[1]
        assert np.linalg.norm(drift) < 1e-5 * scale

    def test_scaffold_finds_the_minimiser(self, engine):
        """Where FedAvg with as many steps does not."""
        algorithm = baselines.Scaffold(participation=1.0)
        process = build_process(algorithm, lr=0.05)
        *_, (found, state, kept) = run(process, 3 * self.ROUNDS, num_steps=10)
        assert_close(found, MINIMISER)
        gradients = H @ MINIMISER - G
        scale = np.linalg.norm(gradients)
        assert np.linalg.norm([own for (own,) in kept] - gradients) < 1e-4 * scale
        (control,) = state.global_model_weights.non_trainable
        assert np.linalg.norm(control) < 1e-4 * scale
        process = build_process(FederatedAveraging(), lr=0.05)
        average = run(process, 3 * self.ROUNDS, num_steps=10)[-1][0]
        assert np.linalg.norm(average - MINIMISER) > 0.01 * np.linalg.norm(MINIMISER)

    def test_a_personal_model_is_the_proximal_point(self, engine):
        """theta = argmin F_i + lambda / 2 ||. - w_i||^2 after each batch, and
        w_i+ = w_i - eta lambda (w_i - theta)."""
        penalty, eta = 4.0, 0.1
        algorithm = baselines.PFedMe(penalty=penalty, personal_steps=9, local_lr=eta)
        process = build_process(algorithm, lr=2 / 10.5)
        w = START.astype(np.float64)
        for found, _, kept in run(process, 3, num_steps=2):
            first = solve_proximal(w, penalty)
            local = w - eta * penalty * (w - first)
            rows = zip(H, G, local, strict=True)
            thetas = np.stack([solve_proximal(v, penalty, h, g) for h, g, v in rows])
            for (own,), theta in zip(kept, thetas, strict=True):
                assert_close(own, theta)
                assert_close(process.personalize((found,), (own,))[0], theta)
            w = P @ (local - eta * penalty * (local - thetas))
            assert_close(found, w)
            assert np.min(np.linalg.norm(thetas - w, axis=1)) > 0.1
