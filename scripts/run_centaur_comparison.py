"""Compares CENTAUR with its baselines: every method tuned alike, over epsilons.

The bare command compares all six methods on the embedded digits, at epsilon 8, 2 and
32 over three seeds. It prints a table an epsilon, CENTAUR's paired difference from each
other method with its interval, and draws utility against epsilon.

  python -m scripts.run_centaur_comparison
  python -m scripts.run_centaur_comparison --epsilons=8,inf --methods=centaur,fedavg_fb

Budget. Every method is tuned on --tuning_seed, by the mean accuracy over clients on
their validation parts alone, with the same number of grid points:
|grid_client_lrs| x |grid_head_lrs| x |grid_clips|. Those are the axes of all that send
something (without noise, at epsilon inf, nothing is clipped and the last one falls
away). Training stand-alone has no head of its own and no clip: in their place it has as
many numbers of epochs, --grid_stand_alone_epochs, or half of --stand_alone_epochs, a
quarter, and so on. Whoever gives a flag and no grid of it (--clip, and no --grid_clips)
chooses from that value alone.

All flags of run_centaur are taken but --seed, --method and --epsilon. Each run has a
folder of its own; the same command goes on, and reads back what is finished. No epsilon
covers the tuning.
"""

from absl import flags

from scripts import axis_flag, run_centaur
from scripts import flags as run_flags
from simulation import process

_NAME = "run_centaur_comparison"
# Where this program's defaults differ from run_centaur's.
_DEFAULTS = {"checkpoint_every": 10}
# The flags that are chosen from a grid, with those of their grids.
_GRIDS = {
    "client_lr": "grid_client_lrs",
    "head_lr": "grid_head_lrs",
    "clip": "grid_clips",
}
_REPLACED = ("seed", "method", "epsilon", "measure_updates", "evaluate_test")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    before = set(values)
    run_centaur.define_flags(values)
    methods = values["method"].parser.enum_values
    for name in _REPLACED:
        delattr(values, name)
    for name, value in _DEFAULTS.items():
        values.set_default(name, value)
    axis_flag.define_axis(
        "methods",
        ",".join(methods),
        "what is compared",
        item=flags.EnumParser(methods),
        values=values,
    )
    axis_flag.define_axis(
        "seeds",
        "1,2,3",
        "root seeds, over which intervals are computed",
        item=flags.IntegerParser(lower_bound=0),
        values=values,
    )
    axis_flag.define_axis(
        "epsilons",
        "8,2,32",
        "privacy budgets; inf: without noise and without a clip",
        item=flags.FloatParser(),
        values=values,
    )
    flags.DEFINE_bool(
        "diagnose",
        False,
        "measure CENTAUR, DP-FedAvg-fb and PPSGD (authors) over the rounds of one run: "
        "norms by part, clip rates, signal to noise",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "parallel_runs",
        1,
        "runs at a time, each in a process of its own with all cores and the memory of "
        "a run",
        lower_bound=1,
        flag_values=values,
    )
    _define_tuning_flags(values)
    # --help lists what the main module declares.
    for name in set(values) - before:
        flags.declare_key_flag(name, flag_values=values)


def _define_tuning_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "tuning_seed",
        0,
        "root seed of the runs that settings are chosen by",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "tuning_epsilon",
        None,
        "epsilon that settings are chosen at (unset: the first finite one of "
        "--epsilons)",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "tune_each_epsilon",
        False,
        "choose settings at each of --epsilons",
        flag_values=values,
    )
    for name, default, text in (
        ("grid_client_lrs", "0.03,0.1,0.3", "values of --client_lr to choose from"),
        ("grid_head_lrs", None, "values of --head_lr to choose from"),
        ("grid_clips", "0.1,0.5", "values of --clip to choose from"),
        (
            "grid_stand_alone_lrs",
            None,
            "stand_alone: values of --client_lr (unset: --grid_client_lrs)",
        ),
    ):
        axis_flag.define_axis(
            name, default, text, item=flags.FloatParser(), values=values
        )
    axis_flag.define_axis(
        "grid_stand_alone_epochs",
        None,
        "stand_alone: values of --stand_alone_epochs (unset: halves of it, as many as "
        "the budget takes)",
        item=flags.IntegerParser(lower_bound=1),
        values=values,
    )


def drop_default_grids(values: flags.FlagValues = flags.FLAGS) -> None:
    """Makes a flag that is given, with no grid of it, the one value to choose from."""
    for name, grid in _GRIDS.items():
        if values[name].present and not values[grid].present:
            values[grid].value = None


def main() -> None:
    """Runs the program on the flags."""
    from scripts.centaur_comparison_config import ComparisonConfig

    drop_default_grids()
    with process.user_input():
        config = run_flags.build_config(ComparisonConfig, flags.FLAGS)
        run_flags.check_output_root(config.output_root)
    # After the flags were checked: TensorFlow and TFF take seconds to import.
    process.import_quietly("tensorflow_federated")
    from scripts import centaur_comparison

    centaur_comparison.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
