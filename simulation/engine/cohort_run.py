"""Many clients, a bounded number at a time, their results taken in order."""

import collections
import concurrent.futures
import queue
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Results that may wait for an earlier client's, for each worker.
_WAITING_PER_WORKER = 2


class ClientError(RuntimeError):
    """The work of one client failed.

    Attributes:
        client_index: Which entry of the clients' values it was.
    """

    def __init__(self, client_index: int, num_clients: int, error: Exception) -> None:
        message = str(error).strip().splitlines()
        super().__init__(
            f"client {client_index} of {num_clients} failed: {type(error).__name__}: "
            f"{message[0] if message else ''}"
        )
        self.client_index = client_index

    def add_client_id(self, client_id: str) -> None:
        """Puts the client's name before the message."""
        self.args = (f"{client_id}: {self.args[0]}",)


class Workers:
    """Threads that work for clients.

    Results are consumed by the caller's thread in the order of the clients, whatever
    the threads' timing, so that sums come out the same.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_workers, thread_name_prefix="client"
        )

    def run(
        self,
        work: Callable[[int, int], T],
        consume: Callable[[int, T], None],
        *,
        num_clients: int,
        on_failure: Callable[[ClientError], None],
        on_done: Callable[[int, int], None] | None = None,
    ) -> None:
        """Runs `work` for every client and `consume` on its result.

        Args:
            work: Of the client's index and a number below `num_workers` that no other
                call has at the time.
            consume: Of the client's index and its result.
            num_clients: The number of clients.
            on_failure: What to do about a client whose work failed: raise, or not.
            on_done: Told how many clients of how many are done.
        """
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.num_workers):
            slots.put(slot)

        def work_in_slot(index: int) -> T:
            slot = slots.get()
            try:
                return work(index, slot)
            finally:
                slots.put(slot)

        window = self.num_workers * (1 + _WAITING_PER_WORKER)
        pending: collections.deque[concurrent.futures.Future[T]] = collections.deque()
        try:
            for index in range(min(window, num_clients)):
                pending.append(self._pool.submit(work_in_slot, index))
            for index in range(num_clients):
                future = pending.popleft()
                try:
                    result = future.result()
                # Whatever a client's work raises is about that client.
                except Exception as error:
                    failure = ClientError(index, num_clients, error)
                    failure.__cause__ = error
                    on_failure(failure)
                else:
                    consume(index, result)
                if index + window < num_clients:
                    pending.append(self._pool.submit(work_in_slot, index + window))
                if on_done is not None:
                    on_done(index + 1, num_clients)
        finally:
            for future in pending:
                future.cancel()
            concurrent.futures.wait(pending)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)
