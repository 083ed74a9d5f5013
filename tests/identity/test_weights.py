"""New weights at the same path have another fingerprint; the same weights elsewhere have the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from kvtier.errors import IdentityError
from kvtier.identity.weights import fingerprint

BIG = 300_000


def checkpoint(folder: Path, *, small: bytes = b"s" * 1000, big: bytes = b"b" * BIG, config: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "big": {"dtype": "U8", "shape": [len(big)], "data_offsets": [0, len(big)]},
            "small": {"dtype": "U8", "shape": [len(small)], "data_offsets": [len(big), len(big) + len(small)]},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + big + small)
    (folder / "config.json").write_text(config)
    return folder


def test_the_same_weights_have_the_same_name_wherever_they_lie(tmp_path: Path) -> None:
    assert fingerprint(checkpoint(tmp_path / "a")) == fingerprint(checkpoint(tmp_path / "b"))


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_retraining_in_place_is_seen(tmp_path: Path, mode: str) -> None:
    before = fingerprint(checkpoint(tmp_path / "a"), mode)  # type: ignore[arg-type]
    changes: list[dict[str, object]] = [
        {"small": b"s" * 999 + b"t"}, {"big": b"c" * BIG}, {"config": '{"rope_theta": 1e6}'},
    ]  # fmt: skip
    for change in changes:
        assert fingerprint(checkpoint(tmp_path / "a", **change), mode) != before  # type: ignore[arg-type]
    assert fingerprint(checkpoint(tmp_path / "a"), mode) == before  # type: ignore[arg-type]


def test_full_sees_one_byte_that_sampling_may_not(tmp_path: Path) -> None:
    before = fingerprint(checkpoint(tmp_path / "a"), "full")
    edited = bytearray(b"b" * BIG)
    edited[BIG // 2] ^= 1
    assert fingerprint(checkpoint(tmp_path / "a", big=bytes(edited)), "full") != before


def test_a_hub_snapshot_is_named_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = checkpoint(tmp_path / "models--a--b" / "snapshots" / commit)
    assert fingerprint(folder) == f"hub:{commit}"
    assert fingerprint(folder, "full").startswith("f1:")


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * BIG)
    before = fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"y" * BIG)
    assert fingerprint(tmp_path) != before


def test_what_cannot_be_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no weight files"):
        fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage that is no header")
    with pytest.raises(IdentityError, match="no safetensors file"):
        fingerprint(tmp_path)
    checkpoint(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IdentityError, match="truncated"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a": {}}', b'{"a": {"data_offsets": ["x", 1]}}', b'{"a": {"data_offsets": 3}}', b"[" * 5000],
)
def test_a_malformed_header_is_an_error_that_names_the_file(tmp_path: Path, header: bytes) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(IdentityError, match=r"model\.safetensors"):
        fingerprint(folder)
