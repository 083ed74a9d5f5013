"""The arguments that an engine hands to its connector: `kvtier_config`, `model`, `weights`, and the connector's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config import Config, config_file
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.units import parse_duration, parse_size, shorten

Reader = Callable[[Any], Any]
"""Takes an argument's value; returns what it means, or raises InvalidRequest."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of every connector. `model` and `weights` replace what would be derived; "" derives. `own`: those of
    one connector alone, that were given. `source`: the file that `config` was read from, absolute."""

    config: Config
    model: str = ""
    weights: str = ""
    own: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any], own: Mapping[str, Reader] | None = None) -> Settings:
        """From the engine's extra configuration: `kvtier_config` (path of the YAML file, or the mapping; else the
        file that KVTIER_CONFIG names, else the defaults), `model`, `weights`; `own` reads those of the connector.
        Reads the file. Raises ConfigError, also for an unknown key."""
        own = own or {}
        known = {"kvtier_config", "model", "weights", *own}
        if unknown := sorted(set(extra) - known):
            raise ConfigError(f"connector argument {shorten(unknown[0])} is unknown; known: {', '.join(sorted(known))}")
        given = extra.get("kvtier_config", config_file() or None)
        if given is None and "kvtier_config" not in extra:
            config = Config.from_environment()
        elif isinstance(given, str):
            config = Config.load(given)
        elif isinstance(given, Mapping):
            config = Config.parse(given)
        else:
            raise ConfigError(
                "connector argument kvtier_config must be the path of kvtier's YAML file or its content, got "
                f"{shorten(given)}"
            )
        readers = {"model": text, "weights": text, **own}
        values = {
            name: _read(name, readers[name], value)
            for name, value in extra.items()
            if name in readers and value is not None
        }
        common = {name: values.pop(name, "") for name in ("model", "weights")}
        return cls(config, **common, own=values, source=Path(given).absolute() if isinstance(given, str) else None)


def _read(name: str, reader: Reader, value: Any) -> Any:
    try:
        return reader(value)
    except InvalidRequest as wrong:
        raise ConfigError(f"connector argument {name} {wrong}") from None


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"must be a text, got {shorten(value)}")
    return value


def seconds(value: Any) -> float:
    """A number of seconds, or a text such as 200ms."""
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _SECONDS_MAX:
        raise InvalidRequest(f"must be a number of seconds or a text such as 200ms, got {shorten(value)}")
    return float(value)


_SECONDS_MAX = 1e9  # no wait without an end


def size(value: Any) -> int:
    """A number of bytes, or a text such as 64MiB."""
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and value <= 0):
        raise InvalidRequest(f"must be a size such as 64MiB, got {shorten(value)}")
    return parse_size(value)


def size_or_none(value: Any) -> int:
    """The same, or 0: nothing."""
    return 0 if value in (0, "0") and not isinstance(value, bool) else size(value)


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"must be true or false, got {shorten(value)}")
    return value


def port(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 16:
        raise InvalidRequest(f"must be a port, 1 to 65535, got {shorten(value)}")
    return value


def recompute(value: Any) -> str:
    """Whether a load is weighed against prefill (auto) or always made (never)."""
    if value not in ("auto", "never"):
        raise InvalidRequest(f"must be auto or never, got {shorten(value)}")
    return str(value)
