"""`kvtier g4 …` and the doctor's part about object storage."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.output import Json, console, write_json
from kvtier.clock import SystemClock
from kvtier.config import G4, Config
from kvtier.errors import ConfigError, TierError
from kvtier.retention.terms import Depth, Terms
from kvtier.tiers.objects.bucket.conformance import SKEW_MAX_S, ConformanceReport, probe_conformance
from kvtier.tiers.objects.bucket.open import BucketLimits, open_bucket
from kvtier.tiers.objects.bucket.retry import RetryingBucket

RULE = "kvtier-backstop"
_DAY_S = 86400.0
_BYTES_PER_TOKEN_8B = 128 << 10
_PREFILL_8B = 10_000
"""Tokens per second that an 8B model prefills on a large GPU."""

PARALLEL_MAX = 8
_REACH = "check the URL, the endpoint, and the credentials in the client's chain and their right to get and put"
_GRANT = "grant get, put, delete and list below the prefix, or see why the server refuses"

File = Annotated[Path, typer.Argument(help="The YAML file.", metavar="CONFIG")]
Apply = Annotated[bool, typer.Option("--apply", help="Add the rules to the bucket and keep its other rules.")]


def probe_bucket(g4: G4) -> ConformanceReport:
    """Probe the configured bucket. Raises ConfigError or TierError; blocks for a minute at most."""

    async def run() -> ConformanceReport:
        clock = SystemClock()
        bucket, prefix = open_bucket(g4.url, g4.options, g4.client, clock, BucketLimits(concurrency=g4.concurrency))
        await bucket.start()
        try:
            retrying = RetryingBucket(bucket, attempts=2)
            return await probe_conformance(retrying, prefix, clock, min(g4.concurrency, PARALLEL_MAX))
        finally:
            await bucket.close()

    return asyncio.run(run())


def findings(g4: G4) -> Iterator[tuple[str, str, str, str]]:
    """(subject, "ok" | "warn" | "fail", what was found, advice) about the bucket that `g4` names."""
    try:
        report = probe_bucket(g4)
    except (ConfigError, TierError) as error:
        yield "g4 reachable", "fail", str(error), _REACH
        return
    broken = [trait for trait in report.traits if trait.ok is False]
    for trait in broken:
        if trait.needed:
            advice = _REACH if trait.name == "reachable" else _GRANT
            yield f"g4 {trait.name}", "fail", trait.detail, advice
        elif "renewal" in trait.name:
            yield f"g4 {trait.name}", "warn", trait.detail, "blocks live their first ttl only, or set client: obstore"
        else:
            advice = "use a server that honours conditions, or let one replica only use this one"
            yield f"g4 {trait.name}", "fail", f"{trait.detail}: replicas would overwrite one another", advice
    if not broken:
        tried = ", ".join(trait.name for trait in report.traits if trait.ok)
        yield "g4", "ok", f"works: {tried}", ""
    if report.skew_s is not None:
        off = abs(report.skew_s) > SKEW_MAX_S
        advice = "synchronise the clocks: expiry counts on them" if off else ""
        yield "g4 clock", "warn" if off else "ok", f"{report.skew_s:+.0f} s against the server", advice
    if report.read_bytes_per_s and report.write_bytes_per_s:
        pays = report.read_bytes_per_s / _BYTES_PER_TOKEN_8B
        detail = (
            f"{report.parallel} requests at once: reads {report.read_bytes_per_s / 1e6:.0f} MB/s, writes "
            f"{report.write_bytes_per_s / 1e6:.0f} MB/s; at 128 KiB per token (8B, bf16) a read beats a prefill slower "
            f"than {pays:,.0f} tokens/s"
        )
        slow = "a fast GPU prefills such a model sooner: what is served from here then saves its work, not time"
        yield "g4 break-even", "ok", detail, slow if pays < _PREFILL_8B else ""


def backstop(config: Config) -> list[dict[str, Any]]:
    """The lifecycle rules that delete units that every sweeper missed, in S3's form: they leave out what lies below
    `ctl/`, purges and pins.

    A renewal makes a new version of the object, so its age by the server's stamp is the time since its last recorded
    use: at most the longest ttl, or the longest max_age, plus half a ttl of uses not yet recorded.
    Raises ConfigError if a class that reaches G4 has neither: no age makes its objects garbage; or if the URL has no
    prefix: the rules would reach other people's objects.
    """
    g4 = config.tiers.g4
    if g4 is None or not g4.url.startswith(("s3://", "s3a://")):
        raise ConfigError("tiers.g4.url: lifecycle rules are S3's; this URL names no S3 bucket")
    _, prefix = _place(g4)
    if not prefix:
        raise ConfigError("tiers.g4.url has no prefix: rules would cover the whole bucket; write s3://bucket/prefix")
    deep = [terms for terms in config.terms() if terms.ceiling >= Depth.G4]
    endless = [terms.name for terms in deep if terms.ttl is None and terms.max_age is None]
    if endless:
        raise ConfigError(
            f"retention.classes.{endless[0]} has neither ttl nor max_age, so no age makes its blocks garbage; set one"
        )
    days = math.ceil(max(_longest(terms) for terms in deep) / _DAY_S) + 1
    uploads = {
        "ID": RULE, "Status": "Enabled", "Filter": {"Prefix": f"{prefix}/"},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }  # fmt: skip
    units = {
        "ID": f"{RULE}-units", "Status": "Enabled", "Filter": {"Prefix": f"{prefix}/units/"},
        "Expiration": {"Days": days},
    }  # fmt: skip
    return [uploads, units]


def _place(g4: G4) -> tuple[str, str]:
    """Bucket and prefix of an S3 URL."""
    bucket, _, prefix = g4.url.partition("://")[2].partition("/")
    return bucket, prefix.strip("/")


def _longest(terms: Terms) -> float:
    ttl = math.inf if terms.ttl is None else 1.5 * terms.ttl
    return min(ttl, math.inf if terms.max_age is None else terms.max_age)


def lifecycle(file: File, apply: Apply = False, json: Json = False) -> None:
    """Print the lifecycle rules that delete units that every sweeper missed; `--apply` puts them into the bucket."""
    config = Config.load(file)
    rules = backstop(config)
    assert config.tiers.g4 is not None
    if apply:
        _put_rules(config.tiers.g4, rules)
    if json:
        write_json({"Rules": rules, "applied": apply})
        return
    import json as jsonlib

    console().print(jsonlib.dumps({"Rules": rules}, indent=2))
    bucket, _ = _place(config.tiers.g4)
    console().print(
        "in the bucket now, beside its other rules"
        if apply
        else "not applied; use --apply, which keeps the bucket's other rules. put-bucket-lifecycle-configuration "
        f"replaces them all: to use it, add these to what get-bucket-lifecycle-configuration --bucket {bucket} prints"
    )


def _put_rules(g4: G4, ours: Sequence[dict[str, Any]]) -> None:
    """Replace the rules whose name begins with RULE and keep the rest. Raises TierError."""
    import s3fs

    bucket, _ = _place(g4)
    fs = s3fs.S3FileSystem(skip_instance_cache=True, **g4.options)
    try:
        try:
            rules = fs.call_s3("get_bucket_lifecycle_configuration", Bucket=bucket).get("Rules", [])
        except Exception as error:
            answer = getattr(error.__cause__ or error, "response", None) or {}
            if answer.get("Error", {}).get("Code") != "NoSuchLifecycleConfiguration":
                raise  # the bucket's rules would be lost
            rules = []
        kept = [each for each in rules if not each.get("ID", "").startswith(RULE)]
        fs.call_s3(
            "put_bucket_lifecycle_configuration", Bucket=bucket, LifecycleConfiguration={"Rules": [*kept, *ours]}
        )
    except Exception as error:
        raise TierError("g4", "lifecycle", type(error).__name__) from None
