"""`kvtier init`: a configuration for this machine, with every key explained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from kvtier.bench.retention.shapes import CacheShape, shape_of
from kvtier.cli.ask import shown
from kvtier.cli.config import tiers_of
from kvtier.cli.doctor_checks import Level, run_checks
from kvtier.cli.machine import LOCAL, mount_of, place_for_cache
from kvtier.cli.output import Json, console, replacing, write_json
from kvtier.config import Config
from kvtier.config.reference import key_references, section_meanings
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.tiers.host.arena import available_bytes
from kvtier.units import format_size

Engine = Literal["vllm", "sglang", "transformers"]
File = Annotated[Path, typer.Argument(help="The YAML file to write.", metavar="[FILE]")]
For = Annotated[Engine | None, typer.Option("--engine", help="Say how this engine is started with the file.")]
Model = Annotated[str | None, typer.Option("--model", help="Directory of a checkpoint, or a shape that `plan` knows.")]
G3Path = Annotated[Path | None, typer.Option("--path", help="Directory of G3; none: on the largest local disk.")]
Preset = Annotated[str | None, typer.Option("--preset", help="A file of configs/ instead, such as shared-s3.")]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]

RAM_SHARE, DISK_SHARE = 0.4, 0.5
G3_MIN = 1 << 30
"""A smaller disk is not worth the wear."""
WRITES_MAX = 999_999
"""Drive writes a day, as a write budget has them."""

STARTS = {
    "vllm": """vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --shutdown-timeout 15 \\
  --kv-transfer-config '{{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {{"kvtier_config": "{file}"}}}}'""",
    "sglang": """python -m sglang.launch_server --model-path MODEL --page-size 64 \\
  --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic \\
  --unified-cache-external-linker-config '{{"linker": "KVTierLinker",
      "linker_module_path": "kvtier.connectors.sglang", "linker_extra_config": {{"kvtier_config": "{file}"}}}}'""",
    "transformers": """import kvtier
from kvtier.connectors.transformers import PrefixCache
with PrefixCache(kvtier.Config.load("{file}"), model) as prefixes: ...""",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes of this machine and the shares that a configuration may take, in bytes; g3_bytes 0: no G3. Drives are rated
    for so many writes of all that they hold: `g3_writes_per_day` of G3's bytes are one of the whole disk."""

    ram_bytes: int
    g2_bytes: int
    g3_path: str
    g3_bytes: int
    disk: str
    kv_bytes_per_token: int
    g3_writes_per_day: int = 1


def init(
    file: File = Path("kvtier.yaml"), engine: For = None, model: Model = None, path: G3Path = None,
    preset: Preset = None, force: Force = False, json: Json = False,
) -> None:  # fmt: skip
    """Measure RAM and disks, write a commented configuration, and run the doctor on it."""
    if file.exists() and not force:
        raise InvalidRequest(f"{file} is there already; name another file, or replace it with --force")
    if not file.parent.is_dir():
        raise InvalidRequest(f"{file}: there is no directory {file.parent}; make it first")
    if preset is not None and (path is not None or model is not None):
        raise InvalidRequest("--preset takes a file as it is, without --path and --model; change its sizes afterwards")
    shape = shape_of(model) if model is not None else None
    found = measure(path, shape)
    write(file, read_preset(preset) if preset is not None else rendered(found, shape))
    config = Config.load(file)
    findings = run_checks(config)
    if json:
        rows = [asdict(each) | {"level": each.level.name.lower()} for each in findings]
        write_json({"file": str(file), "measured": asdict(found), "findings": rows})
    else:
        _show(file, engine, config, found, [each for each in findings if each.level is not Level.OK])
    if any(each.level is Level.FAIL for each in findings):
        raise typer.Exit(1)


def write(file: Path, text: str) -> None:
    """Replace the file if kvtier reads this text. Raises ConfigError; then the file is as it was."""
    written = str(file)
    try:
        with replacing(file) as new:
            written = new.name
            new.write(text)
            new.flush()
            Config.load(new.name)
    except (ConfigError, UnicodeEncodeError) as wrong:
        reason = str(wrong).replace(written, str(file))
        raise ConfigError(f"{file}: nothing was written, since kvtier would not read it: {reason}") from None


def measure(path: Path | None, shape: CacheShape | None) -> Measured:
    """RAM, and the disk below `path` (none: the largest local one). Reads; writes nothing. Raises InvalidRequest for
    a path that is on no local disk."""
    ram, given, path = available_bytes(), path is not None, path and path.expanduser().absolute()
    mount = mount_of(path) if path is not None else None
    if path is not None and mount is None:
        kinds = ", ".join(sorted(LOCAL))
        raise InvalidRequest(f"--path {path} is on no local disk ({kinds}), which G3 needs; name another directory")
    if path is None and (chosen := place_for_cache()) is not None:
        path, mount = chosen
    g3 = _rounded(int(mount.free_bytes * DISK_SHARE)) if mount is not None else 0
    g3 = g3 if g3 >= G3_MIN else 0
    if given and mount is not None and not g3:
        free = f"{mount.free_bytes / 2**30:.1f} GiB"
        raise InvalidRequest(f"--path {path}: {free} are free there, and G3 takes half of 2 GiB at least")
    per_token = shape.bytes_per_token if shape is not None else 0
    writes = min(max(1, mount.whole_bytes // g3), WRITES_MAX) if mount is not None and g3 else 1
    return Measured(
        ram, _rounded(int(ram * RAM_SHARE)), str(path or ""), g3, shown(mount or "", 256), per_token, writes
    )


def read_preset(name: str) -> str:
    """The text of a file of configs/. Raises InvalidRequest that lists them."""
    known = {each.name.removesuffix(".yaml"): each for each in files("kvtier.presets").iterdir()}
    known = {each: place for each, place in known.items() if place.name.endswith(".yaml")}
    if name not in known:
        raise InvalidRequest(f"there is no preset {name[:40]!r}; there are {', '.join(sorted(known))}")
    return known[name].read_text()


def rendered(found: Measured, shape: CacheShape | None) -> str:
    """The YAML text: keys that are set, the others commented out with their defaults. Pure."""
    given: dict[str, Any] = {"version": 1, "tiers.g2.capacity": format_size(found.g2_bytes), "retention.default": "24h"}
    if found.g3_bytes:
        capacity, budget = format_size(found.g3_bytes), f"{found.g3_writes_per_day}DWPD"
        given |= {"tiers.g3.path": found.g3_path, "tiers.g3.capacity": capacity, "tiers.g3.write_budget": budget}
    lines = [
        "# Written by `kvtier init`. Keys behind # show their default, or an example where they have none.",
        "# `kvtier config check` reads this file, `kvtier doctor` tries it on this machine.",
        f"# Measured: {found.ram_bytes / 2**30:.1f} GiB of RAM free; disk {found.disk or 'none'}.",
    ]
    if found.g3_bytes:
        lines.append("# tiers.g3.write_budget lets G3 write as much in a day as the whole disk holds.")
    if shape is not None:
        tokens = " and ".join(
            f"{name} {size // shape.bytes_per_token:,} tokens"
            for name, size in (("G2", found.g2_bytes), ("G3", found.g3_bytes))
            if size
        )
        lines.append(f"# {shape.name}: {shape.bytes_per_token:,} bytes of KV per token; {tokens}.")
    return "\n".join(lines + _keys(given)) + "\n"


def _keys(given: dict[str, Any]) -> list[str]:
    meanings, lines, above = section_meanings(), list[str](), list[str]()
    set_sections = {".".join(key.split(".")[:depth]) for key in given for depth in range(1, key.count(".") + 1)}
    for one in key_references():
        *sections, name = one.key.split(".")
        for depth in range(len(sections)):
            if above[: depth + 1] != sections[: depth + 1]:
                section = ".".join(sections[: depth + 1])
                off = "" if section in set_sections else "# "
                shown = "NAME" if sections[depth] == "*" else sections[depth]
                lines.append(f"{off}{'  ' * depth}{shown}:  # {meanings.get(section, '')}".rstrip(" #"))
        above = sections
        off = "" if one.key in given else "# "
        text = yaml.safe_dump(given.get(one.key, one.sample), default_flow_style=True, width=1000)
        text = text.removesuffix("...\n").strip()
        lines.append(f"{off}{'  ' * len(sections)}{name}: {text}  # {one.meaning}")
    return lines


def _rounded(size: int) -> int:
    """Down to whole GiB, or below that to 64 MiB."""
    unit = 1 << 30 if size >= 1 << 30 else 64 << 20
    return max(64 << 20, size // unit * unit)


def _show(file: Path, engine: Engine | None, config: Config, found: Measured, wrong: list[Any]) -> None:
    out = console()
    tiers = tiers_of(config)
    tiers["g2"] += f" of {found.ram_bytes / 2**30:.1f} GiB free"
    rest = [] if "g3" in tiers else ["no disk for g3"]
    out.print(f"{file}: " + ", ".join([*(f"{tier} {size}" for tier, size in tiers.items()), *rest]))
    for each in wrong:
        out.print(
            f"{each.level.name.lower()}: {each.subject}: {each.detail}" + (f" → {each.advice}" if each.advice else "")
        )
    if engine is not None:
        print(f"\n{STARTS[engine].format(file=file.absolute())}")
