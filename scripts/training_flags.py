"""The flags of programs that train: what TrainingConfig's fields are told by."""

import math

from absl import flags

from scripts import flags as run_flags


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of training, privacy, clipping and output."""
    run_flags.define_task_flags(values)
    _define_training_flags(values)
    _define_privacy_flags(values)
    _define_clipping_flags(values)
    run_flags.define_run_flags(values)
    _define_output_flags(values)


def _define_training_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "clients_per_round", 80, "expected cohort size n", flag_values=values
    )
    flags.DEFINE_integer("total_rounds", 100, "rounds T", flag_values=values)
    flags.DEFINE_float(
        "client_lr", 0.1, "learning rate of the clients' SGD", flag_values=values
    )
    flags.DEFINE_float(
        "client_momentum", 0.0, "momentum of the clients' SGD", flag_values=values
    )
    flags.DEFINE_float(
        "proximal_mu",
        0.0,
        "strength mu of the clients' proximal term (FedProx); 0: none",
        flag_values=values,
    )
    flags.DEFINE_float(
        "straggler_rate",
        0.0,
        "probability that a client of a round makes fewer epochs, uniformly from 1 on",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "client_weighting",
        "uniform",
        ["uniform", "examples"],
        "how clients count in the mean; examples needs --mechanism=none, as the number "
        "of a user's examples would break the mechanisms' sensitivity",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "batch_size", 5, "examples in a client's batch", flag_values=values
    )
    flags.DEFINE_integer(
        "client_epochs", 1, "a client's passes over its examples", flag_values=values
    )
    flags.DEFINE_enum(
        "server_optimizer",
        "sgd",
        run_flags.SERVER_OPTIMIZERS,
        "what the server does with the mean update",
        flag_values=values,
    )
    flags.DEFINE_float(
        "server_lr", 1.0, "learning rate of the server", flag_values=values
    )
    flags.DEFINE_float(
        "server_momentum",
        0.9,
        "momentum of the server's SGD; beta_1 of Adam and Yogi",
        flag_values=values,
    )
    flags.DEFINE_float(
        "server_epsilon",
        1e-3,
        "what Adagrad, Adam and Yogi add to the root of the second moment",
        flag_values=values,
    )
    flags.DEFINE_float(
        "dropout_rate",
        0.0,
        "probability that a client drops out of a round after its start; the server "
        "adds the noise that is then missing inside the modular sum",
        flag_values=values,
    )


def _define_privacy_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_enum(
        "mechanism",
        "ddgauss",
        ["ddgauss", "skellam", "gaussian", "none"],
        "distributed discrete Gaussian, distributed Skellam, central Gaussian, or no "
        "privacy",
        flag_values=values,
    )
    flags.DEFINE_float(
        "epsilon",
        6.0,
        "privacy budget; the noise is calibrated to it",
        flag_values=values,
    )
    flags.DEFINE_float(
        "delta", None, "delta of the budget (unset: 1 / users)", flag_values=values
    )
    flags.DEFINE_float(
        "clip", 0.1, "L2 clip c of a client's update", flag_values=values
    )
    flags.DEFINE_integer(
        "bits", 16, "bits B a coordinate; sums are modulo 2**B", flag_values=values
    )
    flags.DEFINE_float(
        "beta",
        math.exp(-0.5),
        "bias parameter of the conditional rounding, in [0, 1)",
        flag_values=values,
    )
    flags.DEFINE_float(
        "num_stddevs",
        4.0,
        "standard deviations k of the sum that must fit in 2**B",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "rotation",
        "hadamard",
        ["hadamard", "hadamard_power_of_two", "dft", "dft_uniform_phase", "identity"],
        "how updates are flattened before rounding",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "sampling",
        "poisson",
        ["poisson", "fixed"],
        "poisson: every user joins with probability n / N; fixed: n users, drawn "
        "without replacement",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "accounting",
        "proven",
        ["proven", "as_published"],
        "as_published: the papers' Poisson bound for fixed cohorts, not a proven bound "
        "for that sampler",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "bound",
        None,
        ["symmetric", "published"],
        "bound of Poisson amplification (unset: symmetric where proven)",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "central_accountant",
        None,
        ["rdp", "pld", "analytic"],
        "accountant of the central Gaussian; analytic: exact, where all join every "
        "round (unset: pld for poisson, else rdp)",
        flag_values=values,
    )


def _define_clipping_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool(
        "adaptive_clip",
        False,
        "let the clip follow a quantile of the updates' norms, with accounted noise; "
        "--clip is where it starts",
        flag_values=values,
    )
    flags.DEFINE_float(
        "target_quantile", 0.5, "quantile that the clip follows", flag_values=values
    )
    flags.DEFINE_float(
        "clip_lr",
        0.2,
        "learning rate of the clip's geometric steps",
        flag_values=values,
    )
    flags.DEFINE_float(
        "quantile_noise_multiplier",
        None,
        "noise of the quantile's estimate (unset: clients_per_round / 10)",
        flag_values=values,
    )


def _define_output_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool(
        "compare_central",
        True,
        "train the central Gaussian at the same (epsilon, delta) beside it",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "diagnostics",
        "on",
        ["on", "off"],
        "off: leave losses, accuracies, cohort sizes and other exact functions of "
        "private data out of every file",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "eval_every", 1, "rounds between evaluations", flag_values=values
    )
    flags.DEFINE_integer(
        "checkpoint_every", 1, "rounds between checkpoints", flag_values=values
    )
