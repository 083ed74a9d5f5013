"""The doctor's checks of who is believed in a bucket, and of what its own rules do to control objects."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier.config import G4, Config
from kvtier.errors import ConfigError

Row = tuple[str, str, str, str]
"""(subject, "ok" | "warn" | "fail", what was found, advice)"""

_LOCAL = ("file", "memory")


def trust_findings(config: Config) -> Iterator[Row]:
    """Whether the keys can be used; whether the bucket keeps versions of what nobody can tell from forgeries; whether a
    lifecycle rule deletes purges or pins. Asks the bucket, if it is an S3 one and s3fs is installed."""
    g4, security = config.tiers.g4, config.security
    if g4 is None and security.key_file is None and security.key is None and security.kms is None:
        return
    scheme, _, place = (g4.url if g4 is not None else "").partition("://")
    try:
        keyring = config.keyring()
    except ConfigError as wrong:
        yield "keys", "fail", str(wrong), "see docs/operations.md, Keys"
        return
    if keyring.trusted:
        yield "keys", "ok", f"{len(keyring.keys)}, {keyring.active.id.hex()} is active", ""
        if importlib.util.find_spec("cryptography") is None:
            yield "keys", "fail", "the cryptography package is missing", "pip install 'kvtier[crypto]'"
        yield from _data_key_findings(security.data_keys)
    else:
        level = "ok" if scheme in _LOCAL else "warn"
        yield "keys", level, "local trust: whoever may write to the bucket is believed", "set security.key_file"
    if g4 is not None and scheme in ("s3", "s3a"):
        bucket, _, prefix = place.partition("/")
        if not prefix.strip("/"):
            advice = "give kvtier a prefix of its own: s3://bucket/prefix"
            yield "g4 prefix", "fail", "the URL has none, and other objects may lie beside kvtier's", advice
        yield from _bucket_findings(g4, bucket, prefix.strip("/"), keyring.trusted)


def _data_key_findings(folder: Path | None) -> Iterator[Row]:
    """Whether the directory of data keys can be used, or made with the first block. Changes nothing."""
    from kvtier.tiers.key_directory import KeyDirectory

    if folder is None:
        return
    try:
        if folder.is_dir():
            KeyDirectory(folder)
            yield "data keys", "ok", f"in {folder}", ""
        elif folder.parent.is_dir():
            yield "data keys", "ok", f"{folder} will be made", ""
        else:
            yield "data keys", "fail", f"security.data_keys: {folder.parent} is not a directory", "create it"
    except (ConfigError, OSError) as wrong:
        yield "data keys", "fail", str(wrong), "see docs/operations.md, Encryption"


def _bucket_findings(g4: G4, bucket: str, prefix: str, trusted: bool) -> Iterator[Row]:
    ask = _asker(g4, bucket)
    if ask is None:
        return
    versioning = ask("get_bucket_versioning")
    versions = (versioning or {}).get("Status") == "Enabled"
    if versions and not trusted:
        advice = "set security.key_file, or switch versioning off"
        yield "g4 versions", "fail", "the bucket keeps what a purge deletes, for whoever may read versions", advice
    elif versions:
        yield "g4 versions", "warn", "the bucket keeps what a purge deletes", "expire noncurrent versions soon"
    if versioning is not None:  # else it is not permitted to ask
        yield from _lock_findings(ask("get_object_lock_configuration"), trusted)
    control = f"{prefix}/ctl/" if prefix else "ctl/"
    for rule in (ask("get_bucket_lifecycle_configuration") or {}).get("Rules", []):
        if _expires(rule) and _touches(_prefix_of(rule), control):
            name = str(rule.get("ID", ""))[:64]
            advice = "restrict it, or put kvtier's own by: kvtier g4 lifecycle --apply"
            yield "g4 lifecycle", "fail", f"the rule {name!r} deletes purges and pins", advice


def _lock_findings(answer: Mapping[str, Any] | None, trusted: bool) -> Iterator[Row]:
    """About the bucket's Object Lock (WORM)."""
    lock = (answer or {}).get("ObjectLockConfiguration", {})
    if lock.get("ObjectLockEnabled") != "Enabled":
        if trusted:
            text = "none: who deletes the purge log is found out by replicas that have read it, not by new ones"
            yield "g4 Object Lock", "ok", text, "a lock on what lies below ctl/…/log/ keeps it"
        return
    kept = lock.get("Rule", {}).get("DefaultRetention", {})
    if kept:
        text = f"every object is kept for {_period(kept)}: purged and expired blocks stay as versions, and cost space"
        yield "g4 Object Lock", "warn", text, "no default retention; lock what lies below ctl/…/log/ alone"
    else:
        yield "g4 Object Lock", "ok", "enabled, without a default retention", ""


def _period(retention: Mapping[str, Any]) -> str:
    return next((f"{retention[unit]} {unit.lower()}" for unit in ("Days", "Years") if unit in retention), "some time")


def _asker(g4: G4, bucket: str) -> Callable[[str], Mapping[str, Any] | None] | None:
    """Calls a verb of the bucket; what is not permitted or not known there is None."""
    if importlib.util.find_spec("s3fs") is None:
        return None
    import s3fs

    def ask(verb: str) -> Mapping[str, Any] | None:
        try:
            fs = s3fs.S3FileSystem(skip_instance_cache=True, **g4.options)
            answer: Mapping[str, Any] = fs.call_s3(verb, Bucket=bucket)
            return answer
        except Exception:  # of a library, about a question that many servers do not answer
            return None

    return ask


def _expires(rule: Mapping[str, Any]) -> bool:
    return rule.get("Status") == "Enabled" and "Expiration" in rule


def _prefix_of(rule: Mapping[str, Any]) -> str:
    """What the rule's names begin with; rules with tags cover fewer, and are taken for the prefix alone."""
    found = rule.get("Filter") or {}
    return str(found.get("Prefix", (found.get("And") or {}).get("Prefix", rule.get("Prefix", ""))))


def _touches(covered: str, control: str) -> bool:
    return control.startswith(covered) or covered.startswith(control)
