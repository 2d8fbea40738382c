"""Noise is shared neither by mechanisms nor by configurations with one seed."""

from scripts.mechanism_plan import build_plans
from simulation import seeds
from tests.scripts.runs import TINY, parse


def _build_roots(*arguments: str) -> dict[str, seeds.RootSeed]:
    config = parse(*TINY, "--seed=1", *arguments)
    plans = build_plans(
        config, num_clients=800, dim=7850, root=seeds.build_root_seed(config.seed)
    )
    return {plan.name: plan.noise_root for plan in plans}


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
