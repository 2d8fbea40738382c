"""Measures what Upcycled-FL gains: FedAvg, FedProx and Upcycled-FL over seeds.

--study=table1 repeats the synthetic part of the paper's Table 1; claims tests whether
Upcycled-FL leads FedProx, and FedProx with a server learning rate, at equal client
rounds and at equal server steps; figures draws the convergence and the effect of
lambda; private adds the clients' own noise, for figure 3 and at equal epsilon.

  python -m scripts.run_upcycled_study --seeds=1
  python -m scripts.run_upcycled_study --data_folder=FOLDER \\
      --flagfile=configs/upcycled_fl/table1.flags

Without --data_folder the data are generated, by the same law, and every output says
so. All algorithms see the same cohorts, stragglers and batches at one seed. The same
command takes up its own unfinished study, run by run. Only --study=private adds noise.
"""

from absl import flags

from scripts import axis_flag
from scripts import flags as run_flags
from simulation import process

_NAME = "run_upcycled_study"


def _define_grid_flags(values: flags.FlagValues) -> None:
    # The choices are checked with the rest of the configuration.
    for name, default, text, item in (
        (
            "data",
            "iid,0_0,0.5_0.5,1_1",
            "data sets: iid, and alpha_beta of 0_0, 0.5_0.5 and 1_1",
            flags.ArgumentParser(),
        ),
        ("mu", "0.1,0.3,0.5,1", "strengths of the proximal term", flags.FloatParser()),
        (
            "upcycled_lambda",
            None,
            "lambda of each mu (unset: the paper's: 0.04, 0.12, 0.21, 0.43 at mu = "
            "0.1, 0.3, 0.5, 1)",
            flags.FloatParser(),
        ),
        ("seeds", "1,2,3,4,5", "root seeds of the runs", flags.IntegerParser(0)),
        (
            "client_lr_grid",
            "0.005,0.01,0.02,0.05,0.1,0.2",
            "client learning rates to choose from, without --client_lr",
            flags.FloatParser(),
        ),
        (
            "server_factor_grid",
            "1,1.25,1.5,2,2.5",
            "server learning rates to choose from, for --study=claims",
            flags.FloatParser(),
        ),
        (
            "lambda_grid",
            "0.01,0.03,0.1,0.3,1",
            "values of lambda, for --study=figures",
            flags.FloatParser(),
        ),
        (
            "noises",
            "output,objective",
            "where clients add noise, for --study=private",
            flags.EnumParser(["output", "objective"]),
        ),
        (
            "noise_levels",
            "0.8,20",
            "Upcycled-FL's for each of --noises: sigma of output noise, alpha of the "
            "objective's",
            flags.FloatParser(),
        ),
        (
            "baseline_noise_levels",
            "1,10",
            "FedProx's, in the paper's figure 3",
            flags.FloatParser(),
        ),
    ):
        axis_flag.define_axis(name, default, text, item=item, values=values)
        # --help lists what the main module declares.
        flags.declare_key_flag(name, flag_values=values)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    flags.DEFINE_enum(
        "study",
        "table1",
        ["table1", "claims", "figures", "private"],
        "what is measured",
        flag_values=values,
    )
    flags.DEFINE_string(
        "data_folder",
        None,
        "folder with synthetic_iid.npz, synthetic_0_0.npz, synthetic_0.5_0.5.npz and "
        "synthetic_1_1.npz: x_train, y_train, user_train, x_test, y_test, user_test "
        "(unset: generated data)",
        flag_values=values,
    )
    _define_grid_flags(values)
    flags.DEFINE_enum(
        "loss",
        "cross_entropy",
        ["cross_entropy", "double_softmax"],
        "double_softmax: the authors' program's, cross entropy of a softmax of a "
        "softmax",
        flag_values=values,
    )
    flags.DEFINE_float(
        "client_lr",
        None,
        "learning rate of the clients (unset: chosen for each data set by the final "
        "training loss of FedProx)",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "initial_weights",
        "zeros",
        ["zeros", "uniform"],
        "uniform: PyTorch's, in +-1 / sqrt(number of features), drawn for each seed",
        flag_values=values,
    )
    for name, default, text in (
        ("selection_seed", 100, "root seed of the runs that choose learning rates"),
        ("total_rounds", 80, "rounds with clients; Upcycled-FL makes two steps in one"),
        ("clients_per_round", 9, "clients in a round"),
        ("client_epochs", 20, "epochs of a client that is no straggler"),
        ("batch_size", 32, "examples in a batch"),
        ("data_seed", 0, "decides generated data"),
    ):
        flags.DEFINE_integer(name, default, text, flag_values=values)
    for name, value, text in (
        ("straggler_rate", 0.9, "probability that a client is a straggler"),
        ("client_momentum", 0.5, "momentum of the clients' SGD"),
        ("model_clip", 10.0, "norm of a client's model under output noise"),
        ("client_delta", 1e-3, "delta of output noise"),
    ):
        flags.DEFINE_float(name, value, text, flag_values=values)
    flags.DEFINE_bool(
        "equal_epsilon",
        True,
        "for --study=private: also FedProx at Upcycled-FL's epsilon; off: the paper's "
        "figure 3 alone",
        flag_values=values,
    )
    run_flags.define_output_flags(values)
    for name in ("output_root", "experiment", "flagfile"):
        flags.declare_key_flag(name, flag_values=values)


def main() -> None:
    """Runs the program on the flags."""
    from scripts.upcycled_study_config import StudyConfig

    with process.user_input():
        config = run_flags.build_config(StudyConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import upcycled_study

    upcycled_study.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
