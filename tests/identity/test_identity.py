"""Names: equal exactly when the bytes are interchangeable, and the same on every machine and in every release."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import subprocess
import sys
from array import array
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtier
from kvtier.errors import IdentityError, InvalidRequest
from kvtier.identity.hashing import chain_hashes, chain_root, flatten
from kvtier.identity.keys import KEY_BYTES, SCOPE_BYTES, SHARED, check_keys, make_keys, scope_of, tenant_of
from kvtier.identity.namespace import Namespace, explain
from kvtier.testing import sample_namespace

BASE = sample_namespace()
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)

# Golden values: a change here makes every stored block of every user a miss. Change the format version with it.
GOLDEN_NAMESPACE = "4c1ba321a82cfbcbf639a228647d9dac5bd011cd9c07f093f49ad824d5ee6cce"
GOLDEN_HASHES = [
    "d228f51767a4c2b3e4ab306848ce76e8b65715a9f1c1d04e586f56fec09aa162",
    "f259878a46137e8a147463c17f5eff7083c1962f803fcb014a2308f0d638ee15",
]
GOLDEN_SALTED = "13fc04c83937cc62ddb08bad6157c6542c68e06d5582d96a5f54201ffc34c8767085edfa8e10a653acfa20ab6fd0476c"


def test_golden_names() -> None:
    assert BASE.digest.hex() == GOLDEN_NAMESPACE
    keys = kvtier.chain_hashes(range(40), BASE)
    assert [key[SCOPE_BYTES:].hex() for key in keys] == GOLDEN_HASHES
    assert all(key[:SCOPE_BYTES] == SHARED and len(key) == KEY_BYTES for key in keys)
    assert kvtier.chain_hashes(range(16), BASE, salt="a")[0].hex() == GOLDEN_SALTED


@given(TOKENS, st.integers(1, 20))
def test_hashes_follow_the_documented_formula(tokens: list[int], block_tokens: int) -> None:
    parent = hashlib.sha256(b"kvtier-chain-1" + BASE.digest + SHARED).digest()
    expected = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = struct.pack(f"<{block_tokens}I", *tokens[start : start + block_tokens])
        parent = hashlib.sha256(parent + block).digest()
        expected.append(parent)
    assert chain_hashes(chain_root(BASE.digest, SHARED), tokens, block_tokens) == expected


@given(TOKENS)
def test_every_way_to_give_tokens_is_one(tokens: list[int]) -> None:
    wanted = flatten(tokens)
    assert flatten(array("I", tokens)) == wanted
    assert flatten(tuple(tokens)) == wanted
    for dtype in (np.uint32, np.int64, np.uint64):
        assert flatten(np.array(tokens, dtype)) == wanted


def test_another_process_computes_the_same_names() -> None:
    code = (
        "import kvtier; from kvtier.testing import sample_namespace;"
        "print(kvtier.chain_hashes(range(40), sample_namespace())[-1].hex())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip().endswith(GOLDEN_HASHES[-1])


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        ["a"],
        [1.5],
        "text",
        b"bytes",
        [[1, 2]],
        np.zeros((2, 2), int),
        np.array([1.5]),
        np.array([-1]),
        np.array([2**32]),
        np.array([2**32], np.uint64),
    ],
    ids=repr,
)
def test_what_is_no_token_list_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidRequest, match="tokens must"):
        kvtier.chain_hashes(tokens, BASE)


def test_a_hash_commits_to_everything_before_it() -> None:
    first = chain_hashes(bytes(32), range(64), 16)
    for changed in range(64):
        tokens = list(range(64))
        tokens[changed] = 999
        other = chain_hashes(bytes(32), tokens, 16)
        same = [a == b for a, b in zip(first, other, strict=True)]
        assert same == [index < changed // 16 for index in range(4)]


def test_extras_are_part_of_the_name_and_cannot_be_shifted() -> None:
    names = {
        tuple(chain_hashes(bytes(32), range(32), 16, extras))
        for extras in ([], [[b"a"]], [[b"ab"]], [[b"a", b"b"]], [[], [b"a"]], [[b""]])
    }
    assert len(names) == 6


def _other(value: str | int) -> str | int:
    return value + "x" if isinstance(value, str) else value + 1


CHANGES = {spec.name: _other(getattr(BASE, spec.name)) for spec in fields(Namespace)} | {"rank": 1}


def _changed(*names: str) -> Namespace:
    more = {"ranks": 8, "block_bytes": 4096 * 2} if {"rank", "ranks", "ranks_served"} & set(names) else {}
    return Namespace.parse({**BASE.fields(), **more, **{name: CHANGES[name] for name in names}})


def test_each_field_alone_and_each_pair_makes_another_namespace() -> None:
    names = list(CHANGES)
    digests = {BASE.digest}
    subjects = [(name,) for name in names] + list(itertools.combinations(names, 2))
    for subject in subjects:
        if {"ranks_served", "block_bytes"} <= set(subject):
            continue  # 4097 bytes do not divide by two
        digests.add(_changed(*subject).digest)
    assert len(digests) >= len(subjects) - 20  # rank and ranks need partners, which makes a few pairs coincide
    assert all(_changed(name).digest != BASE.digest for name in names)


def test_explain_names_the_difference() -> None:
    other = Namespace.parse({**BASE.fields(), "weights": "test:2", "rope": "theta=1e6"})
    assert [(d.field, d.left, d.right) for d in explain(BASE, other)] == [
        ("weights", "test:1", "test:2"),
        ("rope", "", "theta=1e6"),
    ]
    assert explain(BASE, BASE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/models/llama"}, "is the path"),
        ({"model": ""}, "never guesses identity"),
        ({"weights": "unknown"}, "never guesses identity"),
        ({"dtype": "auto"}, "never guesses identity"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"block_bytes": 4096.0}, "block_bytes must be int"),
        ({"block_tokens": True}, "block_tokens must be int"),
        ({"rank": 1}, "rank must lie in"),
        ({"ranks_served": 3}, "does not divide"),
        ({"quantization": "fp8", "scales": "dynamic"}, "computed at run time"),
        ({"colour": "red"}, "namespace.colour is not a field"),
    ],
)
def test_a_namespace_that_is_not_certain_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        Namespace.parse({**BASE.fields(), **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(IdentityError, match=r"namespace\.dtype is required"):
        Namespace.parse({"model": "m", "weights": "w", "layout": "l", "block_tokens": 1, "block_bytes": 1})


def test_an_epoch_is_another_namespace() -> None:
    assert BASE.rotated("a").digest not in (BASE.digest, BASE.rotated("b").digest)
    assert BASE.rotated("").digest == BASE.digest


def test_scopes_are_apart_and_need_the_secret() -> None:
    scopes = [
        SHARED, scope_of(""), scope_of("a"), scope_of("b"), scope_of("a", b"lora"), scope_of(None, b"lora"),
        scope_of(None, b"", "in_memory"), scope_of("a", secret=b"k" * 16), scope_of("in_memory"), scope_of("ab"),
    ]  # fmt: skip
    assert len(set(scopes)) == len(scopes)
    assert all(len(scope) == SCOPE_BYTES for scope in scopes)
    assert scope_of(None, secret=b"k" * 16) == SHARED
    assert scope_of(b"a") == scope_of("a")
    assert scope_of(bytearray(b"a")) == scope_of(memoryview(b"a")) == scope_of("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("salt", [7, 0, True, 1 << 62, 1.5, ["a"], np.int64(3)], ids=repr)
def test_a_salt_is_text_or_bytes(salt: str) -> None:
    """An id that is a number was as many zeros: gigabytes of them, and 0 was no salt of its own."""
    for use in (scope_of, lambda salt: kvtier.chain_hashes(range(16), BASE, salt=salt)):
        with pytest.raises(InvalidRequest, match="a salt is text or bytes"):
            use(salt)


def test_a_tenant_s_scopes_are_of_one_tenant_and_no_other_s() -> None:
    def tenants(salt: str | None) -> set[bytes]:
        variants = ((), (b"lora",), (b"lora", "in_memory"), (b"", "in_memory"))
        return {tenant_of(scope_of(salt, *variant)) for variant in variants}

    assert all(len(tenants(salt)) == 1 for salt in (None, "", "a"))
    assert len({*tenants(None), *tenants(""), *tenants("a"), *tenants("b")}) == 4
    assert tenant_of(make_keys(scope_of("a", b"lora"), [bytes(32)])[0]) in tenants("a")


def test_a_key_has_48_bytes_and_comes_once_in_a_chain() -> None:
    keys = make_keys(SHARED, [bytes([number]) * 32 for number in range(3)])
    check_keys([*keys, keys[0]], distinct=False)
    for wrong, why in (
        ([*keys, keys[1]], r"keys\[3\] repeats keys\[1\]"),
        ([keys[0], keys[1][1:]], r"keys\[1\].* got 47 bytes"),
        ([bytearray(keys[0])], "got bytearray"),
        ([*keys, *make_keys(scope_of("a"), [bytes(32)])], r"keys\[3\] is of another scope"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            check_keys(wrong, distinct=True)  # type: ignore[arg-type]


def test_explain_names_the_engine_s_own_fields() -> None:
    left, right = (replace(BASE, engine=json.dumps(raw)) for raw in ({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": [4]}))
    assert [(d.field, d.left, d.right) for d in explain(left, right)] == [
        ("engine.b", "2", "3"),
        ("engine.c", "absent", "[4]"),
    ]
    for raw in ("not JSON", "[1]", "[" * 100_000):
        (difference,) = explain(replace(BASE, engine=raw), BASE)
        assert (difference.field, difference.left, difference.right) == ("engine.", raw, "absent")


def test_tokens_hash_alike_whatever_the_machine_s_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a big-endian machine the array's own bytes are the other way round; what is hashed is little-endian."""
    from kvtier.identity import hashing

    tokens = [1, 2, 0x01020304]
    little = hashing.flatten(tokens)
    assert little == struct.pack("<3I", *tokens)
    monkeypatch.setattr(hashing.sys, "byteorder", "big")
    assert hashing.flatten(tokens) == struct.pack(">3I", *tokens)
