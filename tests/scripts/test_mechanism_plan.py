"""Tests for mechanism plans: whose noise is whose, and what a plan reports."""

import dataclasses

import numpy as np
import pytest

from distributed_dp.adaptive_clip import build_indicator_noise
from distributed_dp.noise import SkellamShares
from scripts.mechanism_plan import MechanismPlan, build_plans
from simulation import ledger, seeds
from tests.scripts.runs import TINY, parse


def _build_plans(*arguments: str) -> list[MechanismPlan]:
    config = parse(*TINY, "--seed=1", *arguments)
    return build_plans(
        config, num_clients=800, dim=7850, root=seeds.build_root_seed(config.seed)
    )


def _build_roots(*arguments: str) -> dict[str, seeds.RootSeed]:
    return {plan.name: plan.noise_root for plan in _build_plans(*arguments)}


def test_the_same_configuration_repeats_its_noise():
    one = _build_roots("--output_root=/nowhere/a", "--experiment=a")
    assert one == _build_roots("--output_root=/nowhere/b", "--experiment=b")
    beside = _build_roots("--compare_central", "--eval_every=7", "--checkpoint_every=3")
    assert beside["ddgauss"] == one["ddgauss"]


def test_other_settings_and_mechanisms_draw_other_noise():
    """Else the difference of two releases would hold their signals without noise."""
    roots = [
        root
        for arguments in ([], ["--client_lr=0.11"], ["--client_epochs=3"], ["--clip=1"])
        for root in _build_roots("--compare_central", *arguments).values()
    ]
    assert len(roots) == 8
    assert len({root.value for root in roots}) == len(roots)
    assert seeds.build_root_seed(1).value not in {root.value for root in roots}


def test_other_data_draw_other_noise_and_their_caveats_are_stated():
    config, root = parse(*TINY, "--seed=1"), seeds.build_root_seed(1)
    plans = {
        file: build_plans(
            config,
            num_clients=800,
            dim=7850,
            root=root,
            identity={"file": file},
            caveats=("the vocabulary",),
        )[0]
        for file in ("a", "b")
    }
    assert plans["a"].noise_root != plans["b"].noise_root
    statement = plans["a"].compute_statement(1)
    assert "does not cover: the vocabulary" in str(statement)


def test_engines_whose_results_are_equal_share_their_noise():
    """Bit for bit: of the cluster's and this machine's nothing can be subtracted."""
    local, ray, tff = (
        _build_roots("--compare_central", f"--engine={engine}")
        for engine in ("local", "ray", "tff")
    )
    assert local.keys() == tff.keys() == {"ddgauss", "gaussian"}
    assert ray == local
    # TFF's own runtime adds in another order: what is released differs.
    for name, root in tff.items():
        assert root != local[name]


def test_an_adaptive_clip_takes_the_standard_deviation_along():
    (fixed, *_), (adaptive, *_) = _build_plans(), _build_plans("--adaptive_clip")
    column = fixed.describe_columns(1)["central_stddev"]
    assert column == fixed.parameters.central_stddev > 0
    assert adaptive.describe_columns(1)["central_stddev"] is None


def test_the_server_counts_the_noise_of_which_less_arrived():
    """The quantile's Skellam noise is cut into other units than the vector's."""
    plan, *_ = _build_plans("--adaptive_clip", "--mechanism=skellam")
    main = plan.factory._noise  # pylint: disable=protected-access
    assert isinstance(main, SkellamShares)
    beside = build_indicator_noise(plan.adaptive_clip, main)
    for joined in range(plan.bounds.low, plan.bounds.high + 1):
        least = plan.factory.compute_variance_fraction(joined, 3)
        parts = [n.compute_variance_fraction(joined, 3) for n in (main, beside)]
        assert least == min(parts)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_without_records_the_server_assumes_what_hardly_fails(rate):
    """Without diagnostics nobody knows how many survived; dropout is known."""
    plan, *_ = _build_plans()
    state = ledger.build_ledger_state(800, 2)
    unknown = dataclasses.replace(
        state, rounds_completed=2, join_counts=np.full(800, 2)
    )
    sizes = np.array([20, 20])
    known = dataclasses.replace(
        unknown, cohort_sizes=sizes, survivor_counts=np.round(sizes * (1 - rate))
    )
    found, least = (
        plan.compute_server_statement(s, dropout_rate=rate).epsilon
        for s in (unknown, known)
    )
    # Nobody drops out: the full noise. Else more may have than did.
    if rate == 0:
        assert found == pytest.approx(least, rel=0.05)
    else:
        assert least < found
