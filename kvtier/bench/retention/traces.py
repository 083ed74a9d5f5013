"""Request traces: which blocks each request named, and when.

    claude     .npz   arrays t, session, input_tokens, output_tokens, block_ids, offsets, block_tokens
    mooncake   .jsonl {timestamp ms, input_length, output_length, hash_ids}; 512-token chained ids (FAST'25 traces)
    kvtier     .jsonl what `kvtier trace record` writes (`kvtier.bench.retention.recording`)
    bailian    .jsonl {timestamp s, chat_id, parent_chat_id, input_length, output_length, hash_ids}; 16-token ids
    sessions   a .json file or a folder of them: {block_size, hash_id_scope, requests: [{t, in, out, hash_ids}, …]},
               sub-agents nested as {type: subagent, requests: […]} (kv-cache-tester)
    prompts    .jsonl {timestamp s, prompt | tokens}, or .txt with one prompt per line

The format is recognised by the content. Ids that name a block without what came before it are chained here, as an
engine's hashes are. A line that cannot be read is an error that names file, line and field; none is skipped.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.bench.retention.recording import KEY, RecordedChains
from kvtier.errors import InvalidRequest
from kvtier.request_trace import VERSION

PROMPT_BLOCK_TOKENS = 16
LINE_BYTES_MAX = 64 * 1024 * 1024
MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
DAY_S = 86_400.0

_WORD = re.compile(r"\w{1,6}|[^\w\s]|\s+")


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` are ids from the root on, as the trace gives them (its last may be a partial one), each
    once; `at` in seconds from the start."""

    at: float
    blocks: list[int]
    input_tokens: int
    output_tokens: int
    session: int = -1


REQUESTS_MIN = 200
"""Requests from which shares of hits are worth money."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. Ids of blocks are dense: 0 … `unique` - 1."""

    name: str
    format: str
    block_tokens: int
    requests: tuple[Request, ...]
    unique: int

    @property
    def references(self) -> int:
        """Blocks named, over all requests."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].at - self.requests[0].at if self.requests else 0.0

    def doubts(self, kept_s: float = 0.0) -> list[str]:
        """Why figures of this trace say little; `kept_s`: the longest retention that is asked about, in seconds."""
        found = []
        if len(self.requests) < REQUESTS_MIN:
            found.append(
                f"{len(self.requests)} requests are too few: below {REQUESTS_MIN}, a few more change every figure"
            )
        if kept_s != float("inf") and self.span_s < kept_s:
            found.append(
                f"the trace spans {self.span_s / 60:,.0f} minutes: what keeping KV for {kept_s / 60:,.0f} saves cannot "
                "show in it"
            )
        return found

    def squeezed(self, span_s: float, seed: int) -> Trace:
        """The same sessions with their starts drawn anew, uniformly over `span_s`: more of them live at once.

        Pauses inside a session do not change. A request without a session is a session of its own.
        """
        rng = random.Random(seed)
        starts: dict[int, float] = {}
        shift: dict[int, float] = {}
        moved = []
        for number, request in enumerate(self.requests):
            session = request.session if request.session >= 0 else -1 - number
            if session not in starts:
                starts[session] = request.at
                shift[session] = rng.uniform(0, span_s)
            moved.append(replace(request, at=request.at - starts[session] + shift[session]))
        moved.sort(key=lambda request: request.at)
        return replace(self, name=f"{self.name}@{span_s / 3600:g}h", requests=tuple(moved))

    def sampled(self, share: float, seed: int) -> Trace:
        """A share of the sessions (of the requests, where there are none), all of each."""
        rng = random.Random(seed)
        kept: dict[int, bool] = {}
        names = _Names()
        requests = []
        for number, request in enumerate(self.requests):
            session = request.session if request.session >= 0 else -1 - number
            if session not in kept:
                kept[session] = rng.random() < share
            if kept[session]:
                requests.append(replace(request, blocks=[names.of(block) for block in request.blocks]))
        return replace(self, name=f"{self.name}×{share:g}", requests=tuple(requests), unique=len(names))


def load_trace(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read a trace, its first `limit` requests if given. Blocks on the disk. Raises InvalidRequest."""
    where = Path(path)
    if not where.exists():
        raise InvalidRequest(f"{where}: no such trace")
    if where.suffix == ".npz":
        trace = _load_claude(where)
    elif where.is_dir() or where.suffix == ".json":
        trace = _load_sessions(where)
    elif where.suffix == ".txt":
        trace = _load_text(where)
    else:
        trace = _load_lines(where)
    if not trace.requests:
        raise InvalidRequest(f"{where}: a trace without requests")
    if not trace.unique:
        raise InvalidRequest(f"{where}: no request names a block (of {trace.block_tokens} tokens)")
    if limit is None or limit >= len(trace.requests):
        return trace
    names = _Names()
    head = tuple(replace(r, blocks=[names.of(b) for b in r.blocks]) for r in trace.requests[:limit])
    return replace(trace, requests=head, unique=len(names))


class _Names:
    """Dense integers for names, each one object however often it occurs."""

    def __init__(self) -> None:
        self._dense: dict[Any, int] = {}

    def of(self, name: Any) -> int:
        return self._dense.setdefault(name, len(self._dense))

    def chain(self, parts: Sequence[Any], root: Any = None) -> list[int]:
        """Names of blocks that are distinct only together with the blocks before them."""
        out: list[int] = []
        parent: Any = root
        for part in parts:
            parent = self.of((parent, part))
            out.append(parent)
        return out

    def __len__(self) -> int:
        return len(self._dense)


def _finish(name: str, kind: str, block_tokens: int, requests: list[Request], unique: int) -> Trace:
    requests.sort(key=lambda request: request.at)
    start = requests[0].at if requests else 0.0
    return Trace(name, kind, block_tokens, tuple(replace(r, at=r.at - start) for r in requests), unique)


# -- arrays ----------------------------------------------------------------------------------------------------


def _load_claude(path: Path) -> Trace:
    from zipfile import BadZipFile, is_zipfile

    import numpy as np

    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise InvalidRequest(f"{path}: one array, not an archive of them")
        with content as arrays:
            t = _array(path, arrays, "t", "iuf")
            session, given, made, ids, offsets = (
                _array(path, arrays, name, "iu")
                for name in ("session", "input_tokens", "output_tokens", "block_ids", "offsets")
            )
            block_tokens = int(_array(path, arrays, "block_tokens", "iu", axes=0))
    except InvalidRequest:
        raise
    except (OSError, EOFError, ValueError, BadZipFile) as wrong:
        why = wrong if is_zipfile(path) else "it is no .npz archive"  # NumPy reports any other file as a pickle
        raise InvalidRequest(f"{path}: not a trace of arrays: {why}") from None
    for name, array in (("session", session), ("input_tokens", given), ("output_tokens", made)):
        if len(array) != len(t):
            raise InvalidRequest(f"{path}: {name}: {len(array)} entries for {len(t)} requests")
    if len(offsets) != len(t) + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise InvalidRequest(f"{path}: offsets: {len(offsets)} for {len(t)} requests and {len(ids)} block_ids")
    for name, wrong_at in (("t", ~((t >= 0) & (t < 2**53))), ("offsets", np.diff(offsets.astype(np.int64)) < 0)):
        if wrong_at.any():
            place = int(wrong_at.argmax())
            raise InvalidRequest(f"{path}: {name}[{place}]: {t[place] if name == 't' else 'decreases after it'}")
    if block_tokens < 1:
        raise InvalidRequest(f"{path}: block_tokens: expected at least 1, got {block_tokens}")
    names = _Names()
    shared = list(map(names.of, ids.tolist()))
    columns = (array.tolist() for array in (t, offsets[:-1], offsets[1:], given, made, session))
    requests = [
        Request(at, list(dict.fromkeys(shared[start:stop])), size, output, who)
        for at, start, stop, size, output, who in zip(*columns, strict=True)
    ]
    return _finish(path.stem, "claude", block_tokens, requests, len(names))


def _array(path: Path, arrays: Mapping[str, Any], name: str, kinds: str, axes: int = 1) -> Any:
    if name not in arrays:
        raise InvalidRequest(f"{path}: array {name} is missing")
    array = arrays[name]
    if array.ndim != axes or array.dtype.kind not in kinds:
        meant = {"iu": "integers", "iuf": "numbers"}[kinds]
        raise InvalidRequest(f"{path}: {name}: expected {meant} in {axes} axes, got {array.dtype} in {array.ndim}")
    return array


# -- lines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """One JSON object and where it stood."""

    place: str
    fields: Mapping[str, Any]

    def _field(self, name: str) -> Any:
        if name not in self.fields:
            raise InvalidRequest(f"{self.place}: {name} is missing")
        return self.fields[name]

    def number(self, name: str) -> float:
        value = self._field(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
            raise InvalidRequest(f"{self.place}: {name}: expected a number of at least 0, got {value!r}")
        return value

    def ids(self, name: str) -> list[int]:
        value = self._field(name)
        if not isinstance(value, list) or not all(type(x) is int for x in value):
            raise InvalidRequest(f"{self.place}: {name}: expected a list of integers, got {str(value)[:40]!r}")
        return value


def _lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as stream:
        for number, raw in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX), b""), 1):
            place = f"{path}:{number}"
            if not raw.strip():
                continue
            try:
                fields = json.loads(raw)
            except (ValueError, RecursionError) as wrong:
                raise InvalidRequest(f"{place}: not JSON: {wrong}") from None
            if not isinstance(fields, dict):
                raise InvalidRequest(f"{place}: expected a JSON object, got {type(fields).__name__}")
            yield _Line(place, fields)


def _load_lines(path: Path) -> Trace:
    try:
        first = next(_lines(path), None)
    except UnicodeDecodeError as wrong:
        raise InvalidRequest(f"{path}: not a text file: {wrong}") from None
    if first is None:
        raise InvalidRequest(f"{path}: a trace without requests")
    if KEY in first.fields:
        return _load_recording(path)
    if "hash_ids" in first.fields:
        return _load_bailian(path) if "chat_id" in first.fields else _load_mooncake(path)
    if "prompt" in first.fields or "tokens" in first.fields:
        return _load_prompts(path)
    raise InvalidRequest(
        f"{first.place}: no known trace: expected hash_ids (Mooncake, Bailian) or prompt or tokens, "
        f"got {', '.join(sorted(first.fields)[:8])}"
    )


def _load_recording(path: Path) -> Trace:
    lines = _lines(path)
    header, chains, requests = next(lines), RecordedChains(), list[Request]()
    if header.fields[KEY] != VERSION:
        raise InvalidRequest(f"{header.place}: {KEY}: this release reads version {VERSION}")
    block_tokens = int(header.number("block_tokens"))
    if not block_tokens:
        raise InvalidRequest(f"{header.place}: block_tokens: expected at least 1, got 0")
    for line in lines:
        after, new = line.fields.get("after"), line.fields.get("new")
        if type(after) is not int or type(new) is not int:
            raise InvalidRequest(f"{line.place}: after and new: expected integers")
        try:
            blocks = chains.of(after, new)
        except ValueError as wrong:
            raise InvalidRequest(f"{line.place}: {wrong}") from None
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp"), blocks, *sizes))
    return _finish(path.stem, "kvtier", block_tokens, requests, len(chains))


def _load_mooncake(path: Path) -> Trace:
    names, requests = _Names(), []
    for line in _lines(path):
        blocks = [names.of(block) for block in dict.fromkeys(line.ids("hash_ids"))]
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp") / 1000, blocks, *sizes))
    return _finish(path.stem, "mooncake", MOONCAKE_BLOCK_TOKENS, requests, len(names))


def _load_bailian(path: Path) -> Trace:
    names, sessions, requests = _Names(), dict[int, int](), []
    for line in _lines(path):
        chat, parent = int(line.number("chat_id")), line.fields.get("parent_chat_id", -1)
        if type(parent) is not int:
            raise InvalidRequest(f"{line.place}: parent_chat_id: expected an integer, got {parent!r}")
        sessions[chat] = sessions.get(parent, chat)
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp"), names.chain(line.ids("hash_ids")), *sizes, sessions[chat]))
    return _finish(path.stem, "bailian", BAILIAN_BLOCK_TOKENS, requests, len(names))


def _load_prompts(path: Path) -> Trace:
    names, requests = _Names(), []
    for number, line in enumerate(_lines(path)):
        if "tokens" in line.fields:
            tokens: Sequence[Any] = line.ids("tokens")
        elif isinstance(line.fields.get("prompt"), str):
            tokens = _WORD.findall(line.fields["prompt"])
        else:
            raise InvalidRequest(f"{line.place}: expected prompt (text) or tokens (a list of integers)")
        at = line.number("timestamp") if "timestamp" in line.fields else float(number)
        made = int(line.number("output_length")) if "output_length" in line.fields else 0
        requests.append(_prompt(names, at, tokens, made))
    return _finish(path.stem, "prompts", PROMPT_BLOCK_TOKENS, requests, len(names))


def _load_text(path: Path) -> Trace:
    """One prompt per line, one second apart. Words and marks stand in for a tokenizer's tokens."""
    names, requests = _Names(), []
    try:
        for number, line in enumerate(path.read_text().splitlines()):
            if line.strip():
                requests.append(_prompt(names, float(number), _WORD.findall(line), 0))
    except ValueError as wrong:
        raise InvalidRequest(f"{path}: not a text file: {wrong}") from None
    return _finish(path.stem, "prompts", PROMPT_BLOCK_TOKENS, requests, len(names))


def _prompt(names: _Names, at: float, tokens: Sequence[Any], made: int) -> Request:
    size = PROMPT_BLOCK_TOKENS
    full = [tuple(tokens[start : start + size]) for start in range(0, len(tokens) // size * size, size)]
    return Request(at, names.chain(full), len(tokens), made)


# -- sessions --------------------------------------------------------------------------------------------------


def _load_sessions(path: Path) -> Trace:
    """Sessions have no absolute start: each file of a folder starts at a time drawn uniformly over a day, by name."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    names, requests = _Names(), []
    block_tokens = 0
    for number, file in enumerate(files):
        try:
            session = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as wrong:
            raise InvalidRequest(f"{file}: not JSON: {wrong}") from None
        if not isinstance(session, dict) or not isinstance(session.get("requests"), list):
            raise InvalidRequest(f"{file}: requests: expected a session with a list of requests")
        size = int(_Line(str(file), session).number("block_size"))
        if not size:
            raise InvalidRequest(f"{file}: block_size: expected at least 1, got 0")
        if block_tokens and size != block_tokens:
            raise InvalidRequest(f"{file}: block_size: {size}, the other sessions have {block_tokens}")
        block_tokens = size
        start = random.Random(file.name).uniform(0, DAY_S) if path.is_dir() else 0.0
        own = None if session.get("hash_id_scope") == "global" else number
        for line in _session_lines(str(file), session["requests"]):
            sizes = int(line.number("in")), int(line.number("out"))
            blocks = [names.of((own, block)) for block in dict.fromkeys(line.ids("hash_ids"))]
            requests.append(Request(start + line.number("t"), blocks, *sizes, number))
    return _finish(path.stem, "sessions", block_tokens, requests, len(names))


def _session_lines(place: str, entries: Sequence[Any], depth: int = 0) -> Iterator[_Line]:
    for number, entry in enumerate(entries):
        here = f"{place}: requests[{number}]"
        if not isinstance(entry, dict) or depth > 8:
            raise InvalidRequest(f"{here}: expected a request, got {type(entry).__name__}")
        if isinstance(entry.get("requests"), list):
            yield from _session_lines(here, entry["requests"], depth + 1)
        else:
            yield _Line(here, entry)
