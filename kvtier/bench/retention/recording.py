"""A trace of one's own: a file with the requests of a running cache, as its trace socket tells them.

    {"kvtier_trace": 1, "block_tokens": 16}
    {"timestamp": s, "input_length": tokens, "output_length": tokens, "after": id, "new": count}

Blocks are numbered from 0 in the order in which they are first named. A block's id stands for all blocks before it,
so a request is told by the last block that was named before (-1: none) and by how many new ones follow it. A line has
a hundred bytes whatever the length of its prompt.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from kvtier.bench.retention.trace import Names, Trace
from kvtier.errors import FormatError
from kvtier.request_trace import ID_BYTES, VERSION

KEY = "kvtier_trace"
BLOCKS_MAX = 20_000_000


class Recording:
    """Writes what a trace socket tells into `out`. Counts `requests`, `blocks` and those that were `missed`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._known: dict[bytes, int] = {}
        self._start_s: float | None = None
        self.requests = self.missed = self.blocks = 0

    @property
    def full(self) -> bool:
        """Whether no more blocks are held in memory: the recording ends."""
        return self.blocks >= BLOCKS_MAX

    def begin(self, line: bytes) -> None:
        """Take the first line in. Raises like `block_tokens_of`."""
        self._write({KEY: VERSION, "block_tokens": block_tokens_of(line)})

    def add(self, line: bytes) -> None:
        """Take one request in. Raises FormatError."""
        told = _object(line)
        try:
            at_s, sizes = float(told["at"]), (int(told["input"]), int(told["output"]))
            ids, self.missed = base64.b64decode(told["ids"], validate=True), int(told["missed"])
        except (KeyError, TypeError, ValueError, OverflowError) as wrong:
            raise FormatError(f"a line of the trace socket cannot be read: {wrong!r}") from None
        known, after, new = self._known, -1, 0
        for start in range(0, len(ids), ID_BYTES):
            found = known.get(name := ids[start : start + ID_BYTES])
            if found is None or new:
                new += 1
                known[name], self.blocks = self.blocks, self.blocks + 1
            else:
                after = found
        self._start_s = at_s if self._start_s is None else self._start_s
        at_s = max(0.0, round(at_s - self._start_s, 3))
        self._write(
            {"timestamp": at_s, "input_length": sizes[0], "output_length": sizes[1], "after": after, "new": new}
        )
        self.requests += 1

    def _write(self, line: Mapping[str, Any]) -> None:
        self.write(self._out, line)
        self._out.flush()

    @staticmethod
    def write(out: TextIO, line: Mapping[str, Any]) -> None:
        """A line of the file."""
        out.write(json.dumps(line) + "\n")


def block_tokens_of(line: bytes) -> int:
    """What the first line of a trace socket says. Raises FormatError where another program, or another release,
    answers."""
    header = _object(line)
    found = header.get("block_tokens")
    if header.get(KEY) != VERSION or type(found) is not int:
        raise FormatError("what answers is no trace socket of this release of kvtier")
    return found


def write_trace(trace: Trace, out: TextIO) -> None:
    """Write a trace of any kind as a recording."""
    Recording.write(out, {KEY: VERSION, "block_tokens": trace.block_tokens})
    known = dict[tuple[int, int], int]()  # (parent, block) → number
    for request in trace.requests:
        parent, new = -1, 0
        after = -1
        for block in request.blocks:
            found = known.get((parent, block))
            if found is None:
                found = known[parent, block] = len(known)
                new += 1
            elif not new:
                after = found
            parent = found
        sizes = {"input_length": request.input_tokens, "output_length": request.output_tokens}
        Recording.write(out, {"timestamp": round(request.at, 3), **sizes, "after": after, "new": new})


def write_mooncake(trace: Trace, out: TextIO) -> None:
    """Write a trace as lines {timestamp ms, input_length, output_length, hash_ids}; an id stands for all blocks before
    its own, too."""
    names = Names()
    for request in trace.requests:
        sizes = {"input_length": request.input_tokens, "output_length": request.output_tokens}
        at = {"timestamp": round(1000 * request.at)}
        Recording.write(out, {**at, **sizes, "hash_ids": names.chain(request.blocks)})


class RecordedChains:
    """Rebuilds the blocks of recorded requests, in the order of the file."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def __len__(self) -> int:
        return len(self._parents)

    def of(self, after: int, new: int) -> list[int]:
        """Ids from the root on. Raises ValueError for a block that was not named before."""
        if not -1 <= after < len(self._parents) or not 0 <= new <= BLOCKS_MAX - len(self._parents):
            raise ValueError(f"after {after} and new {new}: {len(self._parents)} blocks are named so far")
        chain = list(self._up(after))[::-1]
        for _ in range(new):
            self._parents.append(after)
            after = len(self._parents) - 1
            chain.append(after)
        return chain

    def _up(self, block: int) -> Iterator[int]:
        while block >= 0:
            yield block
            block = self._parents[block]


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
