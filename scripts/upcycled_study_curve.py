"""What a run of run_upcycled_study leaves: a curve over rounds, and its row."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from scripts.upcycled_study_config import Run
from simulation import table

FloatArray = npt.NDArray[np.float64]
Row = Mapping[str, table.Scalar]

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
# After the clients' step; Upcycled-FL goes on from there, the others do not.
_ODD = tuple(f"odd_{name}" for name in METRICS)
_COLUMNS = ("round", *METRICS, *_ODD)
_RUN_FIELDS = (
    "data",
    "algorithm",
    "mu",
    "lambda_value",
    "server_factor",
    "noise",
    "noise_level",
    "client_lr",
    "seed",
    "rounds",
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Loss and accuracy over the rounds of one run.

    Attributes:
        values: For each of METRICS, float64[rounds + 1]: before the first round and
            after the last server step of every round.
        odd_values: The same after the clients' step of every round, the odd iterate;
            None where the round has no even step.
    """

    values: Mapping[str, FloatArray]
    odd_values: Mapping[str, FloatArray] | None

    @property
    def num_rounds(self) -> int:
        """The number of rounds."""
        return len(self.values[METRICS[0]]) - 1

    def get(self, metric: str, round_number: int | None = None) -> float:
        """Returns a metric after a round's last server step; of the last round."""
        return float(self.values[metric][-1 if round_number is None else round_number])

    def list_steps(self, metric: str) -> tuple[npt.NDArray[np.int_], FloatArray]:
        """Returns the metric after each server step as the paper counts them.

        A round is two steps where it has an even one, else one.
        """
        values = self.values[metric]
        if self.odd_values is None:
            return np.arange(len(values)), values
        odd = self.odd_values[metric]
        steps = np.stack([odd[1:], values[1:]], axis=1).ravel()
        return np.arange(len(steps) + 1), np.concatenate([values[:1], steps])

    def to_csv(self) -> str:
        """Returns the curve as CSV, a row a round."""
        lines = []
        for number in range(self.num_rounds + 1):
            fields: list[table.Scalar] = [number]
            fields += [float(self.values[name][number]) for name in METRICS]
            fields += [
                None if self.odd_values is None else float(self.odd_values[n][number])
                for n in METRICS
            ]
            lines.append([table.format_scalar(field) for field in fields])
        return table.Table(_COLUMNS, lines).to_csv()


def read_curve(text: str, run: Run) -> Curve:
    """Reads what `Curve.to_csv` wrote for a run.

    Raises:
        ValueError: If it is another run's, or not whole.
    """
    found = table.Table.from_csv(text)
    if found.columns != _COLUMNS:
        raise ValueError(f"the columns must be {', '.join(_COLUMNS)}.")
    numbers = found.read_column("round")
    if numbers != [str(number) for number in range(run.rounds + 1)]:
        raise ValueError(
            f"there must be rows of the rounds 0 to {run.rounds}. Found "
            f"{len(numbers)} rows."
        )

    def read(name: str) -> FloatArray:
        return np.array([float(field) for field in found.read_column(name)])

    return Curve(
        values={name: read(name) for name in METRICS},
        odd_values=None
        if run.lambda_value is None
        else {name: read(f"odd_{name}") for name in METRICS},
    )


def build_row(run: Run, curve: Curve, *, loss: str, source: str) -> Row:
    """Returns the row of results.csv.

    It has the metrics after the last server step, after the last step with clients
    ("odd_"), and after half of the rounds ("half_"): as many server steps of
    Upcycled-FL as the others make in all rounds.

    Args:
        run: The run.
        curve: What it left.
        loss: The name of the loss.
        source: Where the data come from.
    """
    fields = dataclasses.asdict(run) | {
        "algorithm": run.algorithm.value,
        "noise": None if run.noise is None else run.noise.value,
    }
    row: dict[str, table.Scalar] = {name: fields[name] for name in _RUN_FIELDS}
    row |= {name: curve.get(name) for name in METRICS}
    odd = curve.odd_values
    row |= {f"odd_{n}": None if odd is None else float(odd[n][-1]) for n in METRICS}
    half = run.rounds // 2
    row |= {"half_round": half}
    row |= {f"half_{name}": curve.get(name, half) for name in METRICS}
    return row | {"loss": loss, "source": source}


def to_csv(rows: Sequence[Row]) -> str:
    """Returns rows as CSV."""
    if not rows:
        return ""
    fields = [[table.format_scalar(value) for value in row.values()] for row in rows]
    return table.Table(tuple(rows[0]), fields).to_csv()
