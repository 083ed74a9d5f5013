"""Whole rows of a CUDA tensor to and from host memory, many in one batch, for a caller that waits for them.

The plain way beside the copy engine: no queue, no tickets, no slots with generations. Its caller owns both sides
until the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier.errors import TierError
from kvtier.kernels.driver import CudaDriver, DeviceError, Driver
from kvtier.kernels.layout import Addresses, Region
from kvtier.kernels.pin import pin, unpin
from kvtier.kernels.plan import Runs, merge, seams

Pieces = Sequence[memoryview]
_POLL_S = 20e-6


class RowCopier:
    """Copies between the rows of `rows`, a uint8 tensor `[n, row_bytes]`, and host pieces. Used from one thread.

    Host memory that was not given to `pin` is copied as pageable: slower, and the same bytes.
    """

    def __init__(self, rows: Any, driver: Driver | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        """Raises TierError without a working driver."""
        self._rows, self._sleep = rows, sleep
        try:
            self._driver: Driver = driver if driver is not None else CudaDriver(rows.device.index)
            self._stream, self._event = self._driver.stream(0), self._driver.event()
        except (DeviceError, OSError) as error:
            raise TierError("g1", "open", str(error)) from error
        self._pinned: list[Region] = []

    def pin(self, start: int, nbytes: int, slot_bytes: int) -> bool:
        """Page-lock host memory that pieces will lie in, slots from the address `start` on: 0.1 s per GB. Undo with
        `unpin`. False, with a warning, where that is refused."""
        chunks = pin(self._driver, [Region(start, nbytes)], slot_bytes)
        self._pinned = sorted([*self._pinned, *chunks], key=lambda chunk: chunk.start)
        return bool(chunks)

    def unpin(self) -> None:
        """Unlock all of it, which must still be mapped. Idempotent."""
        unpin(self._driver, self._pinned)
        self._pinned = []

    def out(self, rows: Sequence[int], into: Sequence[Pieces]) -> None:
        """Copy each row into its pieces, which together are as long. Returns when the bytes are there."""
        device, host, nbytes = self._addresses(rows, into)
        self._copy(device, host, nbytes, pageable=not self._all_pinned(host))

    def into(self, source: Sequence[Pieces], rows: Sequence[int]) -> None:
        """Copy pieces into rows. Returns when `source` may be reused; the rows are there for the current stream."""
        device, host, nbytes = self._addresses(rows, source)
        self._copy(host, device, nbytes, pageable=not self._all_pinned(host))

    def close(self) -> None:
        """Unlock the host memory and let go of the device."""
        self.unpin()
        self._driver.close([self._stream], [self._event])
        self._rows = None

    def _addresses(self, rows: Sequence[int], hosts: Sequence[Pieces]) -> tuple[Addresses, Addresses, Addresses]:
        """Of every piece: where it lies on the device and on the host, and its length."""
        base, stride = self._rows.data_ptr(), self._rows.stride(0)
        triples = []
        for row, pieces in zip(rows, hosts, strict=True):
            at = base + row * stride
            for piece in pieces:
                triples.append((at, np.frombuffer(piece, np.uint8).ctypes.data, len(piece)))
                at += len(piece)
        table = np.array(triples, dtype=np.uint64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def _copy(self, src: Addresses, dst: Addresses, nbytes: Addresses, *, pageable: bool) -> None:
        order = np.argsort(dst, kind="stable")
        locked = seams(self._pinned)
        runs = merge(Runs(src[order], dst[order], nbytes[order]), locked, locked)
        driver = self._driver
        failure: DeviceError | None = None
        try:
            # Behind what the caller has enqueued on its stream: the last writer of the rows, or their last reader.
            driver.record(self._event, driver.current_stream())
            driver.wait(self._stream, self._event)
            try:
                driver.copy(runs, self._stream, pageable=pageable)
            except DeviceError as error:
                failure = error  # what was accepted still runs: the wait below is for that
            driver.record(self._event, self._stream)
            # Unbounded, as a synchronous copy is: returning while the device may still write would be worse.
            while not driver.reached(self._event):
                self._sleep(_POLL_S)
        except DeviceError as error:
            failure = error
        if failure is not None:
            raise TierError("g1", "copy", str(failure)) from failure

    def _all_pinned(self, host: Addresses) -> bool:
        if not self._pinned:
            return False
        starts = seams(self._pinned)
        ends = np.array([chunk.end for chunk in self._pinned], dtype=np.uint64)
        home = np.searchsorted(starts, host, side="right").astype(np.int64) - 1
        return bool(((home >= 0) & (host < ends[np.maximum(home, 0)])).all())
