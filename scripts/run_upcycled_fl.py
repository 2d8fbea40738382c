"""Trains with Upcycled-FL: after every round with clients, a step by the server alone.

The bare command trains FedProx on FedProx's synthetic data (30 users, half of them
stragglers), upcycled: 40 rounds with clients make 80 server steps.

  python -m scripts.run_upcycled_fl
  python -m scripts.run_upcycled_fl --noupcycled
  python -m scripts.run_upcycled_fl --task=digits --mechanism=ddgauss --epsilon=6 \\
      --clients_per_round=80 --client_weighting=uniform --client_lr=0.1 --batch_size=5

Under a mechanism the server's own steps are post-processing: a round is charged once
for its two steps. All flags of run_distributed_dp are taken. This is a simulation: no
cryptography is run.
"""

from absl import flags

from scripts import flags as run_flags
from scripts import training_flags
from simulation import process

_NAME = "run_upcycled_fl"
# Where this program's defaults differ from run_distributed_dp's.
_DEFAULTS = {
    "task": "synthetic",
    "mechanism": "none",
    "client_weighting": "examples",
    "clients_per_round": 9,
    "total_rounds": 40,
    "client_lr": 0.01,
    "client_momentum": 0.5,
    "client_epochs": 20,
    "batch_size": 32,
    "server_momentum": 0.0,
    "proximal_mu": 0.3,
    "straggler_rate": 0.5,
    "sampling": "fixed",
    "compare_central": False,
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    before = set(values)
    training_flags.define_flags(values)
    for name, value in _DEFAULTS.items():
        values.set_default(name, value)
    flags.DEFINE_bool(
        "upcycled",
        True,
        "make the even steps; off: the baseline alone",
        flag_values=values,
    )
    flags.DEFINE_float(
        "upcycled_lambda",
        None,
        "lambda of the even step, whose coefficient is mu / (mu + lambda) (unset: "
        "0.12, unless a coefficient is given)",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "lambda_schedule",
        "constant",
        ["constant", "increasing"],
        "increasing: coefficients fall with the root of the step",
        flag_values=values,
    )
    flags.DEFINE_float(
        "upcycled_coefficient",
        None,
        "the coefficient itself, in [0, 1), for baselines without a proximal term",
        flag_values=values,
    )
    _define_algorithm_flags(values)
    _define_perturbation_flags(values)
    # --help lists what the main module declares.
    for name in [*(set(values) - before), "flagfile"]:
        flags.declare_key_flag(name, flag_values=values)


def _define_algorithm_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_enum(
        "algorithm",
        "fedavg",
        ["fedavg", "fednova", "scaffold", "feddyn", "pfedme"],
        "the baseline: fedavg is FedProx with --proximal_mu, FedAvgM with "
        "--server_momentum and FedYogi with --server_optimizer=yogi; feddyn's alpha is "
        "--proximal_mu",
        flag_values=values,
    )
    flags.DEFINE_float(
        "pfedme_penalty",
        15.0,
        "pull of a client's own model towards its copy of the global one",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "pfedme_steps",
        5,
        "steps of a client's own model on each batch, at --client_lr",
        flag_values=values,
    )
    flags.DEFINE_float(
        "pfedme_lr",
        0.005,
        "learning rate of a client's copy of the global model",
        flag_values=values,
    )


def _define_perturbation_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_enum(
        "perturbation",
        "none",
        ["none", "output", "objective"],
        "noise that each client adds for its examples' privacy: to its clipped model, "
        "or to its objective",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "client_accountant",
        "as_published",
        ["as_published", "replace_one_average", "proven"],
        "what the clients' own epsilons rest on",
        flag_values=values,
    )
    flags.DEFINE_float(
        "model_clip", 10.0, "output: norm of a client's model", flag_values=values
    )
    flags.DEFINE_float(
        "client_stddev",
        None,
        "output: standard deviation of the noise in each coordinate",
        flag_values=values,
    )
    flags.DEFINE_float(
        "objective_rate",
        None,
        "objective: alpha, the rate of the noise's norm; less is more noise",
        flag_values=values,
    )
    flags.DEFINE_float(
        "client_epsilon",
        None,
        "find the noise for this epsilon of the clients, which no round may pass",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "client_epsilon_target",
        "max",
        ["max", "mean"],
        "which figure of the clients' epsilons --client_epsilon is",
        flag_values=values,
    )
    flags.DEFINE_float(
        "client_delta", 1e-3, "output: delta of the clients", flag_values=values
    )
    flags.DEFINE_enum(
        "local_solver",
        "sgd",
        ["sgd", "exact"],
        "exact: one_output_logistic_regression is minimised to --gradient_tolerance, "
        "as proven epsilons of objective perturbation need",
        flag_values=values,
    )
    flags.DEFINE_float(
        "gradient_tolerance",
        1e-5,
        "exact: bound on the gradient's norm at the solution",
        flag_values=values,
    )
    flags.DEFINE_float(
        "residual_rate",
        None,
        "exact, objective: rate of the noise on the solution (unset: where it costs "
        "0.01 of epsilon a round)",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "unmet_assumptions",
        False,
        "go on with an as_published epsilon where its theorem is known not to apply; "
        "every output says so",
        flag_values=values,
    )


def main() -> None:
    """Runs the program on the flags."""
    from scripts.upcycled_config import UpcycledConfig

    with process.user_input():
        config = run_flags.build_config(UpcycledConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import upcycled_training

    upcycled_training.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
