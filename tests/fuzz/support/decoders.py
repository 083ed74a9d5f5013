"""All decoders of bytes that this process did not make itself: stored, sent by another process, or a person's."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvtier import codec
from kvtier.bench.retention.recording import KEY, Recording
from kvtier.bench.retention.shapes import shape_of
from kvtier.bench.retention.traces import load_trace
from kvtier.checksum import digest_of
from kvtier.cli.ask import answer_in
from kvtier.cli.pin import read_tokens
from kvtier.cli.prompt_break import read_prompt
from kvtier.cli.stored import read_namespace
from kvtier.cli.top_latest import rows_of
from kvtier.cli.top_view import parse_figures
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.config.key_file import parse_keys
from kvtier.config.strict_yaml import read_document
from kvtier.connectors.contents import ContentPage, Passage, described
from kvtier.connectors.control import Controls
from kvtier.encryption import EncryptionHeader
from kvtier.errors import ConfigError, CorruptError, FormatError, IdentityError, InvalidRequest
from kvtier.identity.keys import SHARED, Scope, make_keys, scope_of
from kvtier.identity.weights import fingerprint
from kvtier.journal.answers import Answers
from kvtier.journal.journal import Journal
from kvtier.kernels.method import load_table
from kvtier.keyring import WRAPPED_BYTES, Key, Keyring, UnknownKey
from kvtier.policies.gapduel import GapDuel
from kvtier.retention import pins, trusted_clock
from kvtier.retention.hints import read_hints
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.sim.history import History, make_history
from kvtier.testing import sample_namespace
from kvtier.tiers import key_directory
from kvtier.tiers.disk import contents
from kvtier.tiers.disk.ages import Ages
from kvtier.tiers.disk.bad_places import BadPlace
from kvtier.tiers.disk.budget import read_balance
from kvtier.tiers.disk.class_worth import ClassWorth
from kvtier.tiers.disk.directory import Marker, read_marker
from kvtier.tiers.disk.faults import Unusable
from kvtier.tiers.disk.geometry import SHRINKS_KEY, Geometry, geometry_in
from kvtier.tiers.disk.meta_pages import check_length
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.purge_log import PurgeLog
from kvtier.tiers.disk.read import miss_of
from kvtier.tiers.disk.records import (
    GEOMETRY_KEY,
    Counters,
    Entry,
    Segment,
    SlotReservation,
    order_key_in,
    reserved_key,
)
from kvtier.tiers.disk.touches import Touches
from kvtier.tiers.disk.worker import protocol as worker
from kvtier.tiers.objects import delta_format, frame, purge_log
from kvtier.tiers.objects.hints import UnitHint
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.purge_log import TenantLog
from kvtier.tiers.objects.signed import Signer
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall

Errors = tuple[type[Exception], ...]
NEVER: Errors = ()
DAMAGE: Errors = (CorruptError,)
MESSAGES: Errors = (msgspec.MsgspecError, UnicodeDecodeError)
NOW = Wall(1e9)
NAMESPACE = sample_namespace()
LIFE = Lifetime.of(BUILTIN["24h"], NOW)
NAME = NAMESPACE.digest + make_keys(scope_of("a"), [bytes(range(32))])[0]
PUBLIC = Keyring.public()
KEY_ID = b"key-id-1"
TRUSTED = Keyring([Key(KEY_ID, bytes(range(32)))], bytes(range(1, 33)))


@dataclass(frozen=True)
class Decoder:
    """`read` returns a value or raises one of `errors`. `write`: the bytes of a value, of which `read` accepts no
    others. `seal` puts the checks of the format over changed bytes, so that a change gets behind them. `modules`: whose
    code it is, without "kvtier."."""

    name: str
    modules: tuple[str, ...]
    read: Callable[[bytes], Any]
    samples: Callable[[], Sequence[bytes]]
    errors: Errors
    write: Callable[[Any], bytes] | None = None
    seal: Callable[[bytes], bytes] | None = None


# -- what several need ----------------------------------------------------------------------------------------------


def _in_file(read: Callable[[Path], Any], name: str = "file") -> Callable[[bytes], Any]:
    """`read`, of a file with these bytes."""

    def from_bytes(raw: bytes) -> Any:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            path = Path(folder, name)
            path.write_bytes(raw)
            return read(path)

    return from_bytes


def _text(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda raw: read(raw.decode("utf-8", "replace"))


def _json(read: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """`read`, of the value of a JSON text; what is none has been refused by the engine's server."""

    def from_bytes(raw: bytes) -> Any:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        return read(value)

    return from_bytes


def _texts(*values: object) -> Callable[[], list[bytes]]:
    return lambda: [value.encode() if isinstance(value, str) else json.dumps(value).encode() for value in values]


def _with_digest(raw: bytes) -> bytes:
    return raw[:-16] + digest_of([raw[:-16]])


def _with_check(raw: bytes, before: bytes = b"") -> bytes:
    return raw[:-8] + xxhash.xxh3_64_intdigest(before + raw[:-8]).to_bytes(8, "little")


# -- G3 -------------------------------------------------------------------------------------------------------------


def _entries() -> list[bytes]:
    header = EncryptionHeader(bytes(8), bytes(16), bytes(16), (bytes(16), bytes(range(16))))
    plain = Entry(7, 1, 2, 4096, 3, 9, bytes(range(16)), LIFE, position=4)
    sealed = Entry(7, 1, 2, 4096, 3, 9, bytes(16), LIFE, header)
    return [one.encode(NAME, short=short) for one in (plain, sealed) for short in (True, False)]


def _look(raw: bytes) -> Any:
    """As a look-up and a repair do, which decode no more than they need."""
    order_key_in(raw)
    return miss_of(NAME, raw, Wall("-inf"), Touches(), NOW)


def _purge_files() -> list[bytes]:
    def made(path: Path) -> bytes:
        log = PurgeLog(path / "PURGES")
        log.record(NAME[:48], NOW)
        log.record(NAMESPACE.digest + scope_of("b"), Wall(NOW + 1))
        log.close()
        return (path / "PURGES").read_bytes()[: 64 * 5]

    with tempfile.TemporaryDirectory() as folder:
        return [made(Path(folder))]


def _pending(path: Path) -> Any:
    log = PurgeLog(path)
    try:
        return log.pending()
    finally:
        log.close()


def _seal_purges(raw: bytes) -> bytes:
    records = [raw[start : start + 64] for start in range(0, len(raw), 64)]
    return b"".join(_with_check(record) if record.strip(b"\0") else record for record in records)


def _meta_pages() -> list[bytes]:
    import lmdb

    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder) as env, env.begin(write=True) as txn:
            txn.put(b"a", b"b")
        return [Path(folder, "data.mdb").read_bytes()[:16384]]


def _owner() -> Owner:
    return Owner(11, 22, 33, bytes(range(16)), 44)


# -- G4 -------------------------------------------------------------------------------------------------------------


def _frame(count: int = 3) -> frame.Frame:
    hashes = tuple(bytes([number]) * 32 for number in range(count))
    digests = tuple(bytes([number]) * 16 for number in range(count))
    return frame.Frame(NAMESPACE.digest, SHARED, 4, 4096, hashes, digests, LIFE, 7, salt=bytes(16))


def _hints() -> list[UnitHint]:
    return [
        UnitHint(scope_of(name), depth, bytes([depth]) * 32, bytes(4 * 15), LIFE, 3, 32 << 10)
        for depth, name in ((0, "a"), (16, "a"), (0, "b"))
    ]


def _old_delta() -> bytes:
    header = _frame().encode(PUBLIC).rstrip(b"\0")
    row = struct.pack("<IHd", len(header), 3, NOW) + header + b"tag"
    return struct.pack("<8sHHI", b"KVTDELTA", 2, 0, 2) + row + row


def _log_entries() -> list[bytes]:
    rows = {Scope(scope_of(name)[:8] + bytes(8)): number for number, name in ((2, "a"), (5, "b"))}
    one = dict(list(rows.items())[:1])
    return [purge_log.encode(5, bytes(16), 1, rows), purge_log.encode(5, bytes(range(16)), 0, dict.fromkeys(one, 5))]


def _remember(raw: bytes) -> int:
    names = ObjectNames("p", NAMESPACE.digest, PUBLIC)
    return TenantLog(None, names, Signer(PUBLIC, names.root), SystemClock()).remember(raw)  # type: ignore[arg-type]


# -- the worker process of G3 ---------------------------------------------------------------------------------------


def _requests() -> list[bytes]:
    call = worker.Call(1, "touch", trusted_clock.Reading(NOW, NOW, NOW), worker.packed([[NAME[32:]], NOW]))
    return [msgspec.msgpack.encode(each) for each in (call, worker.Cancel(3))]


def _replies() -> list[bytes]:
    told = (
        worker.Answer(1, worker.packed([Stored.STORED]), None, {"a": 1}),
        worker.Refusal(2, "TierError", "text", "write"), worker.Removed([NAME[32:]]),  # type: ignore[list-item]
        worker.Outage("why"), worker.LogLine(20, "text"),
    )  # fmt: skip
    return [msgspec.msgpack.encode(each) for each in told]


def _writes() -> list[bytes]:
    key = NAME[32:]
    block = worker.Block(key, 0, bytes(16), [], LIFE, None, 50, 3)  # type: ignore[arg-type]
    given = worker.GivenKey(SHARED, bytes(32), 1.0)
    return [msgspec.msgpack.encode(([block, block], [given], 1.5))]


# -- files and parameters -------------------------------------------------------------------------------------------

CONFIG = """version: 1
tiers:
  g2: {capacity: 64GiB}
  g3: {path: /data/kv, capacity: 1TiB, write_budget: 1DWPD}
  g4: {url: "s3://bucket/prefix"}
retention:
  default: 24h
  classes:
    mine: {ttl: 2h, max_age: 30d, ceiling: g3, isolate: true}
"""
KEYS = {
    "version": 1, "name_key": "5f" * 32,
    "keys": [
        {"id": "1f" * 8, "secret": "2e" * 32, "state": "active"},
        {"id": "3f" * 8, "secret": "4e" * 32, "state": "accept"},
    ],
}  # fmt: skip
HINTS = {
    "kv_hints": {
        "protocol_version": "1.0", "message_id": "m",
        "actions": [
            {"action_id": "a", "action_type": "retain", "action_version": "1", "payload": {
                "directives": [{"priority": 80, "duration": 60, "start": 0, "end": 512}]}},
            {"action_id": "b", "action_type": "pin", "action_version": "1", "payload": {
                "name": "p", "ttl_seconds": 60}},
        ],
    },
    "prompt_cache_key": "s", "prompt_cache_retention": "24h",
}  # fmt: skip
CONTROL = {
    "retention": "1h", "ranges": [{"start": 0, "end": 512, "retention": "24h"}], "load": True, "store": False,
    "pin": {"name": "p", "ttl": "1h"}, "session": "s", "hints": HINTS,
}  # fmt: skip
MOONCAKE = '{"timestamp": 1, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
SESSION = {
    "block_size": 64, "requests": [{"t": 0, "in": 128, "out": 2, "hash_ids": [1, 2]}],
}  # fmt: skip
ANSWER = {
    "kvtier_answer": 1, "requests": 1, "since_s": 2.5,
    "prefixes": [{"prefix": "3f2a91bc", "requests": 1, "shared_tokens": 16, "input_tokens": 32, "computed": 16,
                  "ago_s": 1.5, "given": {"g2": 16}}],
    "slow": [{"name": "cmpl-1", "why": "", "reason": "queued", "ago_s": 2.0, "placed_s": 0.5, "waited_s": None,
              "first_s": 3.0, "computed_tokens": 16, "given": {}}],
}  # fmt: skip
SHAPE = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512,
    "torch_dtype": "bfloat16", "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 128,
}  # fmt: skip
TABLE = {"version": 1, "device": "card", "best": [[True, 4096, 16, "dma"], [False, 4096, 64, "direct"]]}


def _arrays() -> list[bytes]:
    out = io.BytesIO()
    ints = {"session": [0, 0], "input_tokens": [128, 64], "output_tokens": [1, 2], "block_ids": [1, 2, 1],
            "offsets": [0, 2, 3], "block_tokens": 64}  # fmt: skip
    np.savez(out, t=np.array([0.0, 1.0]), **{name: np.array(value) for name, value in ints.items()})  # type: ignore[arg-type]
    return [out.getvalue()]


def _recorded(raw: bytes) -> None:
    recording = Recording(io.StringIO())
    lines = raw.split(b"\n")
    recording.begin(lines[0])
    for line in lines[1:]:
        recording.add(line)


def _safetensors() -> list[bytes]:
    header = json.dumps({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "__metadata__": {}}).encode()
    return [len(header).to_bytes(8, "little") + header + bytes(8)]


def _coded() -> list[bytes]:
    unit = np.random.default_rng(0).standard_normal(2048).astype(np.float16).tobytes()
    coded = codec.encode_unit(memoryview(unit))
    assert coded is not None
    return [bytes(coded)]


def _uncoded(raw: bytes) -> bytes:
    into = bytearray(4096)
    codec.decode_unit(memoryview(raw), memoryview(into))
    return bytes(into)


def _policy() -> bytes:
    return GapDuel(64).encode()


def _restored(raw: bytes) -> bytes:
    policy = GapDuel(64)
    policy.restore(raw)
    return policy.encode()


def _key_file(raw: bytes) -> Any:
    return parse_keys(read_document(raw), "keys")


def _content_page(*parts: bytes) -> bytes:
    body = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return _seal_content_page(struct.pack("<QQI", 0, 7, len(body)) + body)


def _seal_content_page(raw: bytes) -> bytes:
    if len(raw) < 20:
        return raw
    end = 20 + struct.unpack_from("<I", raw, 16)[0]
    return xxhash.xxh3_64_intdigest(raw[8:end]).to_bytes(8, "little") + raw[8:]


def _passages() -> list[bytes]:
    page, keys, tokens = ContentPage(), make_keys(SHARED, [bytes([n]) * 32 for n in range(3)]), list(range(12))
    page.add(Passage(keys, None, tokens, [None] * 3))
    page.add(Passage(keys, bytes(32), tokens, [("image", 3), None, ("a",)], "salt", (7, "a"), "key"))
    return page.parts


CONTROLS = Controls(Config.parse({}, {}))
ANSWERS = Answers(Journal(16), SystemClock().wall, lambda: None)
CALLS = (
    {"session_id": "a", "timestamp": 5.5, "input": "one two three four five six seven eight " * 3},
    {"session_id": 7, "pre_gap": 1.5, "output_length": 3, "input": [
        {"role": "user", "content": [{"type": "text", "text": "a b c d e f g h " * 3}, "x"], "tool_calls": [{"id": 1}]}
    ]},
)  # fmt: skip
ROUNDS = (
    {"provider": "p", "session_id": "a", "session_file": "f", "round_index": 0, "model": "m", "output_tokens": 9,
     "input_tokens_total": 640, "prefix_tokens": 128, "timing_events": [{"timestamp": "2026-06-01T05:40:00.000Z"}]},
    {"provider": "p", "session_id": "a", "round_index": 1, "input_tokens_total": 64, "output_tokens": 0},
)  # fmt: skip

DECODERS: tuple[Decoder, ...] = (
    Decoder(
        "index entry", ("tiers.disk.records", "retention.lifetime", "encryption"), lambda raw: Entry.decode(NAME, raw),
        _entries, DAMAGE, seal=lambda raw: _with_check(raw, NAME),
    ),
    Decoder("look at an entry", ("tiers.disk.read",), _look, _entries, NEVER, seal=lambda raw: _with_check(raw, NAME)),
    Decoder("lifetime", ("retention.lifetime",), Lifetime.decode,
            lambda: [LIFE.encode(), LIFE.encode(short=True)], DAMAGE),
    Decoder("encryption header", ("encryption",), EncryptionHeader.decode,
            lambda: [EncryptionHeader(bytes(8), bytes(16), bytes(16), (bytes(16),)).encode()], DAMAGE,
            write=EncryptionHeader.encode),
    Decoder("counters", ("tiers.disk.records",), Counters.decode, lambda: [Counters(1, 2, 3, 4, 5).encode()],
            (struct.error,), write=Counters.encode),
    Decoder("segment", ("tiers.disk.records",), Segment.decode, lambda: [Segment(0, 1, 9, 3, 2).encode()],
            (struct.error,), write=Segment.encode),
    Decoder(
        "reservation", ("tiers.disk.records", "tiers.disk.owner"),
        lambda raw: SlotReservation.decode(reserved_key(1, 2), raw),
        lambda: [SlotReservation(1, 2, 3, 1, 2, _owner()).encode()], (struct.error,), write=SlotReservation.encode,
    ),
    Decoder("owner", ("tiers.disk.owner",), Owner.decode, lambda: [_owner().encode()], (struct.error,),
            write=Owner.encode),
    Decoder("geometry", ("tiers.disk.geometry",), Geometry.decode, lambda: [Geometry(1 << 30, 1 << 24, 2).encode()],
            (struct.error,), write=Geometry.encode),
    Decoder("capacity of a store that shrinks", ("tiers.disk.geometry",),
            lambda raw: geometry_in({GEOMETRY_KEY: Geometry(1 << 30, 1 << 24, 2).encode(), SHRINKS_KEY: raw}),
            lambda: [struct.pack("<Q", 1 << 29)], (struct.error,)),
    Decoder("bad place", ("tiers.disk.bad_places",), lambda raw: BadPlace.decode(BadPlace(1, 2, 3, 4, NOW).key, raw),
            lambda: [BadPlace(1, 2, 3, 4, NOW).encode()], (struct.error,)),
    Decoder("worth of a class", ("tiers.disk.class_worth",), lambda raw: ClassWorth.decode(3, raw),
            lambda: [ClassWorth(3, ages=Ages([1, 5], [2, 3])).encode()], NEVER),
    Decoder("write budget", ("tiers.disk.budget",), lambda raw: read_balance({b"k": raw}, b"k"),
            lambda: [struct.pack("<dd16sQQ", 1.0, 2.0, bytes(16), 3, 4)], NEVER),
    Decoder("purges on their way", ("tiers.disk.purge_log",), _in_file(_pending), _purge_files, NEVER,
            seal=_seal_purges),
    Decoder("marker of a part", ("tiers.disk.directory",),
            _in_file(lambda path: read_marker(path.parent), "STORE.json"),
            lambda: [Marker("ab" * 16, 0, 2).encode()], (FormatError,)),
    Decoder("meta pages of LMDB", ("tiers.disk.meta_pages",), _in_file(check_length, "data.mdb"), _meta_pages,
            (Unusable,)),
    Decoder("page of contents", ("tiers.disk.contents",), contents._decoded,
            lambda: [_content_page(b"tenant-1", b"tenant-2more"), _content_page()], NEVER, seal=_seal_content_page),
    Decoder("contents of blocks", ("connectors.contents",), lambda raw: described(raw).passage(), _passages, DAMAGE),
    Decoder("header of an object", ("tiers.objects.frame",), lambda raw: frame.decode(raw, PUBLIC),
            lambda: [_frame(count).encode(PUBLIC) for count in (1, 3, 16)], DAMAGE),
    Decoder("header with keys", ("tiers.objects.frame", "keyring"), lambda raw: frame.decode(raw, TRUSTED),
            lambda: [replace(_frame(), key_id=KEY_ID).encode(TRUSTED)], DAMAGE),
    Decoder("delta", ("tiers.objects.delta_format",),
            lambda raw: list(delta_format.parse(raw, NAMESPACE.digest, PUBLIC)),
            lambda: [bytes(delta_format.encode(_hints())), _old_delta()], DAMAGE),
    Decoder("entry of the purge log", ("tiers.objects.purge_log",), lambda raw: purge_log.decode(raw, 5), _log_entries,
            DAMAGE, write=lambda told: purge_log.encode(5, *told)),
    Decoder("memory of the purge log", ("tiers.objects.purge_log",), _remember,
            lambda: [struct.pack("<8sQ16s", b"KVPLOG01", 5, bytes(16))], NEVER),
    Decoder("signed object", ("tiers.objects.signed",), lambda raw: Signer(TRUSTED, "p/").open("p/x", raw),
            lambda: [bytes(Signer(TRUSTED, "p/").sign("p/x", b"body"))], (CorruptError, UnknownKey),
            write=lambda body: bytes(Signer(TRUSTED, "p/").sign("p/x", body))),
    Decoder("pins", ("retention.pins",), pins.decode,
            lambda: [pins.encode([pins.Pin("a", tuple(make_keys(SHARED, [bytes(32)])), NOW, Wall(NOW + 9), 3, 1)])],
            DAMAGE, seal=_with_digest),
    Decoder("anchor of the clock", ("retention.trusted_clock",),
            lambda raw: trusted_clock.decode_anchor(raw, b"boot"),
            lambda: [trusted_clock.encode_anchor(trusted_clock.Anchor(NOW, 5.0), b"boot")],  # type: ignore[arg-type]
            DAMAGE, seal=_with_digest),
    Decoder("stamp", ("retention.trusted_clock",), trusted_clock.decode_stamp,
            lambda: [trusted_clock.encode_stamp(NOW)], DAMAGE, write=trusted_clock.encode_stamp, seal=None),
    Decoder("state of the policy", ("policies.gapduel",), _restored, lambda: [_policy()], DAMAGE, seal=_with_digest),
    Decoder("codec", ("codec",), _uncoded, _coded, DAMAGE),
    Decoder("request to the worker", ("tiers.disk.worker.protocol",), worker.requests.decode, _requests,
            MESSAGES),
    Decoder("reply of the worker", ("tiers.disk.worker.protocol",), worker.replies.decode, _replies,
            MESSAGES),
    Decoder("arguments of a write", ("tiers.disk.worker.protocol",), worker.verbs()["write"].arguments.decode, _writes,
            MESSAGES),
    Decoder("result of a look-up", ("tiers.disk.worker.protocol",), worker.verbs()["lookup"].result.decode,
            lambda: [msgspec.msgpack.encode([None, Miss.ABSENT])], MESSAGES),
    Decoder("configuration", ("config.strict_yaml", "config.schema", "units"),
            _in_file(lambda path: Config.load(path, {}), "kvtier.yaml"), _texts(CONFIG), (ConfigError,)),
    Decoder("key file", ("config.key_file",), _key_file, _texts(KEYS), (ConfigError,)),
    Decoder("data key", ("tiers.key_directory",), lambda raw: key_directory._parse(raw, Path("k")),
            _texts({"version": 1, "created": 1.0, "wrapped": "ab" * WRAPPED_BYTES}), DAMAGE),
    Decoder("hints of a request", ("retention.hints",),
            _json(lambda raw: read_hints(raw) if isinstance(raw, dict) else None), _texts(HINTS), (InvalidRequest,)),
    Decoder("parameters of a request", ("connectors.control",), _json(CONTROLS.parse), _texts(CONTROL), NEVER),
    Decoder("lines of a trace", ("bench.retention.traces",), _in_file(load_trace, "trace.jsonl"),
            _texts(MOONCAKE * 3), (InvalidRequest,)),
    Decoder("recorded trace", ("bench.retention.traces", "bench.retention.recording"),
            _in_file(load_trace, "trace.jsonl"),
            _texts(f'{{"{KEY}": 1, "block_tokens": 16}}\n'
                   '{"timestamp": 0, "input_length": 32, "output_length": 1, "after": -1, "new": 2}\n'
                   '{"timestamp": 1, "input_length": 48, "output_length": 1, "after": 1, "new": 1}\n'),
            (InvalidRequest,)),
    Decoder("calls of agents", ("bench.retention.json_lines", "bench.retention.agent_calls"),
            _in_file(load_trace, "trace.jsonl"), _texts(*CALLS), (InvalidRequest,)),
    Decoder("rounds of agents", ("bench.retention.json_lines", "bench.retention.agent_rounds"),
            _in_file(load_trace, "trace.jsonl"), _texts(*ROUNDS), (InvalidRequest,)),
    Decoder("history of a simulation", ("sim.history",), History.decode, lambda: [make_history(3, steps=4).encode()],
            (InvalidRequest,)),
    Decoder("trace of sessions", ("bench.retention.traces",), _in_file(load_trace, "trace.json"), _texts(SESSION),
            (InvalidRequest,)),
    Decoder("trace of arrays", ("bench.retention.traces",), _in_file(load_trace, "trace.npz"), _arrays,
            (InvalidRequest,)),
    Decoder("trace of texts", ("bench.retention.traces",), _in_file(load_trace, "trace.txt"),
            _texts("a b c d e f g h " * 9 + "\nd e\n"),
            (InvalidRequest,)),
    Decoder("trace socket", ("bench.retention.recording",), _recorded,
            _texts(f'{{"{KEY}": 1, "block_tokens": 16}}\n'
                   '{"at": 1.5, "input": 32, "output": 1, "ids": "AAAAAAAAAAAAAAAAAAAAAA==", "missed": 0}'),
            (FormatError,)),
    Decoder("question", ("journal.answers",), ANSWERS.to,
            _texts({"ask": "request", "name": "a", "earlier": "b", "excerpt": True}, {"ask": "breaks"}), NEVER),
    Decoder("answer", ("cli.ask",), lambda raw: rows_of(answer_in(raw) or {}), _texts(ANSWER),
            (FormatError, InvalidRequest)),
    Decoder("shape of a model", ("bench.retention.shapes",), _in_file(lambda path: shape_of(str(path)), "config.json"),
            _texts(SHAPE), (InvalidRequest,)),
    Decoder("weights", ("identity.weights",), _in_file(lambda path: fingerprint(path.parent), "m.safetensors"),
            _safetensors, (IdentityError,)),
    Decoder("namespace", ("identity.namespace", "cli.stored"), _in_file(read_namespace), _texts(NAMESPACE.fields()),
            (IdentityError, InvalidRequest)),
    Decoder("token ids", ("cli.pin",), _in_file(read_tokens), _texts([1, 2, 3], "1 2 3"), (InvalidRequest,)),
    Decoder("prompt", ("cli.prompt_break",), _text(lambda raw: read_prompt(raw, "prompt")),
            _texts({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [{"a": 1}],
                    "model": "m", "created": 5}, {"prompt_token_ids": [1, 2]}), (InvalidRequest,)),
    Decoder("page of metrics", ("cli.top_view",), _text(parse_figures),
            _texts('# TYPE kvtier_hit_blocks counter\nkvtier_hit_blocks_total{tier="g2"} 5.0\n'), (ValueError,)),
    Decoder("table of copy methods", ("kernels.method",), _in_file(lambda path: load_table(path, "card")),
            _texts(TABLE), NEVER),
)  # fmt: skip

ELSEWHERE = {
    "bench.peers.contest": "answers of an engine that the benchmark started",
    "bench.peers.prompts": "a file of the benchmark's own",
    "bench.peers.vllm_engine": "a job of the benchmark's own",
    "bench.tiers.host": "memory of its own",
    "cli.bench.retention": "results of an earlier run of the command, chosen by a person",
    "cli.trace_socket": "a namespace from a cache of the same user: what is no JSON object is an error that says so",
    "connectors.sglang.events": "keys of its own",
    "connectors.sglang.hicache": "hashes that SGLang hands over in its process",
    "connectors.sglang.offloads": "hashes that SGLang hands over in its process",
    "connectors.sglang.page_names": "hashes of its own",
    "connectors.sglang.requests": "hashes that SGLang hands over in its process",
    "connectors.transformers.chains": "memory of its own",
    "connectors.transformers.model": "a seed of its own",
    "connectors.vllm.events": "memory of its own",
    "connectors.vllm.worker": "memory of its own",
    "demo.reference": "memory of its own",
    "demo.run": "output of a child of the demo",
    "demo.stage": "a file of the demo's own",
    "identity.stream": "a digest of its own",
    "journal.breaks": "memory of its own",
    "kernels.layout": "memory of its own",
    "request_trace": "the kernel's credentials of a peer",
    "sim.device": "memory of its own",
    "sim.prompts": "a digest of its own",
    "testing.child": "output of a child of a test",
    "tiers.disk.allocator": "rows of the index, of fixed size: struct.error is damage",
    "tiers.disk.drain": "a time in the index (records)",
    "tiers.disk.eviction": "a key in the index (records)",
    "tiers.disk.expired": "an entry, as in `look at an entry`",
    "tiers.disk.guests": "rows of the index, of fixed size: struct.error is damage",
    "tiers.disk.index": "rows of the index, of fixed size: struct.error is damage",
    "tiers.disk.maintenance": "rows of the index, of fixed size: struct.error is damage",
    "tiers.disk.purged": "rows of the index, of fixed size: struct.error is damage",
    "tiers.disk.quota": "rows of the index, of fixed size: struct.error is damage",
    "tiers.disk.recovery": "a name that was checked before",
    "tiers.disk.slab": "memory of its own",
    "tiers.disk.worker.shared_arena": "memory of its own",
    "tiers.host.scope_marks": "memory of its own",
    "tiers.host.slot": "memory of its own",
    "tiers.objects.hints": "memory of its own",
    "tiers.objects.uses": "a proof in metadata: a tag of the length of a tag, or none",
}
"""Modules that read bytes all the same, and why none of their functions is in the table."""
