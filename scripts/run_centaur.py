"""Trains one private representation, and a head for each client: CENTAUR.

The bare command trains on the embedded digits, divided among 100 users with at most 3
digits each (another --partition is taken). Only the representation's change leaves a
client; its head stays with it.

  python -m scripts.run_centaur
  python -m scripts.run_centaur --mechanism=ddgauss --bits=18
  python -m scripts.run_centaur --method=ppsgd_authors

The baselines take the same flags: DP-FedAvg with a fine-tuned head (fedavg_fb), PPSGD
(ppsgd_paper, ppsgd_authors), PMTL with a fine-tuned head (pmtl_ft), and training
without any federation (stand_alone, with --mechanism=none --total_rounds=1). This is a
simulation: no cryptography is run.
"""

from absl import flags

from scripts import flags as run_flags
from scripts import training_flags
from simulation import process

_NAME = "run_centaur"
# Where this program's defaults differ from run_distributed_dp's.
_DEFAULTS = {
    "task": "digits",
    "mechanism": "gaussian",
    "epsilon": 8.0,
    "sampling": "poisson",
    "total_rounds": 40,
    "client_lr": 0.1,
    "client_momentum": 0.9,
    "client_epochs": 2,
    "batch_size": 100,
    "clip": 0.25,
    "server_momentum": 0.0,
    "compare_central": False,
    "eval_every": 5,
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    before = set(values)
    training_flags.define_flags(values)
    # It follows from the participation.
    delattr(values, "clients_per_round")
    for name, value in _DEFAULTS.items():
        values.set_default(name, value)
    values["client_epochs"].help = (
        "a client's epochs of what it sends the change of, in a round; ppsgd makes one "
        "(paper: one step) whatever is given here, as published"
    )
    flags.DEFINE_enum(
        "method",
        "centaur",
        [
            "centaur",
            "fedavg_fb",
            "ppsgd_paper",
            "ppsgd_authors",
            "pmtl_ft",
            "stand_alone",
        ],
        "what is trained",
        flag_values=values,
    )
    flags.DEFINE_string(
        "split_layer",
        None,
        "first layer of the head (unset: the model's last layer)",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "head_state",
        "client",
        ["client", "refit"],
        "centaur, where a head begins in a round. client: where it ended in the "
        "client's last round; refit: at the initial model's",
        flag_values=values,
    )
    flags.DEFINE_float(
        "participation",
        1.0,
        "p_g, the expected part of the clients in a round, in (0, 1]; at 1 nothing is "
        "amplified",
        flag_values=values,
    )
    flags.DEFINE_float(
        "validation_fraction",
        0.1,
        "part of a client's training examples that settings are chosen by",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "measure_updates",
        False,
        "measure what clients send, in metrics.csv: norms of its parts, how far "
        "clients agree, signal to noise; exact functions of private data",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "evaluate_test",
        True,
        "look at the test parts, at the end; off while settings are chosen",
        flag_values=values,
    )
    _define_head_flags(values)
    # --help lists what the main module declares.
    for name in [*(set(values) - before), "flagfile"]:
        flags.declare_key_flag(name, flag_values=values)


def _define_head_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "head_epochs",
        15,
        "epochs of a head over frozen features: in CENTAUR's rounds, and for every "
        "method when a client's own model is made",
        flag_values=values,
    )
    flags.DEFINE_float(
        "head_lr", 0.1, "learning rate of a head's SGD", flag_values=values
    )
    flags.DEFINE_float(
        "head_momentum", 0.9, "momentum of a head's SGD", flag_values=values
    )
    flags.DEFINE_float(
        "weight_decay", 1e-4, "weight decay of the clients' SGD", flag_values=values
    )
    flags.DEFINE_float(
        "pmtl_lambda",
        1.0,
        "pmtl_ft: strength of the term lambda ||theta - theta_global||^2",
        flag_values=values,
    )
    flags.DEFINE_float(
        "ppsgd_head_lr",
        None,
        "ppsgd: learning rate of a head in the rounds (unset: --head_lr)",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "stand_alone_epochs",
        200,
        "stand_alone: epochs of a client's whole model, at --client_lr",
        flag_values=values,
    )


def main() -> None:
    """Runs the program on the flags."""
    from scripts.centaur_config import CentaurConfig

    with process.user_input():
        config = run_flags.build_config(CentaurConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import centaur_training

    centaur_training.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
