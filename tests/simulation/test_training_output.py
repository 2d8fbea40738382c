"""Tests for what a training shows while it runs."""

import tensorflow as tf

from simulation import progress, training_output


def read_tags(folder) -> set[str]:
    tags = set()
    for file in (folder / "tensorboard").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            tags.update(value.tag for value in event.summary.value)
    return tags


def release(folder, **row) -> set[str]:
    releases = training_output.Releases(folder, keeps_times=False)
    releases.release({"round": 1, **row}, 1, 0.5)
    return read_tags(folder)


def test_epsilons_in_tensorboard_say_what_they_rest_on(tmp_path):
    tags = release(
        tmp_path,
        epsilon=float("inf"),
        client_epsilon_max=2.0,
        client_accountant="as_published",
        client_standing="not proven",
    )
    assert "client_epsilon_max (as_published; not proven)" in tags
    assert "client_epsilon_max" not in tags


def test_an_epsilon_as_published_is_called_that(tmp_path):
    tags = release(tmp_path / "a", epsilon=2.0, as_published=True)
    assert "epsilon (as published, not proven)" in tags and "epsilon" not in tags
    assert "epsilon" in release(tmp_path / "b", epsilon=2.0, as_published=False)


def test_what_the_bar_says():
    row = {
        "train_loss": 0.5,
        "test_accuracy": 0.25,
        "epsilon": 3.0,
        "client_epsilon_max": 1.5,
        "client_accountant": "proven",
    }
    text = training_output.summarize_row(row, "accuracy", "epsilon (as published)")
    assert text == (
        "loss 0.5, accuracy 0.25, epsilon (as published) 3, client epsilon max "
        "(proven) 1.5"
    )


def test_no_bar_inside_the_block(capsys):
    with progress.hide_progress():
        with progress.show_progress("a", 0, 2, unit="round") as bar:
            bar.update()
            training_output.ClientProgress(bar)(1, 2)
    assert capsys.readouterr().err == ""
    with progress.show_progress("a", 0, 2, unit="round") as bar:
        bar.update()
    assert "a:" in capsys.readouterr().err
