"""Where an imported population goes: the file and the splits' names in it.

The names are those that `tff.simulation.datasets` of TFF 0.87 looks for in `cache_dir`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from simulation.sources.source import VALIDATION

_NUM_DIGITS = 10
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A file of a population.

    Attributes:
        stem: The file's name without its suffix.
        name_splits: Returns the names that an example of a split and a label is stored
            under.
        count_suffixes: For features that are counted, how the counts' files are called.
    """

    stem: str
    name_splits: Callable[[str, int | None], tuple[str, ...]]
    count_suffixes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The data's file."""
        return f"{self.stem}.sqlite"

    @property
    def manifest_name(self) -> str:
        """The manifest's file."""
        return f"{self.stem}.manifest.json"

    def name_count_file(self, feature: str) -> str:
        """Returns the name of the file with a feature's counts."""
        return f"{self.stem}.{self.count_suffixes.get(feature, f'{feature}_count')}"


def _name_emnist_splits(split: str, label: int | None) -> tuple[str, ...]:
    """Every example is in all_*, digits in digits_only_* too, as in TFF's file."""
    if label is not None and label < _NUM_DIGITS:
        return f"digits_only_{split}", f"all_{split}"
    return (f"all_{split}",)


EMNIST = Layout(stem="emnist_all", name_splits=_name_emnist_splits)
CIFAR100 = Layout(stem="cifar100", name_splits=lambda split, _: (split,))
STACKOVERFLOW = Layout(
    stem="stackoverflow",
    name_splits=lambda split, _: ({VALIDATION: "heldout"}.get(split, split),),
    count_suffixes={"tokens": "word_count", "tags": "tag_count"},
)
PLAIN = Layout(stem="data", name_splits=lambda split, _: (split,))


def rename(layout: Layout, name: str | None) -> Layout:
    """Returns a layout whose files have another name; None leaves it as it is.

    Raises:
        ValueError: If a file cannot be called so.
    """
    if name is None:
        return layout
    if not _NAME.fullmatch(name):
        raise ValueError(
            "`name` must be made of lower-case letters, digits and underscores. Found "
            f"{name!r}."
        )
    return dataclasses.replace(layout, stem=name)
