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

from absl import flags

from scripts import flags as run_flags
from scripts import training_flags
from simulation import process

_NAME = "run_distributed_dp"


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    before = set(values)
    training_flags.define_flags(values)
    # --help lists what the main module declares.
    for name in [*(set(values) - before), "flagfile"]:
        flags.declare_key_flag(name, flag_values=values)


def main() -> None:
    """Runs the program on the flags."""
    from scripts.training_config import TrainingConfig

    with process.user_input():
        config = run_flags.build_config(TrainingConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import distributed_training

    distributed_training.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
