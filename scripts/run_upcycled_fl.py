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
    # --help lists what the main module declares.
    for name in [*(set(values) - before), "flagfile"]:
        flags.declare_key_flag(name, flag_values=values)


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
