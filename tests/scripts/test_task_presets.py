"""Tests for the presets of tasks whose data are not here: flags, headers, real data."""

import pathlib

import numpy as np
import pytest

from scripts import distributed_training, flags, preparation
from simulation.tasks import TASK_NAMES, load_task
from tests.scripts import runs, test_prepare_data

ROOT = pathlib.Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs" / "tasks").glob("*.flags"))
DUMPS = ROOT.parent / "shared" / "data" / "stackexchange"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
class TestPresets:
    def test_the_flags_are_those_of_the_program(self, preset):
        config = runs.parse(f"--flagfile={preset}")
        assert config.task in TASK_NAMES
        flags.build_task_options(config)

    def test_the_header_says_how_and_what(self, preset):
        head = [
            line for line in preset.read_text().splitlines() if line.startswith("#")
        ]
        text = "\n".join(head)
        assert "python -m scripts.prepare_data" in text
        assert f"--flagfile=configs/tasks/{preset.name}" in text
        for word in ("Expected", "Runtime", "Setting"):
            assert word in text


def test_there_are_presets():
    assert len(PRESETS) >= 5


@pytest.mark.slow
@pytest.mark.skipif(not DUMPS.is_dir(), reason="the dumps of Stack Exchange are absent")
def test_tags_are_learned_on_a_real_site(tmp_path):
    """The trained model finds far more tags than the most frequent ones are."""
    data = tmp_path / "data"
    preparation.run(
        test_prepare_data.parse(
            "--format=stack_exchange",
            f"--input={DUMPS / 'beer' / 'Posts.xml.gz'}",
            "--name=beer",
            f"--data_dir={data}",
        )
    )
    config = runs.parse(
        f"--flagfile={ROOT / 'configs' / 'tasks' / 'stackexchange_tag.flags'}",
        f"--data_dir={data}",
        f"--output_root={tmp_path / 'runs'}",
        "--seed=1",
    )
    task = load_task(config.task, flags.build_task_options(config))
    counts = sum(task.train.load(c)[1].sum(axis=0) for c in task.train.client_ids)
    tagged = np.concatenate([task.test.load(c)[1] for c in task.test.client_ids])
    frequent = tagged[:, np.argsort(-counts)[:5]].sum() / tagged.sum()
    assert 0.1 < frequent < 0.4
    outcome = distributed_training.run(config)
    assert outcome.results["none"].final["recall_at_5"] > 2 * frequent
