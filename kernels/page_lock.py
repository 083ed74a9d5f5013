"""Page-locking host memory in chunks, so that copy engines and kernels reach it.

Every rank does this for its own memory, with its own device. Registering costs about 0.1 s per GB, holds locks of
the driver that other processes wait for, and fails for a single call of 512 GiB and more; hence chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvtier.errors import InvalidRequest
from kvtier.kernels.driver import DeviceError, Driver
from kvtier.kernels.layout import Region
from kvtier.kernels.memory import Progress

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 30
"""The most that one registration covers."""


def page_lock(
    driver: Driver,
    regions: Sequence[Region],
    slot_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
) -> tuple[Region, ...]:
    """Page-lock host memory in chunks of whole slots. Returns the chunks, to be undone by `page_unlock`.

    All or nothing: where the driver refuses a chunk, the ones before are released and the result is empty, with a
    warning. Copies then go through pageable memory: slower, and still right.
    """
    step = chunk_bytes // slot_bytes * slot_bytes
    if step < 1:
        raise InvalidRequest(f"page_lock: a chunk of {chunk_bytes} bytes does not hold one slot of {slot_bytes}")
    chunks = list[Region]()
    done, total = 0, sum(region.nbytes for region in regions)
    for region in regions:
        for start in range(region.start, region.end, step):
            chunk = Region(start, min(step, region.end - start))
            try:
                driver.register(chunk.start, chunk.nbytes)
            except DeviceError as error:
                log.warning("host memory stays pageable, copies are slower and may wait: %s (memlock limit?)", error)
                page_unlock(driver, chunks)
                return ()
            chunks.append(chunk)
            done += chunk.nbytes
            if progress is not None:
                progress("register", done, total)
    return tuple(chunks)


def page_unlock(driver: Driver, chunks: Iterable[Region]) -> None:
    """Undo `page_lock`. No copy may be in flight. A chunk that the driver refuses stays locked for good."""
    for chunk in chunks:
        try:
            driver.unregister(chunk.start)
        except DeviceError as error:
            log.warning("could not unregister host memory: %s", error)
