"""Tests for Synthetic(alpha, beta): its law by parts, and what iid is not."""

import numpy as np
import pytest
from scipy import stats

from simulation.tasks import TaskOptions, load_task, synthetic

FAILURE_RATE = 1e-6
SPREADS = [None, (0.0, 0.0), (1.0, 1.0)]


def generate(num_clients=30, *, num_features=20, spread=(1.0, 1.0), seed=0):
    return synthetic.generate(
        num_clients, num_features=num_features, spread=spread, seed=seed
    )


def draw_again(client: int, *, num_features, spread, seed):
    """Returns size, mean, weights and bias of a client, and its noise.

    The order of draws is what keeps published runs repeatable: size, u, W, b, B, v, x.
    Of the seed's children the first is what iid clients share.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1 + client,)))
    size = 50 + int(np.exp(4.0 + 2.0 * rng.standard_normal()))
    mean, source, u = np.zeros(num_features), rng, 0.0
    if spread is None:
        source = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    else:
        u = spread[0] * rng.standard_normal()
    weights = u + source.standard_normal([num_features, 10])
    bias = u + source.standard_normal(10)
    if spread is not None:
        mean = spread[1] * rng.standard_normal() + rng.standard_normal(num_features)
    return size, mean, weights, bias, rng.standard_normal([size, num_features])


class TestGenerate:
    @pytest.mark.parametrize("spread", SPREADS)
    def test_it_is_a_function_of_the_seed(self, spread):
        one, again, other = (
            generate(4, spread=spread, seed=seed) for seed in (3, 3, 4)
        )
        np.random.seed(0)
        for (x, y), (x_again, y_again) in zip(one, again, strict=True):
            assert np.array_equal(x, x_again) and np.array_equal(y, y_again)
        assert not np.array_equal(one[0][0][:50], other[0][0][:50])
        assert x.dtype == np.float32 and y.dtype == np.int32

    @pytest.mark.parametrize("spread", SPREADS)
    def test_a_client_does_not_depend_on_how_many_there_are(self, spread):
        few, many = (generate(count, spread=spread) for count in (2, 5))
        for (x, y), (x_again, y_again) in zip(few, many, strict=False):
            assert np.array_equal(x, x_again) and np.array_equal(y, y_again)

    @pytest.mark.parametrize("spread", SPREADS)
    def test_clients_drawn_once_more(self, spread):
        right, without_bias = [], []
        for client, (x, y) in enumerate(generate(3, spread=spread, seed=11)):
            size, mean, weights, bias, noise = draw_again(
                client, num_features=20, spread=spread, seed=11
            )
            assert len(y) == size
            expected = mean + noise * np.arange(1, 21) ** -0.6
            np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
            for row, label in zip(expected[:200], y[:200], strict=True):
                logits = [
                    sum(row[j] * weights[j, c] for j in range(20)) for c in range(10)
                ]
                right.append(label == np.argmax(np.array(logits) + bias))
                without_bias.append(label == np.argmax(logits))
        assert all(right)
        assert not all(without_bias)

    def test_sizes(self, rng):
        seed = int(rng.integers(2**31))
        sizes = np.array(
            [len(y) for _, y in generate(2_000, num_features=1, spread=None, seed=seed)]
        )
        assert sizes.min() >= 50
        # Uniform parts in place of those that were rounded off.
        law = stats.lognorm(s=2.0, scale=np.exp(4.0))
        drawn = sizes - 50 + rng.uniform(size=len(sizes))
        assert stats.kstest(drawn, law.cdf).pvalue > FAILURE_RATE
        # 50 left out; a variance for a standard deviation.
        assert stats.kstest(drawn + 50, law.cdf).pvalue < FAILURE_RATE
        narrow = stats.lognorm(s=2.0**0.5, scale=np.exp(4.0))
        assert stats.kstest(drawn, narrow.cdf).pvalue < FAILURE_RATE

    @pytest.mark.parametrize("spread", SPREADS)
    def test_variances_of_inputs(self, spread, rng):
        """diag(j**-1.2) is the covariance: 60 chi-squares in one."""
        clients = generate(
            30, num_features=60, spread=spread, seed=int(rng.integers(2**31))
        )
        degrees = 60 * sum(len(y) - 1 for _, y in clients)

        def compute_tails(power: float) -> float:
            """Returns the two-sided p-value if a variance is j**power."""
            variances = np.arange(1.0, 61.0) ** power
            total = sum(
                (((x - x.mean(0)) ** 2) / variances).sum(dtype=np.float64)
                for x, _ in clients
            )
            law = stats.chi2(degrees)
            return 2 * min(law.cdf(total), law.sf(total))

        assert compute_tails(-1.2) > FAILURE_RATE
        # The standard deviation for the variance, and the reverse.
        assert compute_tails(-0.6) < FAILURE_RATE
        assert compute_tails(-2.4) < FAILURE_RATE

    def compute_mean_tail(self, clients) -> float:
        """Returns the p-value of all clients' inputs having mean 0."""
        stddev = np.arange(1, 21) ** -0.6
        total = sum(
            (len(x) * (x.mean(0, dtype=np.float64) / stddev) ** 2).sum()
            for x, _ in clients
        )
        return float(stats.chi2(20 * len(clients)).sf(total))

    def test_means_tell_iid_from_alpha_and_beta_zero(self, rng):
        seed = int(rng.integers(2**31))
        iid = generate(spread=None, seed=seed)
        assert self.compute_mean_tail(iid) > FAILURE_RATE
        for spread in SPREADS[1:]:
            assert self.compute_mean_tail(generate(spread=spread, seed=seed)) == 0.0

    def test_beta_moves_the_means_of_clients(self, rng):
        """v_k ~ N(B_k, 1) in each feature: its mean over 60 is N(0, beta² + 1/60)."""
        seed = int(rng.integers(2**31))
        for beta, wrong in ((0.0, 1.0), (1.0, 0.0), (3.0, 3.0**0.5)):
            clients = generate(400, num_features=60, spread=(0.0, beta), seed=seed)
            means = np.array([x.mean(dtype=np.float64) for x, _ in clients])

            def compute_tails(variance: float, means=means) -> float:
                law = stats.chi2(len(means))
                # The noise of the inputs adds a thousandth of 1/60 at most.
                total = (means**2).sum() / (variance + 1 / 60)
                return 2 * min(law.cdf(total), law.sf(total))

            assert compute_tails(beta**2) > FAILURE_RATE
            assert compute_tails(wrong**2) < FAILURE_RATE

    def test_iid_clients_share_one_model(self):
        """Least squares on half of the clients serves the others, or does not."""

        def measure(spread) -> float:
            clients = generate(20, spread=spread, seed=5)
            # Equally much of each.
            x = np.stack([np.c_[x, np.ones(len(x))][:50] for x, _ in clients])
            y = np.stack([y[:50] for _, y in clients])
            targets = np.eye(10)[y[:10].ravel()]
            solved, *_ = np.linalg.lstsq(x[:10].reshape([-1, 21]), targets, rcond=None)
            return float(np.mean((x[10:] @ solved).argmax(-1) == y[10:]))

        assert measure(None) > 0.55
        assert measure((0.0, 0.0)) < 0.4
        assert measure((1.0, 1.0)) < 0.4


class TestTasks:
    @pytest.mark.parametrize(
        ("name", "num_features", "parameters"),
        [
            ("synthetic", 60, 610),
            ("synthetic_iid", 60, 610),
            ("synthetic_20", 20, 210),
            ("synthetic_20_iid", 20, 210),
        ],
    )
    def test_a_tenth_is_for_the_test(self, name, num_features, parameters):
        task = load_task(name, TaskOptions(data_seed=7))
        assert task.num_clients == 30
        assert task.build_model().num_parameters == parameters
        spread = None if name.endswith("iid") else (1.0, 1.0)
        clients = generate(num_features=num_features, spread=spread, seed=7)
        assert task.train.client_ids == task.test.client_ids
        for client_id, (x, y) in zip(task.train.client_ids, clients, strict=True):
            train_x, train_y = task.train.load(client_id)
            test_x, test_y = task.test.load(client_id)
            assert len(test_y) == round(len(y) / 10)
            assert train_x.shape[1:] == (num_features, 1, 1)
            both = np.concatenate([test_x, train_x])[..., 0, 0]
            assert np.array_equal(both, x)
            assert np.array_equal(np.concatenate([test_y, train_y]), y)

    @pytest.mark.parametrize(
        ("name", "models"),
        [
            *(
                (name, ["logistic_regression", "mlp", "double_softmax_regression"])
                for name in (
                    "synthetic",
                    "synthetic_iid",
                    "synthetic_20",
                    "synthetic_20_iid",
                )
            ),
            (
                "synthetic_20_binary",
                [
                    "logistic_regression",
                    "double_softmax_regression",
                    "one_output_logistic_regression",
                ],
            ),
        ],
    )
    def test_models(self, name, models):
        task = load_task(name, TaskOptions(num_clients=2))
        assert list(task.models) == models
        for model in models:
            assert task.build_model(model).name == model
        with pytest.raises(ValueError, match="`model` must be one of"):
            task.build_model("lenet")

    def test_two_classes_are_the_larger_of_two_logits(self):
        options = TaskOptions(num_clients=4, data_alpha=0.5, data_beta=0.0, data_seed=9)
        binary, ten = (
            load_task(name, options) for name in ("synthetic_20_binary", "synthetic_20")
        )
        right, of_ten = [], []
        for client, client_id in enumerate(binary.train.client_ids):
            size, mean, weights, bias, noise = draw_again(
                client, num_features=20, spread=(0.5, 0.0), seed=9
            )
            inputs = mean + noise * np.arange(1, 21) ** -0.6
            logits = inputs @ weights + bias
            labels = np.concatenate(
                [data.load(client_id)[1] for data in (binary.test, binary.train)]
            )
            assert len(labels) == size
            right.append(np.mean(labels == (logits[:, 1] > logits[:, 0])))
            of_ten.append(np.mean(labels == logits.argmax(1)))
            for one, two in ((binary.train, ten.train), (binary.test, ten.test)):
                assert np.array_equal(one.load(client_id)[0], two.load(client_id)[0])
        assert min(right) == 1.0 and max(of_ten) < 1.0
        assert "2 classes" in binary.description
        assert binary.build_model().num_parameters == 42
        assert binary.build_model("one_output_logistic_regression").num_parameters == 21

    def test_options(self):
        task = load_task(
            "synthetic_20",
            TaskOptions(num_clients=3, data_alpha=0.0, data_beta=0.5, data_seed=2),
        )
        x, _ = generate(3, spread=(0.0, 0.5), seed=2)[2]
        found = np.concatenate(
            [data.load("device_002")[0] for data in (task.test, task.train)]
        )
        assert np.array_equal(found[..., 0, 0], x)
        assert "alpha = 0, beta = 0.5" in task.description
        assert "3" not in load_task("synthetic_iid").description[:20]

    def test_what_decides_the_data_is_in_the_identity(self):
        identities = [
            load_task(name, TaskOptions(num_clients=2, **options)).identity
            for name, options in (
                ("synthetic", {}),
                ("synthetic", {"data_seed": 1}),
                ("synthetic", {"data_alpha": 0.5}),
                ("synthetic", {"data_beta": 0.5}),
                ("synthetic_20", {}),
                ("synthetic_iid", {}),
                ("synthetic_20_iid", {}),
                ("synthetic_20_binary", {}),
            )
        ]
        assert all(
            one != other
            for index, one in enumerate(identities)
            for other in identities[:index]
        )
        again = load_task("synthetic", TaskOptions(num_clients=2)).identity
        assert again == identities[0]
