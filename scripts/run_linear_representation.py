"""Measures CENTAUR's linear representation learning: its floor, rate and start.

The bare command learns a shared subspace of rank 2 from 20,000 made-up users under
user-level privacy, on the execution engine. It prints and plots the distance to the
true subspace by round, its floor against epsilon and against the dimension, that of the
methods which release a whole quadratic, and how often the start succeeds with one trial
and with several.

  python -m scripts.run_linear_representation
  python -m scripts.run_linear_representation --dims=16,32,64 --seed=1
  python -m scripts.run_linear_representation --flagfile=configs/centaur/linear.flags

A flag whose value is a list is an axis. This is a simulation: a trusted server adds the
noise, and distances to the truth are known because the users are made up.
"""

from absl import flags

from scripts import axis_flag
from scripts import flags as run_flags
from simulation import process

_NAME = "run_linear_representation"
_AXES = (
    ("epsilons", "0.5,1,2,4,8", "epsilon of start and rounds together"),
    ("dims", "16,24,32,48,64", "input dimensions d of the floor against d"),
)
_INTEGERS = (
    ("num_users", 20000, "users n, all of whom take part in every release"),
    ("dim", 32, "input dimension d of the curves and the floor against epsilon"),
    ("rank", 2, "columns k of the representation"),
    ("examples_per_user", 640, "examples m of a user, cut into disjoint subsets"),
    ("start_examples", 40, "of these, for the start"),
    ("head_examples", 20, "for one round's least squares"),
    ("gradient_examples", 10, "for one round's gradient"),
    ("trials", 5, "trials T_0 of a start"),
    ("steps", 10, "steps L of a trial"),
    ("rounds", 20, "rounds T"),
    ("comparison_rounds", 4, "rounds of the perturbed normal equations"),
    ("floor_rounds", 5, "the floor is the mean distance over so many last rounds"),
    ("repeats", 4, "independent repetitions on the same users"),
    ("users_per_block", 500, "users a client value of the simulation stands for"),
    ("boost_starts", 200, "starts of the success rates; a multiple of boost_group"),
    ("boost_group", 10, "starts on the same users; every group has others"),
    ("boost_users", 2000, "users of the success rates"),
    ("boost_dim", 24, "dimension of the success rates"),
    ("boost_start_examples", 60, "examples of a user of the success rates"),
    ("boost_trials", 9, "trials of a start of the success rates"),
    ("boost_steps", 6, "steps of a trial of the success rates"),
)
_NUMBERS = (
    ("dim_epsilon", 4.0, "epsilon of the floor against d"),
    ("boost_epsilon", 8.0, "epsilon of a start of the success rates, all its trials"),
    ("delta", 1e-5, "delta of everything that one method releases"),
    ("start_share", 0.5, "the start's part of the squared privacy cost mu^2"),
    ("learning_rate", 0.4, "server learning rate eta_g"),
    ("start_clip_scale", 2.0, "C_0 in the start's threshold zeta_0 = C_0 sqrt(d k)"),
    ("clip_scale", 1.0, "C in the rounds' threshold zeta_g = C sqrt(d k)"),
    ("matrix_clip_scale", 1.0, "C' in the comparisons' threshold C' d k"),
    ("trial_distance", 0.3, "distance eps_0 that a good trial keeps, below 1/2"),
)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    before = set(values)
    for name, default, text in _AXES:
        integer = name == "dims"
        item = flags.IntegerParser() if integer else flags.FloatParser()
        axis_flag.define_axis(name, default, text, item=item, values=values)
    for name, count, text in _INTEGERS:
        flags.DEFINE_integer(name, count, text, flag_values=values)
    for name, number, text in _NUMBERS:
        flags.DEFINE_float(name, number, text, flag_values=values)
    flags.DEFINE_enum(
        "adjacency",
        "zero_out",
        ["zero_out", "replace_one"],
        "what epsilon is about: one user's contributions become 0 (n is fixed), or one "
        "user's data are replaced, at twice the noise",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "accountant",
        "analytic",
        ["analytic", "rdp"],
        "analytic: exact for Gaussians; rdp: Renyi DP, which takes more noise",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "engine",
        "local",
        ["local", "ray", "tff"],
        "what runs the TFF computations",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed",
        None,
        "root seed of users, starts and noise: the same seed gives the same tables. No "
        "epsilon holds against those who know it. Unset: the operating system's "
        "entropy, stored nowhere",
        lower_bound=0,
        flag_values=values,
    )
    run_flags.define_output_flags(values)
    for name in set(values) - before:
        flags.declare_key_flag(name, flag_values=values)


def main() -> None:
    """Runs the program on the flags."""
    from scripts.linear_config import LinearConfig

    with process.user_input():
        config = run_flags.build_config(LinearConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import linear_study

    linear_study.run(config)


if __name__ == "__main__":
    define_flags()
    flags.declare_key_flag("flagfile")
    process.run_program(main, name=_NAME)
