"""Trains a model by federated averaging under distributed differential privacy.

The bare command trains logistic regression on real handwritten digits (800 users, 80
expected a round, 100 rounds) under the distributed discrete Gaussian at 16 bits and
epsilon 6, and beside it under the central Gaussian at the same (epsilon, delta).

  python -m scripts.run_distributed_dp
  python -m scripts.run_distributed_dp --seed=1 --mechanism=skellam --epsilon=3
  python -m scripts.run_distributed_dp --flagfile=configs/distributed_dp/emnist.flags

The same command takes up its own unfinished run. This is a simulation: no cryptography
is run.
"""

import math

from absl import flags

from scripts import flags as run_flags
from simulation import process
from simulation.tasks import TASK_NAMES

FLAGS = flags.FLAGS
_NAME = "run_distributed_dp"


def _define_task_flags() -> None:
    flags.DEFINE_enum("task", "digits", TASK_NAMES, "what to learn")
    flags.DEFINE_string("model", None, "model of the task (unset: the task's default)")
    flags.DEFINE_integer("clients_per_round", 80, "expected cohort size n")
    flags.DEFINE_integer("total_rounds", 100, "rounds T")
    flags.DEFINE_float("client_lr", 0.1, "learning rate of the clients' SGD")
    flags.DEFINE_integer("batch_size", 5, "examples in a client's batch")
    flags.DEFINE_integer("client_epochs", 1, "a client's passes over its examples")
    flags.DEFINE_float("server_lr", 1.0, "learning rate of the server's SGD")
    flags.DEFINE_float("server_momentum", 0.9, "momentum of the server's SGD")
    flags.DEFINE_float(
        "dropout_rate",
        0.0,
        "probability that a client drops out of a round after its start; the server "
        "adds the noise that is then missing inside the modular sum",
    )


def _define_privacy_flags() -> None:
    flags.DEFINE_enum(
        "mechanism",
        "ddgauss",
        ["ddgauss", "skellam", "gaussian", "none"],
        "distributed discrete Gaussian, distributed Skellam, central Gaussian, or no "
        "privacy",
    )
    flags.DEFINE_float("epsilon", 6.0, "privacy budget; the noise is calibrated to it")
    flags.DEFINE_float("delta", None, "delta of the budget (unset: 1 / users)")
    flags.DEFINE_float("clip", 0.1, "L2 clip c of a client's update")
    flags.DEFINE_integer("bits", 16, "bits B a coordinate; sums are modulo 2**B")
    flags.DEFINE_float(
        "beta", math.exp(-0.5), "bias parameter of the conditional rounding, in [0, 1)"
    )
    flags.DEFINE_float(
        "num_stddevs", 4.0, "standard deviations k of the sum that must fit in 2**B"
    )
    flags.DEFINE_enum(
        "rotation",
        "hadamard",
        ["hadamard", "hadamard_power_of_two", "dft", "dft_uniform_phase", "identity"],
        "how updates are flattened before rounding",
    )
    flags.DEFINE_enum(
        "sampling",
        "poisson",
        ["poisson", "fixed"],
        "poisson: every user joins with probability n / N; fixed: n users, drawn "
        "without replacement",
    )
    flags.DEFINE_enum(
        "accounting",
        "proven",
        ["proven", "as_published"],
        "as_published: the papers' Poisson bound for fixed cohorts, not a proven bound "
        "for that sampler",
    )
    flags.DEFINE_enum(
        "bound",
        None,
        ["symmetric", "published"],
        "bound of Poisson amplification (unset: symmetric where proven)",
    )
    flags.DEFINE_enum(
        "central_accountant",
        None,
        ["rdp", "pld"],
        "accountant of the central Gaussian (unset: pld for poisson, else rdp)",
    )


def _define_clipping_flags() -> None:
    flags.DEFINE_bool(
        "adaptive_clip",
        False,
        "let the clip follow a quantile of the updates' norms, with accounted noise; "
        "--clip is where it starts",
    )
    flags.DEFINE_float("target_quantile", 0.5, "quantile that the clip follows")
    flags.DEFINE_float("clip_lr", 0.2, "learning rate of the clip's geometric steps")
    flags.DEFINE_float(
        "quantile_noise_multiplier",
        None,
        "noise of the quantile's estimate (unset: clients_per_round / 10)",
    )


def _define_output_flags() -> None:
    flags.DEFINE_bool(
        "compare_central",
        True,
        "train the central Gaussian at the same (epsilon, delta) beside it",
    )
    flags.DEFINE_enum(
        "diagnostics",
        "on",
        ["on", "off"],
        "off: leave losses, accuracies, cohort sizes and other exact functions of "
        "private data out of every file",
    )
    flags.DEFINE_integer("eval_every", 1, "rounds between evaluations")
    flags.DEFINE_integer("checkpoint_every", 1, "rounds between checkpoints")


def define_flags() -> None:
    """Defines the flags of the program."""
    _define_task_flags()
    _define_privacy_flags()
    _define_clipping_flags()
    run_flags.define_run_flags()
    _define_output_flags()
    flags.declare_key_flag("flagfile")
    for name in ("seed", "engine", "output_root", "experiment"):
        flags.declare_key_flag(name)


def main() -> None:
    """Runs the program on the flags."""
    from scripts.training_config import TrainingConfig

    with process.user_input():
        config = run_flags.build_config(TrainingConfig)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import distributed_training

    distributed_training.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
