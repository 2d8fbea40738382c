"""Measures the error of private mean estimation against bits, k and epsilon.

The bare command measures the distributed discrete Gaussian with 10 and 16 bits, n = 100
and 1000 clients, d = 250, k = 2 and 4, epsilon 1 and 6, under both norm bounds. It
prints the ratio of its mean squared error to the central Gaussian's, calibrated by the
same accountant, in about a minute on 2 cores.

  python -m scripts.run_mean_estimation
  python -m scripts.run_mean_estimation --mechanism=skellam --bits=12,14 --seed=1
  python -m scripts.run_mean_estimation \\
      --flagfile=configs/distributed_dp/mean_estimation.flags

A flag whose value is a list is an axis of the grid: every combination is measured. The
same command takes up its own unfinished run. This is a simulation: no cryptography is
run. It needs TensorFlow, not TensorFlow Federated.
"""

import math
import os

from absl import flags

from scripts import axis_flag
from scripts import flags as run_flags
from simulation import process

_NAME = "run_mean_estimation"


def _define_grid_flags(values: flags.FlagValues) -> None:
    # The choices are checked with the rest of the configuration: their lists live in
    # modules whose import takes a second.
    word, integer, number = (
        flags.ArgumentParser(),
        flags.IntegerParser(),
        flags.FloatParser(),
    )
    for name, default, text, item in (
        (
            "mechanism",
            "ddgauss",
            "ddgauss (distributed discrete Gaussian), skellam or gaussian (central)",
            word,
        ),
        (
            "rotation",
            "hadamard",
            "how vectors are flattened before rounding: hadamard, "
            "hadamard_power_of_two, dft, dft_uniform_phase or identity",
            word,
        ),
        (
            "norm_bound",
            "worst_case,optimistic",
            "what calibration assumes of the sum's norm: worst_case (c n) or "
            "optimistic (c sqrt(n))",
            word,
        ),
        ("num_clients", "100,1000", "number of clients n", integer),
        ("dim", "250", "length d of a vector", integer),
        ("clip", "10", "L2 clip c, and norm of every vector", number),
        (
            "num_stddevs",
            "2,4",
            "standard deviations k of the sum that must fit in 2**B",
            number,
        ),
        ("bits", "10,16", "bits B a coordinate", integer),
        ("epsilon", "1,6", "privacy budget", number),
    ):
        axis_flag.define_axis(name, default, text, item=item, values=values)
        # --help lists what the main module declares.
        flags.declare_key_flag(name, flag_values=values)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    _define_grid_flags(values)
    flags.DEFINE_float("delta", 1e-5, "delta of the budget", flag_values=values)
    flags.DEFINE_float(
        "beta",
        math.exp(-0.5),
        "bias parameter of the conditional rounding, in [0, 1)",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "repeats", 50, "repeats of each cell, at least 2", flag_values=values
    )
    flags.DEFINE_integer(
        "seed",
        None,
        "root seed: the same seed gives the same results.csv, bit for bit. Whoever "
        "knows it can remove the noise. Unset: the operating system's entropy, stored "
        "nowhere",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "workers",
        None,
        "cells measured at once (unset: one a core)",
        flag_values=values,
    )
    run_flags.define_output_flags(values)
    for name in ("output_root", "experiment", "flagfile"):
        flags.declare_key_flag(name, flag_values=values)


def main() -> None:
    """Runs the program on the flags."""
    from scripts.mean_estimation_config import StudyConfig

    with process.user_input():
        config = run_flags.build_config(StudyConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # XLA logs an error that means nothing ("SetPriority unimplemented") at its first
    # compilation. What fails in TensorFlow raises as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # After the flags were checked: TensorFlow takes seconds to import.
    process.import_quietly("tensorflow")
    from scripts import mean_estimation_study

    mean_estimation_study.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
