"""Each trace format is read as it is published, and a bad line is named, never skipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.bench.retention.recording import write_trace
from kvtier.bench.retention.traces import load_trace
from kvtier.cli import main
from kvtier.errors import ConfigError, InvalidRequest

MOONCAKE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 9]},
    {"timestamp": 1500, "input_length": 1536, "output_length": 5, "hash_ids": [7, 9, 30, 9]},
]
BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 48, "output_length": 1, "type": "text",
     "turn": 1, "hash_ids": [5, 6, 5]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 2.0, "input_length": 64, "output_length": 1, "type": "text",
     "turn": 2, "hash_ids": [5, 6, 5, 8]},
    {"chat_id": 3, "parent_chat_id": -1, "timestamp": 3.0, "input_length": 16, "output_length": 1, "type": "text",
     "turn": 1, "hash_ids": [6]},
]  # fmt: skip
SESSION = {
    "id": "a", "block_size": 64, "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "s", "in": 128, "out": 3, "hash_ids": [1, 2]},
        {"type": "subagent", "t": 4.0, "requests": [{"t": 5.0, "type": "s", "in": 64, "out": 3, "hash_ids": [9]}]},
        {"t": 9.0, "type": "s", "in": 192, "out": 3, "hash_ids": [1, 2, 3]},
    ],
}  # fmt: skip


def lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + "\n")
    return path


def test_mooncake_repeated_ids_count_once(tmp_path: Path) -> None:
    trace = load_trace(lines(tmp_path / "m.jsonl", MOONCAKE))
    assert (trace.format, trace.block_tokens, trace.unique, trace.references) == ("mooncake", 512, 3, 5)
    assert [(r.at, r.blocks) for r in trace.requests] == [(0.0, [0, 1]), (1.5, [0, 1, 2])]


def test_bailian_ids_name_blocks_only_with_what_came_before(tmp_path: Path) -> None:
    trace = load_trace(lines(tmp_path / "b.jsonl", BAILIAN))
    first, second, third = trace.requests
    assert (trace.format, trace.block_tokens) == ("bailian", 16)
    assert len(set(first.blocks)) == 3 and second.blocks[:3] == first.blocks
    assert third.blocks[0] not in second.blocks  # equal bytes after another prefix are another block
    assert first.session == second.session != third.session


def test_sessions_keep_local_ids_apart_and_read_sub_agents(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SESSION))
    (tmp_path / "b.json").write_text(json.dumps(SESSION | {"id": "b"}))
    alone = load_trace(tmp_path / "a.json")
    assert [len(r.blocks) for r in alone.requests] == [2, 1, 3] and alone.block_tokens == 64
    both = load_trace(tmp_path)
    assert both.unique == 2 * alone.unique and {r.session for r in both.requests} == {0, 1}
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(SESSION | {"hash_id_scope": "global"}))
    assert load_trace(tmp_path).unique == alone.unique


def test_prompts_share_the_blocks_they_begin_with(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(64)]
    same, other = " ".join(words), " ".join(words[:40] + ["else"] * 24)
    trace = load_trace(
        lines(tmp_path / "p.jsonl", [{"timestamp": 1, "prompt": same}, {"timestamp": 2, "prompt": other}])
    )
    one, two = trace.requests
    assert trace.format == "prompts" and one.blocks[0] == two.blocks[0] and one.blocks[-1] != two.blocks[-1]
    tokens = load_trace(lines(tmp_path / "t.jsonl", [{"timestamp": 0, "tokens": list(range(40))}]))
    assert len(tokens.requests[0].blocks) == 2
    text = tmp_path / "p.txt"
    text.write_text(f"{same}\n\n{other}\n")
    assert [r.blocks for r in load_trace(text).requests] == [one.blocks, two.blocks]


def test_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", **{name: np.array(value) for name, value in ARRAYS.items()})
    trace = load_trace(tmp_path / "c.npz")
    assert [(r.at, r.blocks) for r in trace.requests] == [(0.0, [0, 1]), (1.0, [0, 1, 2])]
    np.savez(tmp_path / "d.npz", **{name: np.array(value) for name, value in ARRAYS.items() if name != "session"})
    with pytest.raises(InvalidRequest, match=r"d\.npz: array session is missing"):
        load_trace(tmp_path / "d.npz")


ARRAYS = {
    "t": [5.0, 6.0], "session": [1, 1], "input_tokens": [1024, 1536], "output_tokens": [1, 1],
    "block_ids": [0, 1, 0, 1, 2], "offsets": [0, 2, 5], "block_tokens": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value"),
    [(6, 255), (8, 1), (8, 9), (10, 8), (10, 12), (10, 14), (10, 99)],
    ids=["version", "encrypted", "names", "deflate", "bzip2", "lzma", "method"],
)
def test_an_archive_that_the_reader_of_archives_cannot_take(tmp_path: Path, place: int, value: int) -> None:
    """It raises many kinds of errors, NotImplementedError and RuntimeError among them."""
    np.savez(tmp_path / "c.npz", **{name: np.array(value) for name, value in ARRAYS.items()})
    raw = bytearray((tmp_path / "c.npz").read_bytes())
    at = raw.find(b"PK\x01\x02")
    while at >= 0:  # entries of the directory: version 6, flags 8, method 10
        raw[at + place] = value
        at = raw.find(b"PK\x01\x02", at + 1)
    (tmp_path / "c.npz").write_bytes(raw)
    with pytest.raises(InvalidRequest, match=r"c\.npz: not a trace of arrays"):
        load_trace(tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("t", [5.0, float("nan")], r"c\.npz: t\[1\]: nan"),
        ("t", [-1.0, 2.0], r"c\.npz: t\[0\]: -1"),
        ("session", [1], r"c\.npz: session: 1 entries for 2 requests"),
        ("offsets", [0, 6, 5], r"c\.npz: offsets\[1\]: decreases"),
        ("offsets", [0, 2, 4], r"c\.npz: offsets: 3 for 2 requests and 5 block_ids"),
        ("block_ids", [0.5, 1, 0, 1, 2], r"c\.npz: block_ids: expected integers in 1 axes, got float64"),
        ("block_ids", [[0, 1, 0, 1, 2]], r"c\.npz: block_ids: .* in 2"),
        ("block_tokens", 0, r"c\.npz: block_tokens: expected at least 1"),
    ],
)
def test_a_bad_array_is_named(tmp_path: Path, name: str, value: Any, message: str) -> None:
    np.savez(tmp_path / "c.npz", **{key: np.array(content) for key, content in (ARRAYS | {name: value}).items()})
    with pytest.raises(InvalidRequest, match=message):
        load_trace(tmp_path / "c.npz")


BAD = [
    ("{", r"m\.jsonl:2: not JSON"),
    ("[1]", r"m\.jsonl:2: expected a JSON object, got list"),
    ("[" * 100_000, r"m\.jsonl:2: not JSON"),
    ({"timestamp": 1, "input_length": 3, "output_length": 1}, r"m\.jsonl:2: hash_ids is missing"),
    ({**MOONCAKE[0], "hash_ids": {}}, r"m\.jsonl:2: hash_ids: expected a list of integers"),
    ({**MOONCAKE[0], "hash_ids": [1, "2"]}, r"m\.jsonl:2: hash_ids"),
    ({**MOONCAKE[0], "hash_ids": [1, True]}, r"m\.jsonl:2: hash_ids"),
    ({**MOONCAKE[0], "timestamp": "now"}, r"m\.jsonl:2: timestamp: expected a number of at least 0, got 'now'"),
    ({**MOONCAKE[0], "timestamp": -1}, r"m\.jsonl:2: timestamp"),
    ({**MOONCAKE[0], "input_length": None}, r"m\.jsonl:2: input_length"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_trace(lines(tmp_path / "m.jsonl", [MOONCAKE[0], line, MOONCAKE[1]]))


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such trace"):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequest, match="without requests"):
        load_trace(lines(tmp_path / "empty.jsonl", [""]))
    with pytest.raises(InvalidRequest, match=r"no known trace: expected hash_ids .* got color"):
        load_trace(lines(tmp_path / "odd.jsonl", [{"color": 1}]))
    for noise in (b"PK\3\4 nothing", b"", b"\x93NUMPY"):
        (tmp_path / "noise.npz").write_bytes(noise)
        with pytest.raises(InvalidRequest, match="not a trace of arrays"):
            load_trace(tmp_path / "noise.npz")
    with (tmp_path / "one.npz").open("wb") as stream:
        np.save(stream, np.arange(3))
    with pytest.raises(InvalidRequest, match="one array"):
        load_trace(tmp_path / "one.npz")
    with pytest.raises(InvalidRequest, match="no request names a block"):
        load_trace(lines(tmp_path / "short.jsonl", [{"prompt": "too short"}]))
    (tmp_path / "noise.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(InvalidRequest, match=r"noise\.jsonl"):
        load_trace(tmp_path / "noise.jsonl")


def test_squeezing_moves_starts_and_nothing_else(made: Any) -> None:
    trace = made(1)
    tight = trace.squeezed(60.0, seed=7)
    assert tight.references == trace.references and tight.unique == trace.unique
    for user in range(15):
        before = [r.at for r in trace.requests if r.session == user]
        after = [r.at for r in tight.requests if r.session == user]
        assert np.allclose(np.diff(before), np.diff(after))
    assert trace.squeezed(60.0, seed=7) == tight != trace.squeezed(60.0, seed=8)


def test_a_sample_has_whole_sessions(made: Any) -> None:
    trace = made(2)
    part = trace.sampled(0.4, seed=1)
    kept = {r.session for r in part.requests}
    assert 0 < len(kept) < 15
    assert len(part.requests) == sum(r.session in kept for r in trace.requests)
    assert {b for r in part.requests for b in r.blocks} == set(range(part.unique))


def call(session: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"session_id": session, "model": "m", "input": messages, "output_length": 3, **more}


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " * 3


def test_agent_calls_share_what_their_messages_share(tmp_path: Path) -> None:
    system, asked = {"role": "system", "content": LONG}, {"role": "user", "content": LONG + "why?"}
    tool = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": LONG}]}
    entries = [
        call("a", [system, asked], pre_gap=0.0),
        call("b", [system], pre_gap=0.0),
        call("a", [system, asked, tool], pre_gap=2.5),
        call("a", [system, tool], pre_gap=1.0),  # compacted: the second message is another one
    ]
    trace = load_trace(lines(tmp_path / "agents.jsonl", entries))
    by_session: dict[int, list[Any]] = {}
    for request in trace.requests:
        by_session.setdefault(request.session, []).append(request)
    first, longer, compacted = max(by_session.values(), key=len)
    (other,) = min(by_session.values(), key=len)
    assert (trace.format, trace.block_tokens) == ("lmcache", 16)
    assert longer.blocks[: len(first.blocks)] == first.blocks and len(longer.blocks) > len(first.blocks)
    assert other.blocks == first.blocks[: len(other.blocks)] == compacted.blocks[: len(other.blocks)]
    assert not set(compacted.blocks[len(other.blocks) + 1 :]) & set(longer.blocks), "the same text after another prefix"
    assert [longer.at - first.at, compacted.at - longer.at] == pytest.approx([2.5, 1.0])
    assert first.output_tokens == 3 and first.input_tokens >= 16 * len(first.blocks)


def test_agent_calls_with_times_and_plain_text(tmp_path: Path) -> None:
    entries = [
        {"session_id": 0, "timestamp": 5.0, "input": LONG}, {"session_id": 1, "timestamp": 6.5, "input": LONG + LONG}
    ]  # fmt: skip
    first, second = load_trace(lines(tmp_path / "a.jsonl", entries)).requests
    assert (first.at, second.at) == (0.0, 1.5) and second.blocks[: len(first.blocks)] == first.blocks
    odd = {**entries[0], "input": [{"role": "user", "content": [{"text": 7}, 8]}]}
    assert len(load_trace(lines(tmp_path / "odd.jsonl", [entries[0], odd])).requests) == 2
    with pytest.raises(InvalidRequest, match=r"bad\.jsonl:1: input"):
        load_trace(lines(tmp_path / "bad.jsonl", [{"session_id": 0, "input": 7}]))


def test_a_session_that_returns_after_many_others_goes_on_at_its_time(tmp_path: Path) -> None:
    others = [call(f"s{n}", [{"role": "user", "content": LONG}], pre_gap=0.0) for n in range(70)]
    back = call("s0", [{"role": "user", "content": LONG}], pre_gap=30.0)
    trace = load_trace(lines(tmp_path / "many.jsonl", [*others, back]))
    again = [request for request in trace.requests if request.session == 0]
    assert len(again) == 2 and again[1].at - again[0].at == pytest.approx(30.0)
    assert again[0].blocks == again[1].blocks


def agent_round(session: str, index: int, size: int, cached: int, second: int, **more: Any) -> dict[str, Any]:
    events = [{"event_type": "user_message", "timestamp": f"2026-06-01T05:40:{second:02}.000Z"}]
    return {
        "provider": "claude", "session_id": session, "session_file": f"{session}.jsonl", "round_index": index,
        "model": "m", "input_tokens_total": size, "prefix_tokens": cached, "output_tokens": 9, "timing_events": events,
        **more,
    }  # fmt: skip


ROUNDS = [
    agent_round("a", 0, 640, 256, 0),
    agent_round("a", 1, 1280, 0, 10),  # the provider had forgotten it; it repeats the first all the same
    agent_round("a", 2, 320, 128, 20),  # compacted
    agent_round("b", 0, 512, 256, 30),
]


def check_rounds(path: Path) -> None:
    trace = load_trace(path)
    first, longer, compacted, other = trace.requests
    assert (trace.format, trace.block_tokens) == ("tracelab", 64)
    assert [r.at for r in trace.requests] == [0.0, 10.0, 20.0, 30.0]
    assert [len(r.blocks) for r in trace.requests] == [10, 20, 5, 8]
    assert longer.blocks[:10] == first.blocks
    assert compacted.blocks[:2] == longer.blocks[:2] and not set(compacted.blocks[2:]) & set(longer.blocks)
    assert other.blocks[:4] == first.blocks[:4] and not set(other.blocks[4:]) & set(first.blocks)
    assert first.session == longer.session == compacted.session != other.session


def test_rounds_are_made_into_blocks_by_their_lengths(tmp_path: Path) -> None:
    check_rounds(lines(tmp_path / "round_trace.jsonl", ROUNDS))
    with pytest.raises(InvalidRequest, match=r":1: output_tokens is missing"):
        load_trace(lines(tmp_path / "bad.jsonl", [{k: v for k, v in ROUNDS[0].items() if k != "output_tokens"}]))
    for wrong, field in (
        ({"input_tokens_total": 2**52}, "input_tokens_total"),
        ({"prefix_tokens": "many"}, "prefix_tokens"),
        ({"timing_events": [{"timestamp": "0001-01-01"}]}, "timing_events"),
    ):
        with pytest.raises(InvalidRequest, match=rf":1: {field}"):
            load_trace(lines(tmp_path / "bad.jsonl", [{**ROUNDS[0], **wrong}]))
    load_trace(lines(tmp_path / "timeless.jsonl", [{**ROUNDS[0], "timing_events": 7}]))


def test_rounds_of_a_database(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "trace.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE rounds (round_pk BIGINT, provider VARCHAR, session_id VARCHAR, session_file VARCHAR, "
            "round_index BIGINT, model VARCHAR, input_tokens_total BIGINT, prefix_tokens BIGINT, output_tokens BIGINT)"
        )
        connection.execute("CREATE TABLE timing_events (round_pk BIGINT, timestamp TIMESTAMP)")
        for number, one in enumerate(ROUNDS):
            columns = ("provider", "session_id", "session_file", "round_index", "model", "input_tokens_total",
                       "prefix_tokens", "output_tokens")  # fmt: skip
            row = [number, *(one[name] for name in columns)]
            connection.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            stamp = one["timing_events"][0]["timestamp"]
            connection.execute("INSERT INTO timing_events VALUES (?, ?)", [number, stamp])
    check_rounds(path)
    (tmp_path / "no.duckdb").write_bytes(b"nothing")
    with pytest.raises(InvalidRequest, match="no DuckDB of rounds"):
        load_trace(tmp_path / "no.duckdb")


def test_a_database_without_the_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    (tmp_path / "t.duckdb").write_bytes(b"")
    with pytest.raises(ConfigError, match="pip install duckdb"):
        load_trace(tmp_path / "t.duckdb")


TIMED = [
    {"timestamp": 250, "input_length": 40, "output_length": 5, "hash_ids": [7, 7, 9]},
    {"timestamp": 1750, "input_length": 48, "output_length": 5, "hash_ids": [7, 7, 30]},
]


def test_timed_traces_have_the_size_and_unit_they_are_given(tmp_path: Path) -> None:
    trace = load_trace(lines(tmp_path / "t.jsonl", TIMED), block_tokens=16, unit_s=1e-3)
    assert (trace.format, trace.block_tokens, trace.unique) == ("timed", 16, 4)
    assert [(r.at, r.blocks) for r in trace.requests] == [(0.0, [0, 1, 2]), (1.5, [0, 1, 3])]


@pytest.mark.parametrize("to", ["kvtier", "mooncake"])
def test_a_trace_is_converted_and_read_as_the_same(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = lines(tmp_path / "t.jsonl", TIMED), tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["trace", "convert", str(source), "--out", str(out), "--to", to, "--block-tokens", "16", "--milliseconds"])
    assert not ended.value.code and "2 requests, 4 blocks of 16 tokens, read as timed" in " ".join(
        capsys.readouterr().out.split()
    )
    before = load_trace(source, block_tokens=16, unit_s=1e-3)
    after = load_trace(out) if to == "kvtier" else load_trace(out, block_tokens=16, unit_s=1e-3)
    assert after.requests == before.requests and after.block_tokens == 16
    with pytest.raises(SystemExit) as ended:
        main(["trace", "convert", str(source), "--out", str(out)])
    assert ended.value.code == 2 and "is there already" in capsys.readouterr().err


SESSION_BAD = [
    ([], "a.json: requests: expected a session"),
    (SESSION | {"requests": 7}, "a.json: requests: expected a session"),
    (SESSION | {"block_size": 0}, "a.json: block_size: expected at least 1"),
    (SESSION | {"requests": [7]}, r"a.json: requests\[0\]: expected a request, got int"),
]


@pytest.mark.parametrize(("session", "message"), SESSION_BAD)
def test_a_bad_session_is_named(tmp_path: Path, session: Any, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(session))
    with pytest.raises(InvalidRequest, match=message):
        load_trace(tmp_path / "a.json")


def test_sessions_of_two_sizes_of_blocks_are_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SESSION))
    (tmp_path / "b.json").write_text(json.dumps(SESSION | {"block_size": 2 * SESSION["block_size"]}))
    with pytest.raises(InvalidRequest, match=r"b\.json: block_size: 128, the other sessions have 64"):
        load_trace(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"chat_id": 1, "parent_chat_id": "x", "timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1],
          "turn": 1, "type": "text"}, "parent_chat_id: expected an integer, got 'x'"),
        ({"prompt": 7}, r"expected prompt \(text\) or tokens"),
    ],
)  # fmt: skip
def test_a_bad_line_of_another_format_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_trace(lines(tmp_path / "m.jsonl", [line]))


def test_only_the_first_requests_of_a_trace(tmp_path: Path) -> None:
    file = lines(tmp_path / "m.jsonl", MOONCAKE)
    whole, first = load_trace(file), load_trace(file, limit=1)
    assert len(whole.requests) > 1 and len(first.requests) == 1
    assert first.unique == len(set(first.requests[0].blocks)) < whole.unique
    assert load_trace(file, limit=99) == whole


def test_a_trace_of_kvtiers_own_with_blocks_of_nothing_is_refused(tmp_path: Path) -> None:
    whole = load_trace(lines(tmp_path / "m.jsonl", MOONCAKE))
    own = tmp_path / "own.jsonl"
    with own.open("w", encoding="utf-8") as file:
        write_trace(whole, file)
    assert load_trace(own).unique == whole.unique
    header, _, rest = own.read_text().partition("\n")
    own.write_text(json.dumps(json.loads(header) | {"block_tokens": 0}) + "\n" + rest)
    with pytest.raises(InvalidRequest, match="block_tokens: expected at least 1, got 0"):
        load_trace(own)
    own.write_text(header + "\n")
    with pytest.raises(InvalidRequest, match="a trace without requests"):
        load_trace(own)
