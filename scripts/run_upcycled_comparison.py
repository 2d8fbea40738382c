"""Compares Upcycled-FL with its baseline at the same epsilon and delta.

The bare command trains under the distributed discrete Gaussian on the embedded digits,
over five seeds: FedProx and Upcycled-FL at equal rounds with clients and at equal
server steps, and FedProx with a server learning rate that is chosen on the training
loss of a seed that is not reported. Noise is calibrated for each anew: half the rounds
take less.

  python -m scripts.run_upcycled_comparison
  python -m scripts.run_upcycled_comparison --mechanism=none --perturbation=output \\
      --client_epsilon=2 --task=synthetic_20 --client_weighting=examples

All flags of run_upcycled_fl are taken but --seed. Each run has a folder of its own and
is resumed by the same command. The choice of the server's rate is not charged.
"""

from absl import flags

from scripts import axis_flag, run_upcycled_fl
from scripts import flags as run_flags
from simulation import process

_NAME = "run_upcycled_comparison"
# Where this program's defaults differ from run_upcycled_fl's.
_DEFAULTS = {
    "task": "digits",
    "mechanism": "ddgauss",
    "epsilon": 6.0,
    "client_weighting": "uniform",
    "clients_per_round": 80,
    "total_rounds": 100,
    "client_lr": 0.1,
    "client_momentum": 0.0,
    "client_epochs": 1,
    "batch_size": 5,
    "sampling": "poisson",
    "straggler_rate": 0.0,
    "eval_every": 10,
    "checkpoint_every": 100,
    "experiment": "upcycled_comparison",
}


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    before = set(values)
    run_upcycled_fl.define_flags(values)
    for name, value in _DEFAULTS.items():
        values.set_default(name, value)
    axis_flag.define_axis(
        "seeds",
        "1,2,3,4,5",
        "root seeds, over which intervals are computed",
        item=flags.IntegerParser(lower_bound=0),
        values=values,
    )
    flags.DEFINE_integer(
        "tuning_seed",
        0,
        "root seed of the runs that choose the server's learning rate",
        lower_bound=0,
        flag_values=values,
    )
    axis_flag.define_axis(
        "server_lrs",
        "0.5,0.7,1,1.4,2,2.8",
        "server learning rates to choose from",
        item=flags.FloatParser(),
        values=values,
    )
    for name in set(values) - before:
        flags.declare_key_flag(name, flag_values=values)


def main() -> None:
    """Runs the program on the flags."""
    from scripts.upcycled_comparison_config import ComparisonConfig

    with process.user_input():
        config = run_flags.build_config(ComparisonConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import upcycled_comparison

    upcycled_comparison.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
