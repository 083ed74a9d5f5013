"""`kvtier config check|show|schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.output import Json, console, write_json
from kvtier.config import Config
from kvtier.config.reference import key_references
from kvtier.units import format_size

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="FILE")]


def check(file: File, json: Json = False) -> None:
    """Validate FILE. An error names the key and what to write instead."""
    config = Config.load(file)
    tiers = tiers_of(config)
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
    if json:
        write_json(Config.model_json_schema())
        return
    for one in key_references():
        print(f"{one.key}: {one.takes}{f' (default {one.default})' if one.default else ''}\n    {one.meaning}")


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


def tiers_of(config: Config) -> dict[str, str]:
    """Tier → its size and place, for people. Pure."""
    tiers = config.tiers
    held = {"g2": format_size(tiers.g2.capacity)}
    if tiers.g3 is not None:
        held["g3"] = f"{format_size(tiers.g3.capacity)} in {', '.join(map(str, tiers.g3.path))}"
    if tiers.g4 is not None:
        held["g4"] = tiers.g4.url
    return held
