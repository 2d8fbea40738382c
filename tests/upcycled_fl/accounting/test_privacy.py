"""Statements, releases, calibration and errors of the clients' accountants."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from tests.upcycled_fl.accounting.cases import (
    ANALYTIC,
    AVERAGE,
    EXACT,
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
    AS_PUBLISHED_OBJECTIVE_WORDS,
    AS_PUBLISHED_OUTPUT_WORDS,
    AVERAGING_WORDS,
    LOGISTIC_LOSS,
    EpsilonTarget,
    LinearModelLoss,
    ObjectiveBound,
    Perturbation,
    ServerRule,
    calibrate_objective_perturbation,
    calibrate_output_perturbation,
    check_feature_norms,
    compute_privacy,
    count_client_releases,
    count_server_releases,
)


class TestPrivacy:
    _SIZES = [30, 224, 500]

    def test_every_client(self):
        found = compute_privacy(
            OUTPUT,
            num_examples=self._SIZES,
            num_releases=[80, 7, 0],
            accountant=PUBLISHED,
            delta=1e-3,
        )
        expected = [
            compute_output(PUBLISHED, num_examples=size, num_releases=count)
            for size, count in zip(self._SIZES, [80, 7, 0], strict=True)
        ]
        assert list(found.epsilons) == expected
        assert found.epsilon_mean == pytest.approx(np.mean(expected), rel=1e-14)
        assert (found.epsilon_min, found.epsilon_max) == (0.0, expected[0])
        assert found.num_releases == (80, 7, 0)

    @pytest.mark.parametrize(("accountant", "conversion"), PAIRS)
    def test_rounds_that_a_client_missed_cost_nothing(self, accountant, conversion):
        """Per-round noise: A adds up over the rounds that a client took part in."""
        joined = np.array([[1, 0, 1], [1, 1, 0], [1, 0, 0]], dtype=bool)
        stddevs = [3.0, 4.0, 12.0]
        parts = [dataclasses.replace(OUTPUT, local_stddev=s) for s in stddevs]
        arguments = dict(
            num_examples=self._SIZES,
            accountant=accountant,
            delta=1e-3,
            conversion=conversion,
        )
        found = compute_privacy(parts, num_releases=joined.astype(int), **arguments)
        # 1/9 + 1/16 + 1/144 = 26/144.
        joint = dataclasses.replace(OUTPUT, local_stddev=12 / math.sqrt(26))
        expected = compute_privacy(joint, num_releases=[1, 0, 0], **arguments)
        assert found.epsilons[0] == pytest.approx(expected.epsilons[0], rel=1e-9)
        for client, part in ((1, parts[1]), (2, parts[0])):
            alone = compute_privacy(part, num_releases=[1, 1, 1], **arguments)
            assert found.epsilons[client] == alone.epsilons[client]
        assert found.num_releases == (3, 1, 1) == tuple(count_client_releases(joined))
        equal = compute_privacy([OUTPUT] * 3, num_releases=joined * 1, **arguments)
        once = compute_privacy(OUTPUT, num_releases=joined.sum(axis=0), **arguments)
        assert equal.epsilons == pytest.approx(once.epsilons, rel=1e-9)

    def test_objective_epsilons_add_up(self):
        parts = [dataclasses.replace(OBJECTIVE, noise_rate=a) for a in (5.0, 20.0)]
        found = compute_privacy(
            parts, num_examples=[224], num_releases=[[3], [1]], accountant=PROVEN
        )
        expected = sum(
            compute_objective(PROVEN, part, num_releases=count)
            for part, count in zip(parts, (3, 1), strict=True)
        )
        assert found.epsilon_max == pytest.approx(expected, rel=1e-14)
        assert found.delta == 0

    @pytest.mark.parametrize(
        ("perturbation", "accountant", "label"),
        [
            (OUTPUT, PUBLISHED, AS_PUBLISHED_OUTPUT_WORDS),
            (OUTPUT, AVERAGE, AVERAGING_WORDS),
            (OUTPUT, PROVEN, None),
            (dataclasses.replace(OUTPUT, minimiser=EXACT), PROVEN, None),
            (OBJECTIVE, PUBLISHED, AS_PUBLISHED_OBJECTIVE_WORDS),
            (OBJECTIVE, PROVEN, None),
        ],
    )
    def test_statements(self, perturbation, accountant, label):
        is_output = perturbation.kind is Perturbation.OUTPUT
        found = compute_privacy(
            perturbation,
            num_examples=self._SIZES,
            num_releases=[80, 80, 0],
            accountant=accountant,
            delta=1e-3 if is_output else None,
        )
        text = str(found)
        numbers = [line for line in text.splitlines() if " epsilon: " in line]
        assert len(numbers) == 3
        for line in numbers:
            assert f"({accountant.value}" in line
            assert "not proven" not in line if label is None else label in line
        assert found.is_proven == (label is None)
        for part in (
            "neighbouring D_i differ in one example, ",
            "assumes: ",
            "bound: ",
        ):
            assert part in text
        assert "does not cover: " in text and "0 to 80" in text
        adjacency = found.adjacency
        assert ("added" in adjacency) == (
            is_output and accountant is not AVERAGE and perturbation.minimiser is None
        )
        assert ("replaced" in adjacency) == (
            accountant is not PUBLISHED or not is_output
        )
        values = json.loads(json.dumps(found.to_dict()))
        names = {field.name for field in dataclasses.fields(found)}
        assert names | {"epsilon_mean", "epsilon_min", "epsilon_max"} <= set(values)
        assert values["standing"] == label
        assert values["epsilons"] == list(found.epsilons)

    def test_no_noise_in_json(self):
        quiet = dataclasses.replace(OUTPUT, local_stddev=0.0)
        found = compute_privacy(
            quiet, num_examples=[9], num_releases=[1], accountant=PROVEN, delta=0.1
        )
        assert found.to_dict()["epsilons"] == ["inf"]
        assert found.to_dict()["epsilon_mean"] == "inf"


class TestReleases:
    def test_one_release_per_two_server_steps(self):
        for steps, expected in ((0, 0), (1, 1), (2, 1), (3, 2), (160, 80)):
            assert count_server_releases(ServerRule.BASELINE, steps) == steps
            assert count_server_releases(ServerRule.UPCYCLED, steps) == expected

    def test_bad_values(self):
        with pytest.raises(ValueError, match="`rule` must be a member of ServerRule"):
            count_server_releases("upcycled", 1)
        with pytest.raises(ValueError, match="`num_server_steps` must be an integer"):
            count_server_releases(ServerRule.UPCYCLED, -1)
        for participation in ([True], [[1, 0]]):
            with pytest.raises(ValueError, match="`participation` must be boolean"):
                count_client_releases(participation)


_CLIENTS = dict(num_examples=[60, 224, 900], num_releases=[40, 80, 0])


@pytest.mark.parametrize("target", EpsilonTarget)
@pytest.mark.parametrize("epsilon", [0.05, 2.0, 300.0])
class TestCalibration:
    def _check(self, perturbation, worse, epsilon, target, **arguments):
        """On the safe side, and a hair less noise is not."""
        figures = [
            getattr(compute_privacy(p, **_CLIENTS, **arguments), f"epsilon_{name}")
            for p, name in ((perturbation, target.value), (worse, target.value))
        ]
        assert figures[0] <= epsilon < figures[1]

    @pytest.mark.parametrize("minimiser", [None, EXACT])
    @pytest.mark.parametrize(("accountant", "conversion"), PAIRS)
    def test_output(self, epsilon, target, accountant, conversion, minimiser):
        shared = dict(accountant=accountant, conversion=conversion, delta=1e-3)
        found = calibrate_output_perturbation(
            epsilon=epsilon,
            l2_clip=10.0,
            minimiser=minimiser,
            target=target,
            **_CLIENTS,
            **shared,
        )
        assert found.l2_clip == 10.0 and found.minimiser is minimiser
        worse = dataclasses.replace(found, local_stddev=found.local_stddev * (1 - 1e-6))
        self._check(found, worse, epsilon, target, **shared)

    @pytest.mark.parametrize("bound", ObjectiveBound)
    @pytest.mark.parametrize("accountant", [PUBLISHED, PROVEN])
    def test_objective(self, epsilon, target, accountant, bound):
        found = calibrate_objective_perturbation(
            epsilon=epsilon,
            mu=30.0,
            accountant=accountant,
            residual=RESIDUAL,
            bound=bound,
            target=target,
            **_CLIENTS,
        )
        worse = dataclasses.replace(found, noise_rate=found.noise_rate * (1 + 1e-6))
        self._check(found, worse, epsilon, target, accountant=accountant)


class TestErrors:
    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: dataclasses.replace(OUTPUT, l2_clip=0.0), "`l2_clip` must be po"),
            (
                lambda: dataclasses.replace(OUTPUT, local_stddev=-1.0),
                "`local_stddev` must be at least 0",
            ),
            (lambda: dataclasses.replace(OUTPUT, minimiser=1), "`minimiser` must be"),
            (lambda: dataclasses.replace(EXACT, lipschitz=0.0), "`lipschitz` must be"),
            (lambda: dataclasses.replace(EXACT, mu=0.0), "`mu` must be positive"),
            (
                lambda: dataclasses.replace(EXACT, gradient_tolerance=-1e-9),
                "`gradient_tolerance` must be at least 0",
            ),
            (
                lambda: dataclasses.replace(OBJECTIVE, noise_rate=0.0),
                "`noise_rate` must be positive",
            ),
            (lambda: dataclasses.replace(OBJECTIVE, mu=0.0), "`mu` must be positive"),
            (
                lambda: dataclasses.replace(OBJECTIVE, loss=1),
                "`loss` must be a member",
            ),
            (lambda: dataclasses.replace(OBJECTIVE, residual=1), "`residual` must be"),
            (lambda: dataclasses.replace(OBJECTIVE, bound=1), "`bound` must be"),
            (lambda: dataclasses.replace(RESIDUAL, rate=0.0), "`rate` must be posit"),
            (
                lambda: dataclasses.replace(RESIDUAL, gradient_tolerance=0.0),
                "`gradient_tolerance` must be positive",
            ),
        ],
    )
    def test_parameters(self, build, message):
        with pytest.raises(ValueError, match=message):
            build()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("lipschitz", 0.0),
            ("curvature", -0.25),
            ("num_outputs", 0),
            ("max_feature_norm", math.inf),
        ],
    )
    def test_loss(self, name, value):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            dataclasses.replace(LOGISTIC_LOSS, **{name: value})

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (dict(num_outputs=2), "`num_outputs` must be 1 for PROVEN"),
            (dict(max_feature_norm=1.5), "`max_feature_norm` must be at most 1"),
        ],
    )
    def test_only_a_one_output_linear_model_is_proven(self, change, message):
        loss = LinearModelLoss(**(dataclasses.asdict(LOGISTIC_LOSS) | change))
        perturbation = dataclasses.replace(OBJECTIVE, loss=loss)
        with pytest.raises(ValueError, match=message):
            compute_objective(PROVEN, perturbation)
        assert compute_objective(PUBLISHED, perturbation) > 0

    def test_sgd_is_not_proven(self):
        inexact = dataclasses.replace(OBJECTIVE, residual=None)
        with pytest.raises(ValueError, match="`residual` must be set for PROVEN"):
            compute_objective(PROVEN, inexact)
        assert compute_objective(PUBLISHED, inexact) > 0

    @pytest.mark.parametrize("accountant", [PUBLISHED, PROVEN])
    def test_curvature(self, accountant):
        """u_2 = 1/4 <= 0.5 |D_i| mu = 0.05 |D_i| from 5 examples on."""
        assert compute_objective(accountant, num_examples=5) > 0
        with pytest.raises(
            ValueError,
            match=r"`curvature` must be at most 0.5 \|D_i\| mu .* raise `mu`",
        ):
            compute_objective(accountant, num_examples=4)

    def test_accountants(self):
        with pytest.raises(ValueError, match="`accountant` must be AS_PUBLISHED or PR"):
            compute_objective(AVERAGE)
        with pytest.raises(ValueError, match="`accountant` must be a member"):
            compute_output("proven")
        with pytest.raises(ValueError, match="`conversion` must be MOMENTS for AS_PUB"):
            compute_output(PUBLISHED, ANALYTIC)
        with pytest.raises(ValueError, match="`conversion` must be a member"):
            compute_output(PROVEN, "analytic")

    @pytest.mark.parametrize("compute", [compute_output, compute_objective])
    def test_counts(self, compute):
        with pytest.raises(ValueError, match="`num_examples` must be an integer at le"):
            compute(PROVEN, num_examples=0)
        with pytest.raises(ValueError, match="`num_releases` must be an integer at le"):
            compute(PROVEN, num_releases=-1)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(num_examples=[0]), "`num_examples` must hold .* leave out empty"),
            (dict(num_examples=[]), "`num_examples` must hold one integer"),
            (dict(num_examples=[2.5]), "`num_examples` must hold one integer"),
            (dict(num_releases=[1, 1]), "`num_releases` must hold integers"),
            (dict(num_releases=[-1]), "`num_releases` must hold integers"),
            (dict(delta=None), r"`delta` must be in \(0, 1\)"),
            (dict(perturbation=[]), "`perturbation` must be OutputPerturbation or"),
            (dict(perturbation=[OUTPUT, OBJECTIVE]), "all of one kind"),
            (dict(perturbation=OBJECTIVE), "`delta` must be None for objective"),
            (
                dict(
                    perturbation=[OUTPUT, dataclasses.replace(OUTPUT, l2_clip=1.0)],
                    num_releases=[[1], [1]],
                ),
                "`perturbation` must differ in `local_stddev` or `noise_rate` alone",
            ),
        ],
    )
    def test_privacy(self, changes, message):
        arguments = dict(
            perturbation=OUTPUT,
            num_examples=[9],
            num_releases=[1],
            accountant=PROVEN,
            delta=1e-3,
        )
        with pytest.raises(ValueError, match=message):
            compute_privacy(**(arguments | changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(epsilon=0.0), "`epsilon` must be positive"),
            (dict(epsilon=0.1), r"`epsilon` must exceed what .*\(2.5\); raise `mu`"),
            (dict(num_releases=[0]), "`num_releases` must be positive for some client"),
            (dict(target="max"), "`target` must be a member of EpsilonTarget"),
        ],
    )
    def test_calibration(self, changes, message):
        arguments = dict(
            epsilon=9.0,
            mu=0.1,
            num_examples=[224],
            num_releases=[80],
            accountant=PUBLISHED,
        )
        with pytest.raises(ValueError, match=message):
            calibrate_objective_perturbation(**(arguments | changes))

    def test_features(self):
        check_feature_norms([[0.6, 0.8], [0.0, 0.0]])
        check_feature_norms(np.zeros((0, 2)))
        check_feature_norms(np.full((1, 3), 3**-0.5, dtype=np.float32))
        with pytest.raises(ValueError, match="norm at most 1, .* Found 1.28"):
            check_feature_norms([[0.8, 1.0]])
        for features in ([0.1], [[math.nan]]):
            with pytest.raises(ValueError, match="`features` must be finite, of shape"):
                check_feature_norms(features)


def test_works_without_tensorflow():
    code = """if True:
        import sys
        for name in ("tensorflow", "tensorflow_federated", "keras", "jax"):
            sys.modules[name] = None
        from upcycled_fl import accounting, schedule, theory
        assert set(accounting.__all__) <= set(dir(accounting))
    """
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
