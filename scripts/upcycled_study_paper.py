"""What the Upcycled-FL paper and its authors' program report on the synthetic data.

Source: Yin et al. 2024, Table 1 (PAPER); the authors' published program, run on the
authors' files with its seed 2 and the settings of the table (PROGRAM). Training and
test accuracy in percent, at 90 % stragglers, 80 rounds of FedAvg and FedProx and 80
odd and 80 even steps of Upcycled-FL.
"""

import dataclasses
from collections.abc import Mapping

DATA_NAMES = ("iid", "0_0", "0.5_0.5", "1_1")
# lambda at each mu, caption of Table 1.
LAMBDAS: Mapping[float, float] = {0.1: 0.04, 0.3: 0.12, 0.5: 0.21, 1.0: 0.43}
PROGRAM_SEED = 2


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Accuracies in percent.

    Attributes:
        train: On the training examples of all users.
        test: On the test examples of all users.
    """

    train: float
    test: float


# (data, algorithm, mu): algorithm as Algorithm's values, mu 0 for FedAvg.
Key = tuple[str, str, float]

_PAPER_FEDAVG = {
    "iid": (97.80, 97.51),
    "0_0": (78.41, 76.27),
    "0.5_0.5": (79.53, 78.97),
    "1_1": (69.70, 71.12),
}
# For each mu: FedProx train and test, Upcycled-FL train and test.
_PAPER = {
    "iid": {
        0.1: (96.86, 96.34, 97.88, 97.51),
        0.3: (95.18, 94.88, 96.31, 96.05),
        0.5: (94.03, 93.70, 95.40, 95.02),
        1.0: (92.14, 91.80, 93.76, 93.70),
    },
    "0_0": {
        0.1: (81.66, 79.50, 84.41, 82.44),
        0.3: (81.73, 79.35, 83.83, 81.58),
        0.5: (81.55, 79.35, 82.84, 81.29),
        1.0: (81.22, 78.85, 82.41, 80.57),
    },
    "0.5_0.5": {
        0.1: (79.63, 79.58, 81.19, 81.54),
        0.3: (80.31, 80.56, 82.14, 83.74),
        0.5: (79.55, 79.46, 82.61, 82.64),
        1.0: (80.11, 80.20, 82.74, 82.64),
    },
    "1_1": {
        0.1: (79.20, 78.83, 77.38, 78.64),
        0.3: (74.77, 75.91, 80.43, 81.47),
        0.5: (75.36, 76.67, 82.78, 83.07),
        1.0: (75.69, 76.58, 82.88, 82.69),
    },
}
_PROGRAM_FEDAVG = {
    "iid": (98.05, 98.10),
    "0_0": (80.90, 79.07),
    "0.5_0.5": (78.61, 77.26),
    "1_1": (77.18, 78.17),
}
# mu = 0.3 was not run.
_PROGRAM = {
    "iid": {
        0.1: (96.84, 96.49, 97.88, 97.80),
        0.5: (93.81, 93.70, 95.40, 95.02),
        1.0: (92.06, 92.09, 93.60, 93.85),
    },
    "0_0": {
        0.1: (82.00, 80.36, 82.29, 80.57),
        0.5: (81.14, 78.78, 80.90, 78.49),
        1.0: (80.77, 78.64, 80.91, 79.00),
    },
    "0.5_0.5": {
        0.1: (80.16, 80.20, 80.98, 80.56),
        0.5: (81.23, 81.66, 81.91, 82.76),
        1.0: (81.09, 81.42, 81.85, 82.52),
    },
    "1_1": {
        0.1: (75.99, 77.42, 74.57, 75.73),
        0.5: (80.91, 80.34, 80.54, 80.90),
        1.0: (81.44, 80.81, 81.39, 81.19),
    },
}


def _build(
    fedavg: Mapping[str, tuple[float, float]],
    others: Mapping[str, Mapping[float, tuple[float, float, float, float]]],
) -> dict[Key, Accuracy]:
    found = {(data, "fedavg", 0.0): Accuracy(*pair) for data, pair in fedavg.items()}
    for data, by_mu in others.items():
        for mu, (*fedprox, upcycled_train, upcycled_test) in by_mu.items():
            found[data, "fedprox", mu] = Accuracy(*fedprox)
            found[data, "upcycled", mu] = Accuracy(upcycled_train, upcycled_test)
    return found


PAPER: Mapping[Key, Accuracy] = _build(_PAPER_FEDAVG, _PAPER)
PROGRAM: Mapping[Key, Accuracy] = _build(_PROGRAM_FEDAVG, _PROGRAM)
