"""Values that the environment gives to a configuration: `${NAME}` in the file, and KVTIER_… beside it.

    scope_secret: ${KVTIER_SECRET}           secrets and values below tiers.g4.options: the name and nothing else
    path: ${SCRATCH}/kvtier                  paths and the bucket's URL: anywhere in the text
    KVTIER_TIERS__G2__CAPACITY=8GiB          replaces tiers.g2.capacity; a value is read as YAML, null is none

All functions are pure: the environment is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.config.strict_yaml import DEPTH_MAX, read_value
from kvtier.config.values import PATH_CHARS_MAX
from kvtier.errors import ConfigError
from kvtier.units import TEXT_CHARS_MAX, shorten

PREFIX = "KVTIER_"
STAND_IN = "0" * 64
"""Of a secret that is not known here: right in length for all of them."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
_SECRETS = ("security.scope_secret", "security.key")
_PLACES = re.compile(r"tiers\.g3\.path(\[\d+\])?|tiers\.g4\.url|security\.(key_file|data_keys)|trace\.socket")


def is_secret(key: str) -> bool:
    """Whether the value of a dotted key is never shown."""
    return key in _SECRETS or key.startswith("tiers.g4.options.")


def substitute(
    value: Any, key: str, environ: Mapping[str, str], absent: dict[str, str] | None = None, depth: int = 0
) -> Any:
    """A copy of `value` with `${NAME}` replaced where it may stand. With `absent`, a secret whose variable is not set
    is STAND_IN, and goes there: key → variable. Raises ConfigError that begins with the key."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"{key[:TEXT_CHARS_MAX]}: nested deeper than {DEPTH_MAX} levels")
    if isinstance(value, Mapping):
        return {k: substitute(v, _join(key, k), environ, absent, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [substitute(v, f"{key}[{i}]", environ, absent, depth + 1) for i, v in enumerate(value)]
    if not isinstance(value, str) or len(value) > PATH_CHARS_MAX or "${" not in value:
        return value

    def named(match: re.Match[str]) -> str:
        if match[1] not in environ and absent is not None and is_secret(key):
            absent[key] = match[1]
            return STAND_IN
        if match[1] not in environ:
            raise ConfigError(f"{key}: the environment variable {match[1]} is not set")
        return environ[match[1]]

    if _PLACES.fullmatch(key):
        return _VARIABLE.sub(named, value)
    if not is_secret(key):
        raise ConfigError(
            f"{key}: {shorten(value)} names an environment variable; only secrets, paths, tiers.g4.url and the values "
            f"of tiers.g4.options may. To set this key from the environment: {PREFIX}{key.upper().replace('.', '__')}"
        )
    match = _VARIABLE.fullmatch(value)
    if match is None:
        raise ConfigError(f"{key}: write ${{NAME}} and nothing else to take the value from the environment")
    return named(match)


def override(
    raw: Mapping[str, Any], environ: Mapping[str, str], sections: Mapping[str, bool]
) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of `raw` with the values of KVTIER_… variables, and which variable gave which dotted key. `sections`: the
    keys at the top, and whether they hold further keys. A variable without `__` that is no key at the top is none of
    ours. Raises ConfigError that begins with the variable."""
    result, given = dict(raw), dict[str, str]()
    for name, words, text in sorted(_overrides(environ, sections)):
        try:
            value = text if is_secret(".".join(words)) else read_value(text)
        except ConfigError as wrong:
            raise ConfigError(f"${name}: {wrong}") from None
        section = result
        for depth, word in enumerate(words[:-1]):
            inner = section.get(word)
            if inner is not None and not isinstance(inner, Mapping):
                raise ConfigError(f"${name}: {'.'.join(words[: depth + 1])} is no section: {shorten(inner)}")
            section[word] = inner = dict(inner or {})
            section = inner
        section[words[-1]] = value
        given[".".join(words)] = f"${name}"
    return result, given


def _overrides(environ: Mapping[str, str], sections: Mapping[str, bool]) -> Iterator[tuple[str, list[str], str]]:
    for name, text in environ.items():
        words = name.removeprefix(PREFIX).lower().split("__")
        if not name.startswith(PREFIX) or (len(words) == 1 and sections.get(words[0], True)):
            continue
        if not sections.get(words[0]) and len(words) > 1:
            known = ", ".join(f"{PREFIX}{each.upper()}__…" for each, holds in sections.items() if holds)
            raise ConfigError(f"${name}: names no section of the configuration; they begin with {known}")
        yield name, words, text


def _join(key: str, name: object) -> str:
    return f"{key}.{str(name)[:TEXT_CHARS_MAX]}".lstrip(".") if isinstance(name, str) else f"{key}.{shorten(name)}"
