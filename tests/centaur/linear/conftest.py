"""Fixtures that the tests of linear representation learning share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def engine():
    """The project's engine, for the tests of a module."""
    from simulation import execution

    with execution.use_execution_context() as found:
        yield found
