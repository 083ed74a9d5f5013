"""The fields that must be equal for two deployments' bytes to be interchangeable.

    digest = SHA-256("kvtier-namespace-1" ‖ canonical JSON of all fields but an empty `engine`)

(canonical: keys sorted, ASCII, no spaces)

A wrong field serves one model's KV to another; a missing one does so silently. So fields that only the caller can know
have no default, and unknown fields are refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from kvtier.errors import IdentityError

FORMAT_VERSION = 1
_REFUSED_WORDS = frozenset({"", "unknown", "none", "auto", "null", "?"})


@dataclass(frozen=True)
class Namespace:
    """The identity of a store's bytes. Frozen; equal digests mean interchangeable bytes.

    Required:
        model          logical name, never a path (a path names different weights over time)
        weights        fingerprint of the weights: `kvtier.identity.weights.fingerprint(path)`, or an id you vouch for
        dtype          element type of the KV bytes: "bfloat16", "float16", "float32", "fp8_e4m3", …
        layout         name of the byte order inside a block, such as "L2HND" (layers, K/V, heads, tokens, dim)
        block_tokens   tokens per block
        block_bytes    bytes per block, all layers and all ranks that one manager serves

    With natural defaults, in the digest all the same:
        layers         half-open range of layers held, "0:32"; "all" where the whole model is
        kv_heads, head_size     per rank; 0 where the layout has no such notion
        rank, ranks    which share of a block these bytes are, of how many (0 of 1: the whole block)
        ranks_served   how many ranks' pieces are gathered into one block, in rank order
        tp, pp, cp     shape of the parallel run
        group          kind of KV group: "full", "sliding:1024", "mla", …
        quantization   KV quantisation scheme, "" for none
        scales         digest of static scale *values*; required with a quantisation that has them
        rope           RoPE parameters that change the bytes (theta, scaling), as canonical text
        hash_algorithm, hash_version    whose block hashes name the blocks
        epoch          "" or a random word set after an in-place weight update
        engine         canonical JSON of the engine's configuration by dotted name, minus what is known not to change
                       the bytes; "" where there is none, and then it is not part of the digest
    """

    model: str
    weights: str
    dtype: str
    layout: str
    block_tokens: int
    block_bytes: int
    layers: str = "all"
    kv_heads: int = 0
    head_size: int = 0
    rank: int = 0
    ranks: int = 1
    ranks_served: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    group: str = "full"
    quantization: str = ""
    scales: str = ""
    rope: str = ""
    hash_algorithm: str = "kvtier-sha256"
    hash_version: str = "1"
    epoch: str = ""
    engine: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            wanted = int if spec.type == "int" else str
            if type(value) is not wanted:
                raise IdentityError(
                    f"namespace.{spec.name} must be {wanted.__name__}, got {type(value).__name__} {value!r}"
                )
        for name in ("model", "weights", "dtype", "layout"):
            if getattr(self, name).strip().lower() in _REFUSED_WORDS:
                raise IdentityError(
                    f"namespace.{name} is {getattr(self, name)!r}: say what it is; kvtier never guesses identity"
                )
        if self.model.startswith(("/", "./", "../", "~")):
            raise IdentityError(
                f"namespace.model is the path {self.model!r}: use a logical name; "
                "the weights' fingerprint tells two checkpoints at one path apart"
            )
        for name in ("block_tokens", "block_bytes", "ranks", "ranks_served", "tp", "pp", "cp"):
            if getattr(self, name) < 1:
                raise IdentityError(f"namespace.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.ranks:
            raise IdentityError(f"namespace.rank must lie in 0 … ranks-1 = {self.ranks - 1}, got {self.rank}")
        if self.block_bytes % self.ranks_served:
            raise IdentityError(
                f"namespace.block_bytes {self.block_bytes} does not divide among ranks_served {self.ranks_served}"
            )
        if self.quantization and self.scales == "dynamic":
            raise IdentityError(
                "namespace.scales is 'dynamic': scales computed at run time are not part of the stored bytes, "
                "so blocks of two requests are not interchangeable; use static scales or an unquantised KV cache"
            )

    def fields(self) -> dict[str, str | int]:
        """All fields by name, but an empty `engine`: releases that did not know the field read and write the rest."""
        named = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return named if self.engine else {name: value for name, value in named.items() if name != "engine"}

    @cached_property
    def digest(self) -> bytes:
        """32 bytes; equal if and only if all fields are."""
        text = json.dumps(self.fields(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(b"kvtier-namespace-1" + text.encode("ascii")).digest()

    def rotated(self, epoch: str) -> Namespace:
        """This namespace after an in-place weight update: equal but for `epoch`."""
        return Namespace(**{**self.fields(), "epoch": epoch})  # type: ignore[arg-type]

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Namespace:
        """From a mapping, as stored next to a G3 index. Raises IdentityError naming an unknown or missing field."""
        known = {spec.name for spec in fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise IdentityError(f"namespace.{unknown[0]} is not a field; known: {', '.join(sorted(known))}")
        missing = [name for name in _REQUIRED if name not in raw]
        if missing:
            raise IdentityError(f"namespace.{missing[0]} is required")
        return cls(**raw)


_REQUIRED = ("model", "weights", "dtype", "layout", "block_tokens", "block_bytes")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two namespaces differ."""

    field: str
    left: str | int
    right: str | int


def explain(left: Namespace, right: Namespace) -> list[Difference]:
    """The fields that keep two namespaces apart, in field order; empty if they are one. Fields of the engine's
    configuration have its dotted names below `engine`, and "absent" where one side lacks them. Pure."""
    a, b = left.fields(), right.fields()
    ours, theirs = (_engine_fields(str(side.pop("engine", ""))) for side in (a, b))
    found = [Difference(name, a[name], b[name]) for name in a if a[name] != b[name]]
    for name in sorted({**ours, **theirs}):
        pair = [side.get(name, "absent") for side in (ours, theirs)]
        if pair[0] != pair[1]:
            found.append(Difference(f"engine.{name}", *pair))
    return found


def _engine_fields(text: str) -> dict[str, str]:
    """The parts of the field `engine` by name; the whole where it is no JSON object."""
    try:
        raw = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        return {"": text}
    return {name: json.dumps(value) for name, value in raw.items()}
