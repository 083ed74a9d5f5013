"""vLLM's jobs between its host cache and kvtier: one thread copies in each direction, and every job is reported."""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Callable, Iterator

from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvtier.connectors.fallback import or_fallback


class Jobs:
    """See the module. One owner thread, vLLM's scheduler. A job's move returns the keys that it has moved; where it
    raises, none is. It is reported in any case: until then vLLM's rows are pinned."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._under_way: set[concurrent.futures.Future[None]] = set()
        self._loading: set[concurrent.futures.Future[None]] = set()  # those among them into vLLM's rows
        self._loads = concurrent.futures.ThreadPoolExecutor(1, "kvtier-load")
        self._stores = concurrent.futures.ThreadPoolExecutor(1, "kvtier-store")

    def load(self, job: TransferJob, move: Callable[[], list[bytes]]) -> concurrent.futures.Future[None]:
        """Begin a job into vLLM's rows, behind the earlier ones."""
        future = self._start(self._loads, job, move)
        self._loading.add(future)
        future.add_done_callback(self._loading.discard)
        return future

    def store(self, job: TransferJob, move: Callable[[], list[bytes]]) -> None:
        """Begin a job out of vLLM's rows, behind the earlier ones."""
        self._start(self._stores, job, move)

    def _start(
        self, thread: concurrent.futures.ThreadPoolExecutor, job: TransferJob, move: Callable[[], list[bytes]]
    ) -> concurrent.futures.Future[None]:
        def run() -> None:
            began = time.monotonic()
            good = or_fallback(move, fallback=list[bytes]())
            self._results.put(
                JobResult(
                    job.job_id,
                    len(good) == len(job.keys),
                    tuple(good) if good and job.is_promotion else None,
                    time.monotonic() - began,
                    len(good) * self._row_bytes,
                )
            )

        future = thread.submit(run)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def finished(self) -> Iterator[JobResult]:
        """Jobs that have ended since the last call."""
        while True:
            try:
                yield self._results.get_nowait()
            except queue.Empty:
                return

    def wait_for_load(self, timeout_s: float) -> None:
        """Until a job into vLLM's rows has ended, at most so long; not at all where none is under way."""
        if loading := list(self._loading):
            concurrent.futures.wait(loading, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def wait(self) -> None:
        """Until all that were begun have ended."""
        concurrent.futures.wait(list(self._under_way))

    def close(self) -> None:
        """Wait as `wait` does, and end the threads."""
        for thread in (self._loads, self._stores):
            thread.shutdown(wait=True)
