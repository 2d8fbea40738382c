"""Many clients, a bounded number at a time, their results taken in order."""

import collections
import concurrent.futures
import itertools
import queue
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# Results that may wait for an earlier client's, for each worker.
_WAITING_PER_WORKER = 2


class ClientError(RuntimeError):
    """The work of one client failed.

    Attributes:
        client_index: Which entry of the clients' values it was.
    """

    def __init__(self, client_index: int, num_clients: int, reason: str) -> None:
        super().__init__(f"client {client_index} of {num_clients} failed: {reason}")
        self.client_index = client_index

    def add_client_id(self, client_id: str) -> None:
        """Puts the client's name before the message."""
        self.args = (f"{client_id}: {self.args[0]}",)


def split_cohort(clients: range, group_size: int) -> list[range]:
    """Returns clients in runs of nearly equal length, at most `group_size`."""
    size = len(clients)
    num_groups = -(-size // group_size)
    bounds = [n * size // max(num_groups, 1) for n in range(num_groups + 1)]
    return [clients[start:stop] for start, stop in itertools.pairwise(bounds)]


def describe_error(error: Exception) -> str:
    """Returns an error's kind and the line of its message that says most."""
    lines = [line.strip() for line in str(error).splitlines()]
    # TensorFlow begins with where in the graph, and ends with what.
    if lines and lines[0].startswith(("Graph execution error", "Detected at node")):
        lines = [s for s in lines[::-1] if s and not s.startswith("[[")]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def consume(
    take: Callable[[int, T], None], index: int, result: T | Exception
) -> Exception | None:
    """Consumes a client's result. Returns what went wrong, with that or before."""
    if isinstance(result, Exception):
        return result
    try:
        take(index, result)
    # Adding up a client's values can fail because of the values.
    except Exception as error:
        return error
    return None


class Workers:
    """Threads that work for clients.

    Results are consumed by the caller's thread in the order of the clients, whatever
    the threads' timing, so that sums come out the same. One thread more than work can
    read what the next clients need.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_workers + 1, thread_name_prefix="client"
        )

    def run(
        self,
        work: Callable[[Any, int], Sequence[T | Exception]],
        take: Callable[[int, T], None],
        *,
        groups: Sequence[range],
        on_failure: Callable[[ClientError], None],
        on_done: Callable[[int, int], None] | None = None,
        read: Callable[[range], Any] | None = None,
    ) -> None:
        """Runs `work` for every group of clients and `take` on each result.

        Args:
            work: Of a group and a number below `num_workers` that no other call has at
                the time; returns the result of each client, or what it raised.
            take: Of a client's index and its result.
            groups: The clients' indices, from 0 on, in runs.
            on_failure: What to do about a client whose work failed: raise, or not.
            on_done: Told how many clients of how many are done.
            read: Returns what `work` is given in place of a group.
        """
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.num_workers):
            slots.put(slot)

        def work_in_slot(group: range) -> Sequence[T | Exception]:
            given = group if read is None else read(group)
            slot = slots.get()
            try:
                return work(given, slot)
            finally:
                slots.put(slot)

        num_clients = sum(map(len, groups))
        window = self.num_workers * (1 + _WAITING_PER_WORKER)
        pending: collections.deque[
            concurrent.futures.Future[Sequence[T | Exception]]
        ] = collections.deque()
        try:
            for group in groups[:window]:
                pending.append(self._pool.submit(work_in_slot, group))
            for number, group in enumerate(groups):
                results = pending.popleft().result()
                for index, result in zip(group, results, strict=True):
                    error = consume(take, index, result)
                    if error is not None:
                        reason = describe_error(error)
                        failure = ClientError(index, num_clients, reason)
                        failure.__cause__ = error
                        on_failure(failure)
                if number + window < len(groups):
                    later = groups[number + window]
                    pending.append(self._pool.submit(work_in_slot, later))
                if on_done is not None:
                    on_done(group.stop, num_clients)
        finally:
            for future in pending:
                future.cancel()
            concurrent.futures.wait(pending)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)
