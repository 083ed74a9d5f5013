"""Which stream may touch a slot when: its work comes behind what other streams have enqueued on that slot.

A slot changes hands on the host while work on it is still enqueued: the stream that filled or read a block names its
last work by an event, and the next stream waits for the events of others, on the device. The same bookkeeping as
`record_stream` of torch's allocator, by slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class SlotOrder(Protocol):
    """Both verbs are of the caller's current stream on the pool's device."""

    def used(self, slots: Iterable[int]) -> None:
        """All work on these slots, so far, is enqueued."""

    def follow(self, slots: Iterable[int]) -> None:
        """Work that is enqueued from now on comes behind every other stream's on these slots."""


class HostOrder:
    """Of a pool in host memory: what was called is done."""

    def used(self, slots: Iterable[int]) -> None:
        pass

    def follow(self, slots: Iterable[int]) -> None:
        pass


class StreamOrder:
    """Of a pool on a GPU. Keeps, for each slot and stream, the event of its last use until that is reached.

    `cuda` is torch.cuda, `device` the pool's, which need not be the caller's current one.
    """

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda, self._device = cuda, device
        self._uses: dict[int, dict[int, Any]] = {}  # slot → stream's handle → event

    def used(self, slots: Iterable[int]) -> None:
        stream = self._cuda.current_stream(self._device)
        event = self._cuda.Event()
        event.record(stream)
        for slot in slots:
            self._uses.setdefault(slot, {})[stream.cuda_stream] = event

    def follow(self, slots: Iterable[int]) -> None:
        stream = self._cuda.current_stream(self._device)
        waited: dict[int, bool] = {}  # by the event's id: whether it is reached
        for slot in slots:
            uses = self._uses.get(slot, {})
            for handle, event in list(uses.items()):
                if id(event) not in waited:
                    waited[id(event)] = bool(event.query())
                    if handle != stream.cuda_stream and not waited[id(event)]:
                        stream.wait_event(event)
                if waited[id(event)]:
                    del uses[handle]
            if slot in self._uses and not uses:
                del self._uses[slot]
