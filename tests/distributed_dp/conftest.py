"""The TFF runtime of the tests of this folder."""

from collections.abc import Iterator

import pytest
import tensorflow_federated as tff


@pytest.fixture(scope="session")
def _context() -> tff.framework.SyncExecutionContext:
    return tff.backends.test.create_sync_test_cpp_execution_context()


@pytest.fixture
def tff_context(_context: tff.framework.SyncExecutionContext) -> Iterator[None]:
    """Lets TFF computations run in the test, with secure sums as plain sums."""
    with tff.framework.get_context_stack().install(_context):
        yield
