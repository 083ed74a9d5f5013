"""A card over virtual time (card.h): what the real driver's calls cost the host, and when the device has done them."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from headless_driver import HeadlessDriver

from kvtier.kernels.layout import Paged, Region, Shape

PARAMETERS = Path(__file__).parent / "card.json"
STREAM = 4242
"""The engine's, on which forwards run (see `HeadlessDriver`)."""

MODEL, PUMP = 0, 1
"""Threads of the host: each has a clock of its own, which its driver calls move."""


class Card:
    """The stand-in for libcuda with virtual time. One at a time; `close` turns time off."""

    def __init__(self, library: ctypes.CDLL, parameters: Path = PARAMETERS) -> None:
        self.library = library
        for name in ("card_clock", "card_blocked", "card_bytes"):
            getattr(library, name).restype = ctypes.c_double
        library.card_set.argtypes = (ctypes.c_char_p, ctypes.c_double)
        library.card_sleep_until.argtypes = (ctypes.c_double,)
        library.card_forward.argtypes = (ctypes.c_ssize_t, ctypes.c_double)
        library.fake_reset(1, 0, 0)
        library.card_reset()
        self.parameters = {name: v for name, v in json.loads(parameters.read_text()).items() if name != "about"}
        for name, value in self.parameters.items():
            library.card_set(name.encode(), value)

    def driver(self) -> HeadlessDriver:
        return HeadlessDriver(0, library=self.library)

    @property
    def clock(self) -> float:
        """Seconds, of the thread that calls now."""
        return float(self.library.card_clock())

    @property
    def blocked_s(self) -> float:
        """Seconds that calls have waited for space in a launch queue."""
        return float(self.library.card_blocked())

    def moved(self, store: bool) -> float:
        """Bytes that have crossed the link so far, descriptors' time included."""
        return float(self.library.card_bytes(1 if store else 0))

    @contextmanager
    def thread(self, number: int) -> Iterator[None]:
        """Calls are this thread's."""
        self.library.card_thread(number)
        try:
            yield
        finally:
            self.library.card_thread(MODEL)

    def sleep(self, seconds: float) -> None:
        self.library.card_sleep_until(self.clock + seconds)

    def sleep_until(self, time: float) -> None:
        self.library.card_sleep_until(time)

    def forward(self, seconds: float) -> None:
        """The engine launches a step of this length."""
        self.library.card_forward(STREAM, seconds)

    @property
    def idle(self) -> bool:
        return bool(self.library.card_idle())

    def close(self) -> None:
        self.library.card_off()


class Recorded:
    """An event of the engine's, recorded now on its stream. As `torch.cuda.Event`."""

    def __init__(self, card: Card) -> None:
        driver = card.driver()
        self.cuda_event = driver.event()
        driver.record(self.cuda_event, STREAM)

    def query(self) -> bool:
        raise AssertionError("the device waits, not the host")

    synchronize = query


@dataclass(frozen=True)
class Case:
    """One rank's cache: fragments of one size, so many to a block."""

    name: str
    fragment_bytes: int
    fragments: int

    @property
    def block_bytes(self) -> int:
        return self.fragment_bytes * self.fragments

    def memories(self, blocks: int) -> tuple[Paged, Paged, Shape]:
        """(device, host, shape): fragment-major on the device, as vLLM's LBNHC has it; whole blocks on the host. Of
        addresses alone: nothing lies there."""
        shape = Shape.opaque(self.fragment_bytes, self.fragments)
        nbytes = blocks * self.block_bytes
        planes = np.arange(self.fragments, dtype=np.uint64)[:, None] * np.uint64(self.fragment_bytes)

        def paged(start: int, between: int, stride: int) -> Paged:
            bases = np.uint64(start) + planes * np.uint64(between)
            return Paged(bases, blocks, stride, token=0, head=0, regions=(Region(start, nbytes),)).validate(shape)

        host = paged(1 << 44, 1, self.block_bytes)
        if self.fragments == 1:
            return paged(1 << 45, 1, self.block_bytes), host, shape
        return paged(1 << 45, blocks, self.fragment_bytes), host, shape


KIB = 1 << 10
LLAMA_8B = Case("8B LBNHC", 64 * KIB, 32)
LLAMA_8B_SPLIT = Case("8B, K and V apart", 32 * KIB, 64)
LLAMA_8B_BLOCKS = Case("8B BLNHC", 2048 * KIB, 1)
LLAMA_70B_RANK = Case("70B TP8 LBNHC", 8 * KIB, 80)
LLAMA_70B_RANK_BLOCKS = Case("70B TP8 BLNHC", 640 * KIB, 1)
DEEPSEEK = Case("DeepSeek MLA", 72 * KIB, 61)
SGLANG_8B = Case("SGLang 8B page 64", 128 * KIB, 64)
