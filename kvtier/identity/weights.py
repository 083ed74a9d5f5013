"""Fingerprint of a checkpoint, which tells apart two sets of weights at one path.

    hub snapshot   "hub:" + the commit, when the files lie in …/snapshots/<40 hex digits>/
    sampled        "s1:" + SHA-256 over config files, and of every weight file: its name, size, header, and of
                   every tensor 4 KiB at an offset drawn from its name (all of it below 64 KiB)
    full           "f1:" + SHA-256 over config files and all bytes of all weight files

Sampling reads a few MiB of a 100 GB checkpoint and sees any retraining, since that moves every tensor; an
edit of a few values inside one large tensor needs `full`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import BinaryIO, Literal

from kvtier.errors import IdentityError

Mode = Literal["auto", "sampled", "full"]

_SAMPLE_BYTES = 4096
_WHOLE_TENSOR_BYTES = 65536
_HEADER_BYTES_MAX = 512 * 1024 * 1024
_CONFIGS = (
    "config.json",
    "quantization_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})$")


def fingerprint(path: str | os.PathLike[str], mode: Mode = "auto") -> str:
    """Name the weights in the directory `path` (or the one file). Reads; writes nothing.

    `auto` takes the hub commit if there is one, else samples. Raises IdentityError when there is no
    weight file or a header cannot be parsed: unknown weights must not be shared.
    """
    where = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a snapshot's links to blobs
    if mode == "auto" and (found := _SNAPSHOT.search(where.as_posix())):
        return f"hub:{found[1]}"
    files = [where] if where.is_file() else sorted(p for p in where.glob("*") if p.suffix in _WEIGHTS)
    if not files:
        raise IdentityError(f"no weight files ({', '.join(_WEIGHTS)}) at {where}: cannot name these weights")
    digest = hashlib.sha256(b"kvtier-weights-1")
    folder = where if where.is_dir() else where.parent
    for name in _CONFIGS:
        if (folder / name).is_file():
            _feed(digest, name.encode(), (folder / name).read_bytes())
    for file in files:
        _feed(digest, file.name.encode(), file.stat().st_size.to_bytes(8, "little"))
        if mode == "full":
            with file.open("rb") as stream:
                _feed(digest, b"sha256", hashlib.file_digest(stream, "sha256").digest())
        elif file.suffix == ".safetensors":
            _sample_tensors(digest, file)
        else:
            _sample_file(digest, file)
    return ("f1:" if mode == "full" else "s1:") + digest.hexdigest()


def _feed(digest: hashlib._Hash, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _sample_tensors(digest: hashlib._Hash, file: Path) -> None:
    """Format: u64 header length, JSON {name: {dtype, shape, data_offsets}}, data (safetensors README)."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_HEADER_BYTES_MAX, file.stat().st_size):
            raise IdentityError(f"{file} is no safetensors file: header of {length} bytes")
        header = stream.read(length)
        try:
            tensors = {
                name: tuple(int(x) for x in entry["data_offsets"])
                for name, entry in json.loads(header).items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise IdentityError(f"{file} is no safetensors file: {error}") from None
        _feed(digest, header)
        for name in sorted(tensors):
            begin, end = tensors[name]
            _feed(digest, name.encode(), _sample(stream, 8 + length + begin, end - begin, name))


def _sample_file(digest: hashlib._Hash, file: Path) -> None:
    """A format without an index that can be read safely: head, tail and one sample in every 4 MiB."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for start in range(0, max(size, 1), 4 * 1024 * 1024):
            _feed(digest, _sample(stream, start, min(4 * 1024 * 1024, size - start), f"{start}"))
        _feed(digest, _read(stream, max(0, size - _WHOLE_TENSOR_BYTES), min(size, _WHOLE_TENSOR_BYTES)))


def _sample(stream: BinaryIO, start: int, length: int, name: str) -> bytes:
    if length <= _WHOLE_TENSOR_BYTES:
        return _read(stream, start, length)
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return _read(stream, start + drawn % (length - _SAMPLE_BYTES), _SAMPLE_BYTES)


def _read(stream: BinaryIO, start: int, length: int) -> bytes:
    stream.seek(start)
    raw = stream.read(length)
    if len(raw) != length:
        raise IdentityError(f"{stream.name} ends at {start + len(raw)}, expected {start + length}: truncated")
    return raw
