"""Tests for the protocol's checks and the data in memory."""

import pickle

import cloudpickle
import numpy as np
import pytest

from simulation.population import federated_data
from simulation.population.federated_data import DataError

X, Y = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([7, 8])


class TestCheckFinite:
    @pytest.mark.parametrize(
        "values",
        [
            np.array([1.0, -np.finfo("f4").max], np.float32),
            np.array([2**62]),
            np.array([], np.float64),
            np.array([True]),
            np.array([b"nan"], object),
            np.array([None, float("nan")], object),
            np.array(["inf"]),
            np.array(1.0),
        ],
    )
    def test_passes(self, values):
        federated_data.check_finite(values, "x")

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, complex])
    def test_counts_what_is_not(self, dtype):
        values = np.array([[1, np.nan], [np.inf, -np.inf]], dtype)
        match = "`x` must be finite. Found 3 values that are NaN or infinite"
        with pytest.raises(DataError, match=match):
            federated_data.check_finite(values, "x")

    def test_a_scalar(self):
        with pytest.raises(DataError, match="Found 1 values"):
            federated_data.check_finite(np.array(np.nan), "x")


class TestCheckExamples:
    def test_returns_what_it_is_given(self):
        x, y = federated_data.check_examples((X, Y), "a")
        assert x is X and y is Y

    def test_not_equally_many(self):
        match = "x and y of client a must have equally many examples. Found 2 and 1"
        with pytest.raises(DataError, match=match):
            federated_data.check_examples((X, Y[:1]), "a")

    @pytest.mark.parametrize("name", ["x", "y"])
    def test_not_finite(self, name):
        examples = {"x": X, "y": Y.astype(float)}
        examples[name] = examples[name] * np.inf
        with pytest.raises(DataError, match=f"`{name} of client a` must be finite"):
            federated_data.check_examples((examples["x"], examples["y"]), "a")

    def test_an_error_is_a_value_error(self):
        assert issubclass(DataError, ValueError)


class TestArrayData:
    def build(self, made: dict) -> federated_data.ArrayData:
        return federated_data.ArrayData(client_ids=tuple(made), make=made.__getitem__)

    def test_loads_what_is_made(self):
        data = self.build({"b": (X, Y), "a": (X[:1], Y[:1])})
        assert data.client_ids == ("b", "a")
        assert [data.count("b"), data.count("a")] == [2, 1]
        assert data.load("a")[1].tolist() == [7]

    def test_checks(self):
        with pytest.raises(DataError, match="client b must have equally many"):
            self.build({"b": (X, Y[:1])}).load("b")

    def test_a_pool_is_one_client_and_goes_to_other_processes(self):
        pool = pickle.loads(cloudpickle.dumps(federated_data.build_pool(X, Y)))
        assert pool.client_ids == ("all",)
        np.testing.assert_array_equal(pool.load("all")[0], X)
        assert federated_data.build_pool(X, Y, client_id="b").client_ids == ("b",)


def test_a_data_set_has_the_examples_in_order():
    data = federated_data.build_dataset(X, Y)
    elements = list(data.as_numpy_iterator())
    assert [list(element) for element in elements] == [["x", "y"]] * 2
    np.testing.assert_array_equal([element["x"] for element in elements], X)
    np.testing.assert_array_equal([element["y"] for element in elements], Y)
