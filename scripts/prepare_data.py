"""Turns files that people have into the SQLite files that TFF, and our tasks, read.

  python -m scripts.prepare_data --format=idx --input=mnist_folder --name=qmnist
  python -m scripts.prepare_data --format=leaf --leaf_dataset=sent140 --input=all_data
  python -m scripts.prepare_data --format=cifar --input=cifar-10-python.tar.gz \\
      --partition=dirichlet --num_clients=100
  python -m scripts.prepare_data --format=stack_exchange --input=Posts.xml --name=beer
  python -m scripts.prepare_data --format=csv --input=table.csv --name=mine \\
      --user_column=user --label_column=label

Users and examples are counted, divided into training and test, checked, and listed in
a manifest beside the file. An import that was interrupted goes on when the same command
is given again. A damaged record ends it, naming the place, unless --skip_bad.
"""

from absl import flags

from scripts import flags as run_flags
from scripts.preparation_config import DEFAULTS, PreparationConfig
from simulation import process
from simulation.population.partition import PartitionKind
from simulation.population.split import SplitBy

_NAME = "prepare_data"
_FORMATS = (
    "leaf",
    "idx",
    "cifar",
    "stack_exchange",
    "csv",
    "parquet",
    "npz",
    "images",
)
_LEAF_DATASETS = ("femnist", "sent140", "shakespeare", "synthetic", "celeba")


def _define_general_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_enum("format", None, _FORMATS, "what the input is", flag_values=values)
    flags.DEFINE_string("input", None, "file or folder to read", flag_values=values)
    flags.DEFINE_string(
        "data_dir",
        None,
        "folder to write to (unset: TFF's, ~/.tff)",
        flag_values=values,
    )
    flags.DEFINE_string(
        "name",
        None,
        "name of the data, which tasks take by --data_name; emnist_all and "
        "stackoverflow are what TFF and the tasks read without one (unset, for leaf "
        "and cifar: the data set's own)",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "split",
        None,
        [by.value for by in SplitBy],
        "what is divided. source: nothing, the input says it; user: users; example: "
        "each user's examples (unset: source where the input says it, else example)",
        flag_values=values,
    )
    flags.DEFINE_float(
        "test_fraction",
        DEFAULTS["test_fraction"],
        "part for the test",
        flag_values=values,
    )
    flags.DEFINE_float(
        "validation_fraction",
        DEFAULTS["validation_fraction"],
        "part for the validation",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "data_seed", 0, "decides splits and partitions", flag_values=values
    )
    flags.DEFINE_bool(
        "skip_bad",
        False,
        "leave bad records out, counted and listed in the manifest",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "overwrite",
        False,
        "replace a file that was made of other data or with other flags",
        flag_values=values,
    )


def _define_format_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_enum(
        "leaf_dataset",
        None,
        _LEAF_DATASETS,
        "leaf: which data set it is",
        flag_values=values,
    )
    flags.DEFINE_string(
        "celeba_images", None, "leaf: folder of CelebA's images", flag_values=values
    )
    flags.DEFINE_string(
        "writers",
        None,
        "idx: file with a writer for each training image, where the labels have none",
        flag_values=values,
    )
    flags.DEFINE_string(
        "test_writers", None, "idx: the same for the test images", flag_values=values
    )
    flags.DEFINE_string(
        "test_from",
        None,
        "stack_exchange: date from which posts are for the test, as in TFF's Stack "
        "Overflow (unset: users are divided by their numbers)",
        flag_values=values,
    )
    for name, text in (
        ("user_column", "column of the user"),
        ("label_column", "column of the class"),
        ("split_column", "column with train, validation or test"),
    ):
        flags.DEFINE_string(name, None, f"csv, parquet: {text}", flag_values=values)
    for name, text in (
        ("text_columns", "columns of text"),
        ("feature_columns", "numeric columns to learn from (unset: all others)"),
        ("labels", "names of the classes, in order (unset: those that occur)"),
    ):
        flags.DEFINE_list(name, None, f"csv, parquet: {text}", flag_values=values)
    flags.DEFINE_enum(
        "image_layout",
        DEFAULTS["image_layout"],
        ["user_class", "class"],
        "images: folders of users with folders of classes, or of classes alone",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "image_size",
        DEFAULTS["image_size"],
        "images: height and width in pixels",
        1,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "grayscale", DEFAULTS["grayscale"], "images: one channel", flag_values=values
    )
    flags.DEFINE_enum(
        "partition",
        None,
        [kind.value for kind in PartitionKind],
        "cifar, images without users: how examples are divided among clients (unset: "
        "dirichlet; pachinko for CIFAR-100)",
        flag_values=values,
    )
    for name, text in (
        ("num_clients", "clients of the partition (unset: 100; 500 for CIFAR-100)"),
        (
            "classes_per_client",
            "classes of a client, for --partition=shards (unset: 2)",
        ),
    ):
        flags.DEFINE_integer(name, None, text, 1, flag_values=values)
    flags.DEFINE_float(
        "data_alpha",
        None,
        "concentration of --partition=dirichlet (unset: 0.1)",
        flag_values=values,
    )


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the program."""
    _define_general_flags(values)
    _define_format_flags(values)


def main() -> None:
    """Runs the program on the flags."""
    with process.user_input():
        config = run_flags.build_config(PreparationConfig, flags.FLAGS)
    # After the flags were checked: TensorFlow takes seconds to import.
    process.import_quietly("tensorflow")
    from scripts import preparation

    preparation.run(config)


if __name__ == "__main__":
    define_flags()
    process.run_program(main, name=_NAME)
