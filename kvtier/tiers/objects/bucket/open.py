"""Opens the bucket that a URL names: which library serves it, with which options."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvtier.clock import Clock
from kvtier.errors import ConfigError
from kvtier.tiers.objects.bucket.combined import CombinedBucket
from kvtier.tiers.objects.bucket.protocol import Bucket

Client = Literal["auto", "s3fs", "obstore"]
_KEY = "tiers.g4.url"
_EXTRAS = {"s3": "s3", "s3a": "s3"}


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Bounds on requests to a server: seconds to connect, seconds without a byte, parallel transfers (each holds one
    object in memory), bytes per second each way (0: no bound)."""

    connect_s: float = 3.0
    read_s: float = 10.0
    concurrency: int = 8
    read_rate: float = 0.0
    write_rate: float = 0.0


def open_bucket(
    url: str, options: Mapping[str, Any], client: Client, clock: Clock, limits: BucketLimits
) -> tuple[Bucket, str]:
    """The bucket that `url` names and the prefix inside it. Imports the library, makes no request.

    Raises ConfigError with the key at fault, never with an option's value or a URL's user part.
    """
    protocol, place = _split(url)
    if client not in ("auto", "s3fs", "obstore"):
        raise ConfigError(f"tiers.g4.client is {client!r}: write auto, s3fs or obstore")
    if protocol == "file":
        from kvtier.tiers.objects.bucket.local import LocalFiles
        from kvtier.tiers.objects.bucket.threaded import Threaded

        return Threaded(LocalFiles(_local_path(url, place))), ""
    if "//" in place.strip("/") or "\\" in place:
        # Some servers store it under another name than they list: what is written, a purge too, is never found.
        raise ConfigError(f"{_KEY} has an empty part or a backslash in its path: write single slashes between names")
    if protocol in ("az", "gs", "gcs") and (cloud := _cloud(protocol, place, options, client, limits)) is not None:
        return cloud
    file_system = _file_system_class(protocol)
    if protocol in ("s3", "s3a"):
        bucket, _, prefix = place.partition("/")
        if not bucket:
            raise ConfigError(f"{_KEY} names no bucket: write {protocol}://bucket/prefix")
        return _s3(bucket, options, client, clock, limits), prefix.strip("/")
    from kvtier.tiers.objects.bucket.fsspec import AnyFiles, MemoryFiles
    from kvtier.tiers.objects.bucket.threaded import Files, Threaded

    try:
        fs = file_system(skip_instance_cache=True, use_listings_cache=False, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tiers.g4.options: {protocol} does not take them ({type(error).__name__}); see fsspec's {protocol}"
        ) from None
    root = str(fs._strip_protocol(url))
    files: Files = MemoryFiles(fs, root) if protocol == "memory" else AnyFiles(fs, root)
    return Threaded(files, limits.concurrency), ""


def _split(url: str) -> tuple[str, str]:
    protocol, separator, place = url.partition("://")
    if not separator or not protocol or "::" in url or not protocol.replace("+", "").isalnum():
        raise ConfigError(f"{_KEY} is no URL: write s3://bucket/prefix, file:///directory or another fsspec URL")
    # A secret may hold a slash, and then the library takes its first part for a host. A directory is all path.
    if ("@" in url or "?" in url) and not url.startswith("file:///"):
        raise ConfigError(
            f"{_KEY} carries credentials or a query: put them into the client's own chain "
            "(environment, profile, instance role) or into tiers.g4.options"
        )
    if any(part in (".", "..") for part in place.split("/")):
        raise ConfigError(f"{_KEY} has '.' or '..' in its path: write the path itself")
    return protocol.lower(), place


def _local_path(url: str, place: str) -> Path:
    path = Path(place)
    if not path.is_absolute():
        raise ConfigError(f"{_KEY} must name an absolute directory: file:///directory, got {url!r}")
    return path


def _file_system_class(protocol: str) -> Any:
    import fsspec

    extra = _EXTRAS.get(protocol)
    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(f"{_KEY}: fsspec knows no protocol {protocol!r}") from None
    except ImportError as error:
        fix = f"pip install 'kvtier[{extra}]'" if extra else str(error)
        raise ConfigError(f"{_KEY}: the package for {protocol}:// is not installed: {fix}") from None


def _s3(bucket: str, options: Mapping[str, Any], client: Client, clock: Clock, limits: BucketLimits) -> Bucket:
    """obstore if it is asked for, or if it is installed, knows all the options and cannot give a token away; else s3fs.

    Where s3fs is installed beside obstore, it does the requests that obstore lacks.
    """
    has = {name: importlib.util.find_spec(name) is not None for name in ("obstore", "s3fs")}
    if client != "s3fs":
        from kvtier.tiers.objects.bucket.obstore import ObstoreBucket, translated

        config = translated(options)
        forwards = config is not None and _forwards_token(config)
        if client == "obstore" and not has["obstore"]:
            raise ConfigError("tiers.g4.client is obstore, which is not installed: pip install 'kvtier[s3]'")
        if client == "obstore" and config is None:
            raise ConfigError("tiers.g4.options has some that only s3fs knows: remove them, or set client: s3fs")
        if client == "obstore" and forwards:
            raise ConfigError(
                "tiers.g4.client is obstore, which sends a session token along with redirects to any host: "
                "set client: s3fs for this endpoint"
            )
        if has["obstore"] and config is not None and not forwards:
            primary = ObstoreBucket(bucket, config, connect_timeout_s=limits.connect_s, read_timeout_s=limits.read_s)
            return CombinedBucket(primary, _s3fs(bucket, options, clock, limits)) if has["s3fs"] else primary
    return _s3fs(bucket, options, clock, limits)


def _cloud(
    protocol: str, place: str, options: Mapping[str, Any], client: Client, limits: BucketLimits
) -> tuple[Bucket, str] | None:
    """Azure's or Google's bucket through obstore, where it is installed and knows all the options; None leaves it to
    fsspec."""
    from kvtier.tiers.objects.bucket import azure, gcs

    bucket: type[azure.AzureBucket] | type[gcs.GcsBucket]
    if protocol == "az":
        bucket, config, noun = azure.AzureBucket, azure.translated(options), "container"
    else:
        bucket, config, noun = gcs.GcsBucket, gcs.translated(options), "bucket"
    if config is None or client == "s3fs" or importlib.util.find_spec("obstore") is None:
        if client == "obstore":
            raise ConfigError(
                "tiers.g4.client is obstore: install it, and write its options alone into tiers.g4.options"
            )
        return None
    name, _, prefix = place.partition("/")
    if not name:
        raise ConfigError(f"{_KEY} names no {noun}: write {protocol}://{noun}/prefix")
    opened = bucket(name, config, connect_timeout_s=limits.connect_s, read_timeout_s=limits.read_s)
    return opened, prefix.strip("/")


def _forwards_token(config: Mapping[str, Any]) -> bool:
    """Whether obstore would send a session token to whatever host an endpoint redirects to: it follows redirects with
    all headers but Authorization, and cannot be told not to. AWS itself, over TLS, redirects to its own hosts."""
    return bool(config.get("endpoint") and config.get("session_token"))


def _s3fs(bucket: str, options: Mapping[str, Any], clock: Clock, limits: BucketLimits) -> Bucket:
    from kvtier.tiers.objects.bucket.s3fs import S3Bucket

    return S3Bucket(
        bucket, options, clock,
        connections=4 * limits.concurrency + 16, connect_timeout_s=limits.connect_s, read_timeout_s=limits.read_s,
    )  # fmt: skip
