"""`kvtier config check|show|schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.output import Json, console, write_json
from kvtier.config import Config
from kvtier.config.explain import known_keys
from kvtier.units import format_size

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="FILE")]


def check(file: File, json: Json = False) -> None:
    """Validate FILE. An error names the key and what to write instead."""
    config = Config.load(file)
    tiers = _tiers(config)
    hints = hints_of(config)
    if json:
        write_json({"valid": True, "tiers": tiers, "hints": hints})
        return
    out = console()
    out.print(f"{file}: right. " + ", ".join(f"{tier} {size}" for tier, size in tiers.items()))
    for hint in hints:
        out.print(f"hint: {hint}")


def show(file: File, json: Json = False) -> None:
    """Print FILE with all defaults filled in and secrets hidden."""
    values = Config.load(file).model_dump(mode="json")
    if json:
        write_json(values)
        return
    import yaml

    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110), end="")


def schema(json: Json = False) -> None:
    """Print every key with its type, default and meaning; with --json as a JSON Schema."""
    whole = Config.model_json_schema()
    if json:
        write_json(whole)
        return
    defaults = Config.parse({}).model_dump(mode="json")
    for key in known_keys(Config):
        print(_described(whole, defaults, key))


def hints_of(config: Config) -> list[str]:
    """Settings that are valid but probably a mistake. Pure."""
    hints = []
    tiers = config.tiers
    if tiers.g3 is None and tiers.g4 is None:
        hints.append("neither g3 nor g4 is set: blocks live in RAM only and nothing survives the process")
    if (
        tiers.g4 is not None
        and config.security.scope_secret is None
        and not tiers.g4.url.startswith(("file:", "memory:"))
    ):
        hints.append(
            "g4 is shared and security.scope_secret is not set: anyone who can list the bucket can test for a salt"
        )
    if tiers.g3 is not None and tiers.g3.capacity < tiers.g2.capacity:
        hints.append("tiers.g3.capacity is below tiers.g2.capacity: the disk cannot hold what RAM holds")
    if tiers.g3 is not None and tiers.g3.write_rate is None and tiers.g3.write_budget is None:
        hints.append("tiers.g3 has no write_rate or write_budget: writes are bounded by the disk alone, also its wear")
    return hints


def _tiers(config: Config) -> dict[str, str]:
    tiers = config.tiers
    held = {"g2": format_size(tiers.g2.capacity)}
    if tiers.g3 is not None:
        held["g3"] = f"{format_size(tiers.g3.capacity)} in {', '.join(map(str, tiers.g3.path))}"
    if tiers.g4 is not None:
        held["g4"] = tiers.g4.url
    return held


def _described(whole: dict[str, Any], defaults: Any, key: str) -> str:
    """One key's type, default and meaning, on two lines."""
    section, value, default = whole, whole, defaults
    for word in key.split("."):
        value = section["additionalProperties"] if word == "*" else section["properties"][word]
        section = _resolve(whole, value)
        # Below a section that is off there is only the schema's default.
        default = default.get(word, value.get("default", "")) if isinstance(default, dict) else value.get("default", "")
    shown = "" if default in (None, "", {}) else f" (default {default})"
    return f"{key}: {_takes(whole, value)}{shown}\n    {value.get('description', '')}"


def _resolve(whole: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """The section behind a reference, alone or as one of several kinds."""
    for kind in (value, *value.get("anyOf", ())):
        if "$ref" in kind:
            found: dict[str, Any] = whole["$defs"][kind["$ref"].rpartition("/")[2]]
            return found
    return value


def _takes(whole: dict[str, Any], value: dict[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(takes for kind in value["anyOf"] if (takes := _takes(whole, kind)) != "null")
    if "enum" in value:
        return "|".join(map(str, value["enum"]))
    if "const" in value:
        return str(value["const"])
    if "examples" in value:
        return f"such as {value['examples'][0]}"
    kind = str(value.get("type", ""))
    return f"list of {_takes(whole, value['items'])}" if kind == "array" else {"object": "mapping"}.get(kind, kind)
