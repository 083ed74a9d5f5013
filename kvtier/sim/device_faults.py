"""What goes wrong with the devices of one machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class DeviceFaults:
    """What goes wrong with copies of one machine's devices, of which `rate` are hit. "twice": answers of copies come
    again; "unreached": a rank cannot reach the arena, if it is told of one meanwhile."""

    KINDS: ClassVar[tuple[str, ...]] = ("slow", "hang", "fail", "twice", "unreached")
    kind: str = ""
    rate: float = 0.0
