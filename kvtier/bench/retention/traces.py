"""Request traces: which blocks each request named, and when.

    claude     .npz   arrays t, session, input_tokens, output_tokens, block_ids, offsets, block_tokens
    mooncake   .jsonl {timestamp ms, input_length, output_length, hash_ids}; 512-token chained ids (FAST'25 traces)
    kvtier     .jsonl what `kvtier trace record` writes (`kvtier.bench.retention.recording`)
    bailian    .jsonl {timestamp s, chat_id, parent_chat_id, input_length, output_length, hash_ids}; 16-token ids
    sessions   a .json file or a folder of them: {block_size, hash_id_scope, requests: [{t, in, out, hash_ids}, …]},
               sub-agents nested as {type: subagent, requests: […]} (kv-cache-tester)
    timed      .jsonl {timestamp, input_length, output_length, hash_ids} of any block size and unit, which the caller
               gives: what vLLM's `bench serve --dataset-name timed_trace` reads
    lmcache    .jsonl a model call of an agent per line, with all its messages (`kvtier.bench.retention.agent_calls`)
    tracelab   .jsonl or .duckdb rounds of coding agents, in tokens (`kvtier.bench.retention.agent_rounds`)
    prompts    .jsonl {timestamp s, prompt | tokens}, or .txt with one prompt per line

The format is recognised by the content. Ids that name a block without what came before it are chained here, as an
engine's hashes are. A line that cannot be read is an error that names file, line and field; none is skipped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.bench.retention import agent_calls, agent_rounds
from kvtier.bench.retention.json_lines import TraceLine, lines
from kvtier.bench.retention.recording import KEY, RecordedChains
from kvtier.bench.retention.text_blocks import PROMPT_BLOCK_TOKENS, request_of, tokens_of
from kvtier.bench.retention.trace import DAY_S, Names, Request, Trace, finish
from kvtier.errors import InvalidRequest
from kvtier.request_trace import VERSION

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16


def load_trace(
    path: str | Path, *, limit: int | None = None, block_tokens: int | None = None, unit_s: float = 1.0
) -> Trace:
    """Read a trace, its first `limit` requests if given. Blocks on the disk. Raises InvalidRequest.

    `block_tokens`: it is a timed one, whose `hash_ids` name blocks of that size, and its timestamps count `unit_s`
    seconds."""
    where = Path(path)
    if not where.exists():
        raise InvalidRequest(f"{where}: no such trace")
    if block_tokens is not None:
        trace = _load_timed(where, block_tokens, unit_s)
    elif where.suffix == ".npz":
        trace = _load_claude(where)
    elif where.suffix in (".duckdb", ".db"):
        trace = agent_rounds.from_database(where)
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
    names = Names()
    head = tuple(replace(r, blocks=[names.of(b) for b in r.blocks]) for r in trace.requests[:limit])
    return replace(trace, requests=head, unique=len(names))


# -- arrays ----------------------------------------------------------------------------------------------------


def _load_claude(path: Path) -> Trace:
    from zipfile import is_zipfile

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
    except Exception as wrong:  # zipfile, its decompressors and NumPy raise a dozen kinds for a damaged file
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
    names = Names()
    shared = list(map(names.of, ids.tolist()))
    columns = (array.tolist() for array in (t, offsets[:-1], offsets[1:], given, made, session))
    requests = [
        Request(at, list(dict.fromkeys(shared[start:stop])), size, output, who)
        for at, start, stop, size, output, who in zip(*columns, strict=True)
    ]
    return finish(path.stem, "claude", block_tokens, requests, len(names))


def _array(path: Path, arrays: Mapping[str, Any], name: str, kinds: str, axes: int = 1) -> Any:
    if name not in arrays:
        raise InvalidRequest(f"{path}: array {name} is missing")
    array = arrays[name]
    if array.ndim != axes or array.dtype.kind not in kinds:
        meant = {"iu": "integers", "iuf": "numbers"}[kinds]
        raise InvalidRequest(f"{path}: {name}: expected {meant} in {axes} axes, got {array.dtype} in {array.ndim}")
    return array


# -- lines -----------------------------------------------------------------------------------------------------


def _load_lines(path: Path) -> Trace:
    try:
        first = next(lines(path), None)
    except UnicodeDecodeError as wrong:
        raise InvalidRequest(f"{path}: not a text file: {wrong}") from None
    if first is None:
        raise InvalidRequest(f"{path}: a trace without requests")
    if KEY in first.fields:
        return _load_recording(path)
    if "hash_ids" in first.fields:
        return _load_bailian(path) if "chat_id" in first.fields else _load_mooncake(path)
    if agent_rounds.KEY in first.fields:
        return agent_rounds.from_lines(path)
    if first.fields.keys() >= agent_calls.KEYS:
        return agent_calls.from_lines(path)
    if "prompt" in first.fields or "tokens" in first.fields:
        return _load_prompts(path)
    raise InvalidRequest(
        f"{first.place}: no known trace: expected hash_ids (Mooncake, Bailian), prompt or tokens, "
        f"session_id and input (LMCache), {agent_rounds.KEY} (TraceLab), "
        f"got {', '.join(sorted(first.fields)[:8])}"
    )


def _load_recording(path: Path) -> Trace:
    read = lines(path)
    header, chains, requests = next(read), RecordedChains(), list[Request]()
    if header.fields[KEY] != VERSION:
        raise InvalidRequest(f"{header.place}: {KEY}: this release reads version {VERSION}")
    block_tokens = int(header.number("block_tokens"))
    if not block_tokens:
        raise InvalidRequest(f"{header.place}: block_tokens: expected at least 1, got 0")
    for line in read:
        after, new = line.fields.get("after"), line.fields.get("new")
        if type(after) is not int or type(new) is not int:
            raise InvalidRequest(f"{line.place}: after and new: expected integers")
        try:
            blocks = chains.of(after, new)
        except ValueError as wrong:
            raise InvalidRequest(f"{line.place}: {wrong}") from None
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp"), blocks, *sizes))
    return finish(path.stem, "kvtier", block_tokens, requests, len(chains))


def _load_mooncake(path: Path) -> Trace:
    names, requests = Names(), []
    for line in lines(path):
        blocks = [names.of(block) for block in dict.fromkeys(line.ids("hash_ids"))]
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp") / 1000, blocks, *sizes))
    return finish(path.stem, "mooncake", MOONCAKE_BLOCK_TOKENS, requests, len(names))


def _load_timed(path: Path, block_tokens: int, unit_s: float) -> Trace:
    names, requests = Names(), []
    for line in lines(path):
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp") * unit_s, names.chain(line.ids("hash_ids")), *sizes))
    return finish(path.stem, "timed", block_tokens, requests, len(names))


def _load_bailian(path: Path) -> Trace:
    names, sessions, requests = Names(), dict[int, int](), []
    for line in lines(path):
        chat, parent = int(line.number("chat_id")), line.fields.get("parent_chat_id", -1)
        if type(parent) is not int:
            raise InvalidRequest(f"{line.place}: parent_chat_id: expected an integer, got {parent!r}")
        sessions[chat] = sessions.get(parent, chat)
        sizes = int(line.number("input_length")), int(line.number("output_length"))
        requests.append(Request(line.number("timestamp"), names.chain(line.ids("hash_ids")), *sizes, sessions[chat]))
    return finish(path.stem, "bailian", BAILIAN_BLOCK_TOKENS, requests, len(names))


def _load_prompts(path: Path) -> Trace:
    names, requests = Names(), []
    for number, line in enumerate(lines(path)):
        if "tokens" in line.fields:
            tokens: Sequence[Any] = line.ids("tokens")
        elif isinstance(line.fields.get("prompt"), str):
            tokens = tokens_of(line.fields["prompt"])
        else:
            raise InvalidRequest(f"{line.place}: expected prompt (text) or tokens (a list of integers)")
        at = line.number("timestamp") if "timestamp" in line.fields else float(number)
        made = int(line.number("output_length")) if "output_length" in line.fields else 0
        requests.append(request_of(names, at, tokens, made))
    return finish(path.stem, "prompts", PROMPT_BLOCK_TOKENS, requests, len(names))


def _load_text(path: Path) -> Trace:
    """One prompt per line, one second apart. Words and marks stand in for a tokenizer's tokens."""
    names, requests = Names(), []
    try:
        for number, line in enumerate(path.read_text().splitlines()):
            if line.strip():
                requests.append(request_of(names, float(number), tokens_of(line), 0))
    except ValueError as wrong:
        raise InvalidRequest(f"{path}: not a text file: {wrong}") from None
    return finish(path.stem, "prompts", PROMPT_BLOCK_TOKENS, requests, len(names))


# -- sessions --------------------------------------------------------------------------------------------------


def _load_sessions(path: Path) -> Trace:
    """Sessions have no absolute start: each file of a folder starts at a time drawn uniformly over a day, by name."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    names, requests = Names(), []
    block_tokens = 0
    for number, file in enumerate(files):
        try:
            session = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as wrong:
            raise InvalidRequest(f"{file}: not JSON: {wrong}") from None
        if not isinstance(session, dict) or not isinstance(session.get("requests"), list):
            raise InvalidRequest(f"{file}: requests: expected a session with a list of requests")
        size = int(TraceLine(str(file), session).number("block_size"))
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
    return finish(path.stem, "sessions", block_tokens, requests, len(names))


def _session_lines(place: str, entries: Sequence[Any], depth: int = 0) -> Iterator[TraceLine]:
    for number, entry in enumerate(entries):
        here = f"{place}: requests[{number}]"
        if not isinstance(entry, dict) or depth > 8:
            raise InvalidRequest(f"{here}: expected a request, got {type(entry).__name__}")
        if isinstance(entry.get("requests"), list):
            yield from _session_lines(here, entry["requests"], depth + 1)
        else:
            yield TraceLine(here, entry)
