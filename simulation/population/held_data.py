"""Clients' data held in memory: what was read before, and what the next round needs."""

import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from simulation.population.federated_data import Examples, FederatedData


class HeldData:
    """Data that are read once, as far as they fit, and ahead of time.

    Clients that were loaded stay in memory until `max_bytes` are held; then those that
    have not been asked for longest make room. `read_ahead` loads clients in a thread of
    its own while others work. Results do not depend on either.

    A copy that goes to another process holds nothing.
    """

    def __init__(self, data: FederatedData, *, max_bytes: int) -> None:
        """Holds nothing yet.

        Args:
            data: The data.
            max_bytes: The most that is held, in bytes; 0 holds nothing.

        Raises:
            ValueError: If `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"`max_bytes` must be >= 0. Found {max_bytes!r}.")
        self._data = data
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Examples] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._ahead: concurrent.futures.Future[None] | None = None

    def __reduce__(self) -> Any:
        return _rebuild, (self._data, self._max_bytes)

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients, in a fixed order."""
        return self._data.client_ids

    @property
    def num_bytes(self) -> int:
        """The size of what is held."""
        return self._num_bytes

    def count(self, client_id: str) -> int:
        """Returns the number of a client's examples."""
        return self._data.count(client_id)

    def load(self, client_id: str) -> Examples:
        """Returns one client's x and y. See `FederatedData`."""
        examples = self._find(client_id)
        if examples is None:
            examples = self._data.load(client_id)
            self._hold(client_id, examples)
        return examples

    def read_ahead(self, client_ids: Sequence[str]) -> None:
        """Begins to load clients that will be asked for soon.

        Takes as many of them, in order, as half of the memory holds, so that those that
        are read ahead do not push each other out. An error waits for `load`.
        """
        if not self._max_bytes:
            return
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(
                1, thread_name_prefix="read-ahead"
            )
        if self._ahead is not None:
            self._ahead.cancel()
        self._ahead = self._pool.submit(self._load_ahead, list(client_ids))

    def wait(self) -> None:
        """Returns when what was begun by `read_ahead` is done."""
        if self._ahead is not None and not self._ahead.cancelled():
            self._ahead.result()

    def _load_ahead(self, client_ids: Sequence[str]) -> None:
        num_bytes = 0
        for client_id in client_ids:
            try:
                examples = self._find(client_id) or self._data.load(client_id)
                num_bytes += _measure(examples)
            # `load` will raise it where the client's name is added.
            except Exception:
                continue
            if num_bytes > self._max_bytes:
                return
            self._hold(client_id, examples)
            if num_bytes > self._max_bytes // 2:
                return

    def _find(self, client_id: str) -> Examples | None:
        with self._lock:
            if client_id in self._held:
                self._held.move_to_end(client_id)
            return self._held.get(client_id)

    def _hold(self, client_id: str, examples: Examples) -> None:
        size = _measure(examples)
        if size > self._max_bytes:
            return
        with self._lock:
            if client_id in self._held:
                return
            while self._num_bytes + size > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self._num_bytes -= _measure(oldest)
            self._held[client_id] = examples
            self._num_bytes += size


def _measure(examples: Examples) -> int:
    return sum(part.nbytes for part in examples)


def _rebuild(data: FederatedData, max_bytes: int) -> HeldData:
    return HeldData(data, max_bytes=max_bytes)
