"""The arguments that an engine hands to its connector: `kvtier_config`, `model`, `weights`, and the connector's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.config import Config, config_file
from kvtier.errors import ConfigError
from kvtier.units import parse_duration, shorten


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of every connector. `model` and `weights` replace what would be derived; "" derives."""

    config: Config
    model: str = ""
    weights: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], more: Sequence[str] = ()) -> Settings:
        """From the engine's extra configuration: `kvtier_config` (path of the YAML file, or the mapping; else the
        file that KVTIER_CONFIG names, else the defaults), `model`, `weights`; `more` are keys that the connector
        reads itself. Reads the file. Raises ConfigError, also for an unknown key."""
        known = {"kvtier_config", "model", "weights", *more}
        if unknown := sorted(set(extra) - known):
            raise ConfigError(f"connector argument {shorten(unknown[0])} is unknown; known: {', '.join(sorted(known))}")
        given = extra.get("kvtier_config", config_file() or {})
        if isinstance(given, str):
            config = Config.load(given)
        elif isinstance(given, Mapping):
            config = Config.parse(given)
        else:
            raise ConfigError(
                "connector argument kvtier_config must be the path of kvtier's YAML file or its content, got "
                f"{shorten(given)}"
            )
        texts = {name: extra.get(name, "") for name in ("model", "weights")}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ConfigError(f"connector argument {name} must be a text, got {shorten(value)}")
        return cls(config, **texts)


def seconds_of(extra: Mapping[str, Any], name: str, default_s: float) -> float:
    """The argument `name`: a number of seconds, or a text such as 200ms. Raises InvalidRequest."""
    value = extra.get(name)
    if value is None:
        return default_s
    return float(value) if isinstance(value, int | float) else parse_duration(value)


def weighs_loads(extra: Mapping[str, Any]) -> bool:
    """The argument `recompute`: whether a load is weighed against prefill (auto) or always made (never). Raises
    ConfigError."""
    recompute = extra.get("recompute", "auto")
    if recompute not in ("auto", "never"):
        raise ConfigError(f"connector argument recompute must be auto or never, got {shorten(recompute)}")
    return bool(recompute == "auto")
