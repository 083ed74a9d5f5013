"""The checks of `kvtier doctor`. Each yields findings; none leaves a change behind."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType

from kvtier.cli.g4 import findings
from kvtier.cli.g4_checks import trust_findings
from kvtier.cli.machine_checks import engine_findings, gpu_findings, process_findings, store_findings
from kvtier.config import G3, Config
from kvtier.tiers.disk.directory import NETWORK_FILE_SYSTEMS, file_system_of
from kvtier.tiers.host.arena import available_bytes
from kvtier.units import format_size

DESCRIPTORS_MIN = 4096
RAM_SHARE = 0.8


class Level(IntEnum):
    """Severity of a finding: FAIL keeps a tier from working, WARN costs speed or safety."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result about `subject`, and the remedy."""

    subject: str
    level: Level
    detail: str
    advice: str = ""


def run_checks(config: Config, absent: Mapping[str, str] = MappingProxyType({})) -> list[Finding]:
    """All checks in order. Touches the directories that `config` names, by temporary files that it removes. `absent`:
    secrets that are not known here, key → variable; no bucket is asked with stand-ins for its credentials."""
    found = [finding for check in CHECKS for finding in check(config)]
    if not any(key.startswith("tiers.g4.options.") for key in absent):
        found += _objects(config)
    for key, name in absent.items():
        advice = f"export {name} to check what depends on it, such as the bucket"
        found.append(Finding(key, Level.WARN, f"the environment variable {name} is not set here", advice))
    return found


def _rows(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[Finding]:
    yield from (Finding(what, Level[level.upper()], found, advice) for what, level, found, advice in rows)


def _beside(config: Config) -> Iterator[Finding]:
    yield from _rows((*engine_findings(), *gpu_findings(), *process_findings()))


def _python(config: Config) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.implementation.name != "cpython":
        yield Finding("python", Level.WARN, f"{sys.implementation.name} {version}", "kvtier is tested on CPython")
    else:
        yield Finding("python", Level.OK, version)


def _kernel(config: Config) -> Iterator[Finding]:
    release = platform.release()
    if not hasattr(os, "memfd_create"):
        yield Finding("kernel", Level.FAIL, f"{platform.system()} {release}: no memfd", "G2 needs Linux 3.17 or later")
        return
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < (5, 14):
        advice = "MADV_POPULATE_WRITE needs Linux 5.14; without it a shortage of RAM shows late"
        yield Finding("kernel", Level.WARN, release, advice)
    else:
        yield Finding("kernel", Level.OK, release)


def _memory(config: Config) -> Iterator[Finding]:
    wanted = config.tiers.g2.capacity
    free = available_bytes()
    detail = f"g2 wants {format_size(wanted)}, {free / 2**30:.1f} GiB are available"
    if wanted > free:
        yield Finding("memory", Level.FAIL, detail, "set tiers.g2.capacity lower")
    elif wanted > free * RAM_SHARE:
        yield Finding("memory", Level.WARN, detail, "leave memory for the engine and the page cache")
    else:
        yield Finding("memory", Level.OK, detail)


def _descriptors(config: Config) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_MIN
    advice = f"raise it to {DESCRIPTORS_MIN} or more (ulimit -n)" if low else ""
    yield Finding("descriptors", Level.WARN if low else Level.OK, f"at most {soft} open files", advice)


def _disk(config: Config) -> Iterator[Finding]:
    if config.tiers.g3 is None:
        yield Finding("g3", Level.OK, "off")
        return
    for path in config.tiers.g3.path:
        try:
            yield from _directory(path, config.tiers.g3)
            yield from _rows(store_findings(path))
        except OSError as wrong:
            advice = "name another directory, or give the engine's user the right to it and to those above it"
            yield Finding(f"g3 {path}", Level.FAIL, f"cannot be looked into: {wrong.strerror}", advice)


def _directory(path: Path, g3: G3) -> Iterator[Finding]:
    subject = f"g3 {path}"
    place = path if path.exists() else path.parent
    if not place.is_dir():
        yield Finding(subject, Level.FAIL, f"{place} is not a directory", "create it, on a local SSD")
        return
    kind = file_system_of(place)
    if kind in NETWORK_FILE_SYSTEMS:
        advice = "LMDB is not safe on network file systems: use a local disk, and tiers.g4 for shared storage"
        yield Finding(subject, Level.FAIL, f"the file system is {kind}", advice)
        return
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".kvtier-doctor-") as probe:
            direct = _takes_direct_io(Path(probe.name))
    except OSError as wrong:
        yield Finding(
            subject, Level.FAIL, f"cannot be written: {wrong.strerror}", "give the engine's user write permission"
        )
        return
    stat = os.statvfs(place)
    free, wanted = stat.f_bavail * stat.f_frsize, g3.capacity // len(g3.path)
    held = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    detail = f"{kind}, {free / 2**30:.1f} GiB free, {format_size(wanted)} wanted here"
    if wanted > free + held:
        yield Finding(subject, Level.FAIL, detail, "set tiers.g3.capacity lower, or free space")
    elif not direct:
        advice = "no O_DIRECT here: reads and writes go through the page cache and compete for RAM"
        yield Finding(subject, Level.WARN, detail, advice)
    else:
        yield Finding(subject, Level.OK, detail)


def _takes_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _objects(config: Config) -> Iterator[Finding]:
    g4 = config.tiers.g4
    if g4 is None:
        yield Finding("g4", Level.OK, "off")
        yield from _rows(trust_findings(config))
        return
    scheme = g4.url.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        yield Finding("g4", Level.OK, f"{scheme}:// through fsspec")
    elif any(importlib.util.find_spec(name) for name in (("s3fs", "obstore") if g4.client == "auto" else (g4.client,))):
        yield Finding("g4", Level.OK, f"{scheme}:// with client {g4.client}")
    else:
        yield Finding("g4", Level.FAIL, f"no client for {scheme}:// is installed", "pip install 'kvtier[s3]'")
    asked = (*trust_findings(config), *findings(g4))
    yield from _rows(asked)
    if config.security.scope_secret is None and scheme not in ("file", "memory"):
        advice = "set security.scope_secret, the same on every replica"
        yield Finding(
            "g4 scopes", Level.WARN, "without a secret, anyone who can list the store can test for a salt", advice
        )


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (_python, _kernel, _beside, _memory, _descriptors, _disk)
"""One function per subject, in the order in which they are shown; the bucket follows."""
