"""Types of the configuration's values: how each is read from YAML, written back, and described in the JSON Schema."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, SecretStr, WithJsonSchema

from kvtier.errors import InvalidRequest
from kvtier.units import (
    TEXT_CHARS_MAX,
    format_duration,
    format_size,
    parse_duration,
    parse_endurance,
    parse_rate,
    parse_size,
    plain,
    shorten,
)

PATH_CHARS_MAX = 4096
SOCKET_BYTES_MAX = 107
"""Of a Unix socket's path, as Linux has it."""

KEY_FILE, DATA_KEYS, SOCKET = "/etc/kvtier/keys.yaml", "/var/lib/kvtier/data-keys", "/run/kvtier/trace.sock"  # examples
SECONDS_MAX = 10 * 365 * 86400
PRICES = {"put": 0.005, "get": 0.0004, "gb_month": 0.023}
"""List prices of S3 Standard in us-east-1: dollars per 1,000 PUT, COPY and LIST requests, per 1,000 others, per GB
and month."""
PRICE_MAX = 1e6


def _duration(value: Any) -> float:
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise InvalidRequest(f"{shorten(value)} is not a duration; write a number with a unit, such as 24h")
    seconds = parse_duration(value)
    if not 0 < seconds <= SECONDS_MAX:
        raise InvalidRequest(f"{shorten(value)} is out of range; a duration lies above 0 and at most 10 years")
    return seconds


def _text(value: Any, chars_max: int = PATH_CHARS_MAX) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > chars_max or not value.isprintable():
        raise InvalidRequest(f"{shorten(value)} is not a text of 1 … {chars_max} printable characters")
    return value


def _paths(value: Any) -> tuple[Path, ...]:
    given = list(value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(given) <= 64:
        raise InvalidRequest("write one directory, or a list of 1 … 64, such as [/nvme0/kvtier, /nvme1/kvtier]")
    paths = tuple(Path(_text(str(p) if isinstance(p, Path) else p)) for p in given)
    if any(p.parts[:1] and p.parts[0].startswith("~") for p in paths):
        raise InvalidRequest(f"{shorten(str(paths[0]))}: ~ is not expanded; write the full path, such as /nvme/kvtier")
    if len(set(paths)) != len(paths):
        raise InvalidRequest("the same directory is listed twice")
    return paths


def _full_path(example: str, bytes_max: int | None = None) -> BeforeValidator:
    """A path that does not depend on where the process was started; `bytes_max`: of a socket."""

    def read(value: Any) -> Path:
        path = Path(_text(str(value) if isinstance(value, Path) else value))
        if not path.is_absolute():
            raise InvalidRequest(f"{shorten(str(path))}: write the full path, such as {example}")
        if bytes_max is not None and (size := len(os.fsencode(path))) > bytes_max:
            raise InvalidRequest(
                f"{shorten(str(path))} has {size} bytes; a socket's path has at most {bytes_max}, such as {example}"
            )
        return path

    return BeforeValidator(read)


def _plugin(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", value, re.ASCII):
        raise InvalidRequest(f"{shorten(value)} is not the name of a plug-in, such as vault")
    return value


def _url(value: Any) -> str:
    from fsspec import available_protocols  # only a configuration with G4 needs it

    url = _text(value, 2048)
    scheme, found, rest = url.partition("://")
    if "@" in url and not url.startswith("file:///"):  # before anything is shown; a secret may hold a slash
        raise InvalidRequest(
            "the URL carries credentials, or another '@'; leave them to the client's own chain or use tiers.g4.options"
        )
    if not found or not re.fullmatch(r"[a-z0-9][a-z0-9+.-]*", scheme, re.ASCII) or "::" in url:
        raise InvalidRequest(f"{shorten(url)} is not a URL; write one that fsspec knows, such as s3://bucket/prefix")
    if scheme not in (known := available_protocols()):
        near = difflib.get_close_matches(scheme, known, 1, 0.5)
        meant = f"; did you mean {near[0]}://?" if near else ", such as s3, gs, abfs, file"
        raise InvalidRequest(f"{shorten(url)}: {scheme}:// is no protocol that fsspec knows{meant}")
    if not rest.strip("/") and scheme != "memory":
        raise InvalidRequest(f"{shorten(url)} names no bucket or directory; write one, such as s3://bucket/prefix")
    if ".." in rest.split("/"):
        raise InvalidRequest(f"{shorten(url)} leaves its own prefix with '..'; write the prefix itself")
    return url.rstrip("/") if rest.strip("/") else url


def _count_or_auto(value: Any) -> int | Literal["auto"]:
    if value == "auto" or (type(value) is int and 1 <= value <= 2**20):
        return value  # type: ignore[no-any-return]
    raise InvalidRequest(f"{shorten(value)} is neither auto nor a count of blocks in 1 … {2**20}")


def _prices(value: Any) -> dict[str, float]:
    """Dollars by name, what is not named at its default."""
    if not isinstance(value, Mapping) or not all(
        name in PRICES and type(price) in (int, float) and 0 <= price <= PRICE_MAX for name, price in value.items()
    ):
        raise InvalidRequest(
            f"{shorten(value)} is no list of prices; write dollars per 1,000 requests and per GB and month, such as "
            f"{{put: {PRICES['put']}, get: {PRICES['get']}, gb_month: {PRICES['gb_month']}}}"
        )
    return PRICES | {name: float(price) for name, price in value.items()}


def _secret(value: Any) -> SecretStr:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    # 64 bytes is the longest key that BLAKE2b takes.
    if not isinstance(text, str) or not 16 <= len(text) <= 64 or len(text.encode(errors="replace")) > 64:
        raise InvalidRequest("a secret is a text of 16 … 64 bytes, such as ${KVTIER_SECRET}")
    return SecretStr(text)


def _version(value: Any) -> int:
    if type(value) is not int or value != 1:
        raise InvalidRequest(f"{shorten(value)} is not a version that this release reads; write 1")
    return value


def _schema(kind: str | list[str], example: object) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, "examples": [example]})


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, when_used="json"),
    _schema(["string", "integer"], "64GiB"),
]
Rate = Annotated[
    int,
    BeforeValidator(parse_rate),
    PlainSerializer(lambda rate: f"{format_size(rate)}/s", when_used="json"),
    _schema("string", "500MiB/s"),
]
Prices = Annotated[dict[str, float], BeforeValidator(_prices), _schema("object", {"put": 0.005})]
Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, when_used="json"),
    _schema("string", "24h"),
]
Endurance = Annotated[
    float,
    BeforeValidator(parse_endurance),
    PlainSerializer(lambda dwpd: f"{plain(dwpd)}DWPD", when_used="json"),
    _schema("string", "3DWPD"),
]
CountOrAuto = Annotated[
    int | Literal["auto"],
    BeforeValidator(_count_or_auto),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
]
Paths = Annotated[
    tuple[Path, ...],
    BeforeValidator(_paths),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "examples": ["/nvme/kvtier"]}
    ),
]
File = Annotated[Path, _full_path(KEY_FILE), _schema("string", KEY_FILE)]
Folder = Annotated[Path, _full_path(DATA_KEYS), _schema("string", DATA_KEYS)]
Socket = Annotated[Path, _full_path(SOCKET, SOCKET_BYTES_MAX), _schema("string", SOCKET)]
Plugin = Annotated[str, BeforeValidator(_plugin), _schema("string", "vault")]
Version = Annotated[int, BeforeValidator(_version), WithJsonSchema({"const": 1})]
Url = Annotated[str, BeforeValidator(_url), _schema("string", "s3://bucket/prefix")]
Secret = Annotated[SecretStr, BeforeValidator(_secret), _schema("string", "${KVTIER_SECRET}")]
Key = Annotated[SecretStr, BeforeValidator(_secret), _schema("string", "${KVTIER_KEY}")]
