"""Every key of the configuration with its type, default and meaning, read from the model: the one source of
`kvtier config schema`, of the file that `kvtier init` writes, and of docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvtier.config.explain import known_keys
from kvtier.config.schema import Config


class KeyReference(NamedTuple):
    """A dotted key; `*` stands for a name that the file chooses. `default` is "" where there is none; `sample` is a
    value that may be written: the default, or an example."""

    key: str
    takes: str
    default: str
    meaning: str
    sample: Any


def key_references() -> Iterator[KeyReference]:
    """In the order of the model. Pure."""
    whole = Config.model_json_schema()
    defaults = Config.parse({}).model_dump(mode="json")
    for key in known_keys(Config):
        yield _reference(whole, defaults, key)


def section_meanings() -> dict[str, str]:
    """The purpose of each section, by dotted key. Pure."""
    whole = Config.model_json_schema()
    sections = {key.rpartition(".")[0] for key in known_keys(Config) if "." in key}
    found = {}
    for section in sorted(sections | {each.rpartition(".")[0] for each in sections if "." in each}):
        value = _value(whole, section)
        found[section] = str(value.get("description") or _resolve(whole, value).get("description", ""))
    return found


def _reference(whole: dict[str, Any], defaults: Any, key: str) -> KeyReference:
    value, default = _value(whole, key), defaults
    for word in key.split("."):
        # Below a section that is off there is only the schema's default.
        default = default.get(word, value.get("default", "")) if isinstance(default, dict) else value.get("default", "")
    shown = "" if default in (None, "", {}) else str(default)
    sample = _example(value) if default in (None, "") else default
    return KeyReference(key, _takes(whole, value), shown, str(value.get("description", "")), sample)


def _example(value: dict[str, Any]) -> Any:
    kinds = (value, *value.get("anyOf", ()))
    return next((kind["examples"][0] for kind in kinds if "examples" in kind), "")


def _value(whole: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema of a key."""
    section, value = whole, whole
    for word in key.split("."):
        value = section["additionalProperties"] if word == "*" else section["properties"][word]
        section = _resolve(whole, value)
    return value


def _resolve(whole: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """The section behind a reference, alone or as one of several kinds."""
    for kind in (value, *value.get("anyOf", ())):
        if "$ref" in kind:
            found: dict[str, Any] = whole["$defs"][kind["$ref"].rpartition("/")[2]]
            return found
    return value


def _takes(whole: dict[str, Any], value: dict[str, Any]) -> str:
    if "anyOf" in value and "examples" not in value:
        return " or ".join(takes for kind in value["anyOf"] if (takes := _takes(whole, kind)) != "null")
    if "enum" in value:
        return "|".join(map(str, value["enum"]))
    if "const" in value:
        return str(value["const"])
    if "examples" in value:
        return f"such as {value['examples'][0]}"
    kind = str(value.get("type", ""))
    return f"list of {_takes(whole, value['items'])}" if kind == "array" else {"object": "mapping"}.get(kind, kind)
