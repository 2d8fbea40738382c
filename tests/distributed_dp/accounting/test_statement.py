"""The words and the JSON of a statement."""

import dataclasses
import itertools
import json

import pytest

from distributed_dp.accounting import (
    AS_PUBLISHED_WORDS,
    Accounting,
    compute_privacy,
)
from tests.distributed_dp.accounting.run_settings import (
    FIXED,
    POISSON,
    RUN,
    get_gaussian,
    get_parameters,
)


class TestWords:
    def test_everything_is_printed(self):
        statement = compute_privacy(get_parameters(), POISSON, **RUN)
        text = str(statement)
        for part in (
            f"epsilon = {statement.epsilon:.6g}",
            "delta = 0.000294118",
            "delta * N = 1)",
            "analyst of the released models",
            "add or remove one user",
            "Poisson: each user joins independently",
            "q = 0.0294118",
            "T = 1500",
            "order = 5",
            "Poisson amplification for symmetric noise",
            "RDP",
            "secure aggregation",
            "independent",
            "expected cohort size 100",
            "before centring and decoding",
            "diagnostics, losses, accuracies",
            "fractions clipped",
            "private validation data",
        ):
            assert part in text, part
        assert AS_PUBLISHED_WORDS not in text

    @pytest.mark.parametrize(
        ("parameters", "scheme", "accounting"),
        [
            *itertools.product(
                [get_parameters(), get_gaussian()], [POISSON], [Accounting.PROVEN]
            ),
            *itertools.product(
                [get_parameters(), get_gaussian()], [FIXED], list(Accounting)
            ),
        ],
    )
    def test_json_holds_every_field(self, parameters, scheme, accounting):
        statement = compute_privacy(parameters, scheme, accounting=accounting, **RUN)
        values = json.loads(json.dumps(statement.to_dict()))
        names = {field.name for field in dataclasses.fields(statement)}
        assert names <= set(values)
        assert values["delta_times_num_clients"] == pytest.approx(1.0)
        assert values["epsilon"] == statement.epsilon
        assert ("standing" in values) == statement.as_published
