"""S3 through s3fs: its options, credentials and session, and its aiobotocore client for requests that fsspec lacks
(If-Match, self-copy, start-after, a body read into the caller's buffers)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, cast

from kvtier.clock import Clock
from kvtier.errors import ConfigError, CorruptError, TierError
from kvtier.tiers.objects.bucket.direct_http import DIRECT_BYTES, SIGNED_S, DirectHTTP, answer_of, reachable, size_of
from kvtier.tiers.objects.bucket.endpoint import refused, unreachable
from kvtier.tiers.objects.bucket.protocol import (
    LIST_PAGE,
    TIER,
    USED,
    RecordedUse,
    Scatter,
    Stat,
    Transient,
    clip,
    recorded_use,
    use_text,
)
from kvtier.times import Wall

SKEW_S = 60.0
"""How far a writer's clock may run ahead of the server's before its recorded use is capped."""

LOOKUP_S = 60.0
"""Between two searches for a bucket's region."""

_CHUNK = 1 << 20
_TRANSIENT_CODES = frozenset(
    {
        "SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ThrottlingException", "Throttling",
        "ConditionalRequestConflict", "OperationAborted", "BadDigest", "IncompleteBody", "TooManyRequests",
        "RequestLimitExceeded", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip
_PRECONDITION = ("PreconditionFailed", "412")
_ABSENT = ("NoSuchKey", "404", "NotFound")


class S3Bucket:
    """One bucket. `options` go to s3fs unchanged; time-outs, pool size and retries are set here unless they are in
    `config_kwargs`."""

    renewable = True
    keeps_proof = True

    def __init__(
        self,
        bucket: str,
        options: Mapping[str, Any],
        clock: Clock,
        *,
        connections: int,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self._bucket = bucket
        self._options = dict(options)
        self._clock = clock
        self._config = {
            "connect_timeout": connect_timeout_s,
            "read_timeout": read_timeout_s,
            "max_pool_connections": connections,
            # One attempt: RetryingBucket retries, within the caller's deadline.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            # Also for presigned URLs: not every server knows the older signature that some regions default to.
            "signature_version": "s3v4",
            # Frames carry their own checksums, checked end to end.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "http_session_cls": _session_without_redirects(),
            **self._options.pop("config_kwargs", {}),
        }
        self._client: Any = None
        self._direct: DirectHTTP | None = None
        self._extra: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        import s3fs

        try:
            fs = s3fs.S3FileSystem(
                asynchronous=True,
                loop=asyncio.get_running_loop(),
                skip_instance_cache=True,
                use_listings_cache=False,
                config_kwargs=self._config,
                **self._options,
            )
            self._client = await fs.set_session()
        except (TypeError, ValueError, KeyError) as error:
            # The message may hold an option's value, and an option's value may be a secret.
            raise ConfigError(f"tiers.g4.options: s3fs does not take them ({type(error).__name__})") from None
        except Exception as error:
            raise self._mapped("open", error) from None
        self._client.meta.events.register_first("before-call.s3.HeadBucket", _RegionLookups(self._clock))
        extra = {**fs.s3_additional_kwargs, **fs.req_kw}
        for operation in ("GetObject", "HeadObject", "PutObject", "CopyObject", "DeleteObject", "ListObjectsV2"):
            known = self._client.meta.service_model.operation_model(operation).input_shape.members
            self._extra[operation] = {key: value for key, value in extra.items() if key in known}
        # Without a key nothing can be signed; extra parameters of a GET would have to be headers.
        if not fs.anon and not self._extra["GetObject"] and reachable(self._client.meta.endpoint_url):
            self._direct = DirectHTTP(self._config["connect_timeout"], self._config["read_timeout"])

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        return await self._put(name, data, used, {"IfNoneMatch": "*"})

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        return await self._put(name, data, used, {} if etag is None else {"IfMatch": etag})

    async def _put(self, name: str, data: bytearray, used: Wall, condition: dict[str, str]) -> Stat | None:
        try:
            answer = await self._client.put_object(
                Bucket=self._bucket, Key=name, Body=data, Metadata={USED: use_text(used)},
                **condition, **self._extra["PutObject"],
            )  # fmt: skip
        except Exception as error:
            # A conditional put on an absent object is answered 404 by some servers.
            if condition and _code(error) in (*_PRECONDITION, *_ABSENT):
                return None
            raise self._mapped("put", error) from None
        return Stat(name, len(data), answer.get("ETag", ""), used)

    async def head(self, name: str) -> Stat | None:
        try:
            answer = await self._client.head_object(Bucket=self._bucket, Key=name, **self._extra["HeadObject"])
        except Exception as error:
            if _code(error) in _ABSENT:
                return None
            raise self._mapped("head", error) from None
        return self._stat(name, answer, answer["ContentLength"])

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        stop = start + sum(len(buffer) for buffer in into)
        if self._direct is not None and self._direct.usable and stop - start >= DIRECT_BYTES:
            headers = await self._direct.get(await self._signed(name), start, into, clipped)
            if headers is not None:
                return self._stat(name, answer_of(headers), size_of(headers))
        try:
            answer = await self._client.get_object(
                Bucket=self._bucket, Key=name, Range=f"bytes={start}-{stop - 1}", **self._extra["GetObject"]
            )
        except Exception as error:
            if _code(error) in _ABSENT:
                return None
            if _code(error) in ("InvalidRange", "416"):
                raise CorruptError(f"the object ends before {start}") from None
            raise self._mapped("get", error) from None
        async with answer["Body"] as body:
            first, size = _content_range(answer)
            if (size < stop and not clipped) or first > start:
                raise CorruptError(f"the object has {size} bytes, wanted up to {stop}")
            scatter = Scatter(clip(into, size - start), skip=start - first)
            try:
                while not scatter.full:
                    chunk = await body.read(_CHUNK)
                    if not chunk:
                        raise Transient(TIER, "get", "body shorter than announced")
                    scatter.feed(memoryview(chunk))
            except TierError:
                raise
            except Exception as error:
                raise self._mapped("get", error) from None
        return self._stat(name, answer, size)

    async def _signed(self, name: str) -> str:
        try:
            url: str = await self._client.generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": name}, ExpiresIn=SIGNED_S
            )
        except Exception as error:
            raise self._mapped("get", error) from None
        return url

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        try:
            answer = await self._client.copy_object(
                Bucket=self._bucket, Key=name, CopySource={"Bucket": self._bucket, "Key": name},
                CopySourceIfMatch=etag, MetadataDirective="REPLACE", Metadata={USED: use_text(used)},
                **self._extra["CopyObject"],
            )  # fmt: skip
        except Exception as error:
            if _code(error) in (*_ABSENT, *_PRECONDITION):
                return None
            raise self._mapped("copy", error) from None
        copied = answer.get("CopyObjectResult", {}).get("ETag", etag)
        there = await self.head(name)
        # Some servers return the ETag of a copy without its quotes; reads are compared with the one of `head`.
        same = there is not None and there.etag.strip('"') == copied.strip('"')
        return Stat(name, there.size, there.etag, used) if there is not None and same else None

    async def delete(self, name: str, etag: str | None = None) -> bool:
        condition = {} if etag is None else {"IfMatch": etag}
        if etag is not None:
            # Some servers (Ceph 16) accept the condition and ignore it: do not delete what `head` shows to be another.
            there = await self.head(name)
            if there is None or there.etag.strip('"') != etag.strip('"'):
                return False
        try:
            await self._client.delete_object(Bucket=self._bucket, Key=name, **condition, **self._extra["DeleteObject"])
        except Exception as error:
            if _code(error) in (*_ABSENT, *_PRECONDITION):
                return False
            if condition and _code(error) in ("NotImplemented", "501"):
                return await self.delete(name)
            raise self._mapped("delete", error) from None
        return True

    async def delete_many(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            answer = await self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
            )
        except Exception as error:
            raise self._mapped("delete", error) from None
        failed = [entry for entry in answer.get("Errors", []) if entry.get("Code") not in _ABSENT]
        if failed:
            raise Transient(TIER, "delete", f"{len(failed)} of {len(names)} objects: {failed[0].get('Code', '?')}")

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        token: dict[str, str] = {"StartAfter": after} if after else {}
        while True:
            try:
                answer = await self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=prefix, MaxKeys=LIST_PAGE, **token, **self._extra["ListObjectsV2"]
                )
            except Exception as error:
                raise self._mapped("list", error) from None
            # A server may ignore Prefix or StartAfter: other objects must not be taken for ours.
            page = [
                Stat(entry["Key"], entry["Size"], entry.get("ETag", ""), None, _stamp(entry.get("LastModified")))
                for entry in answer.get("Contents", [])
                if entry["Key"].startswith(prefix) and entry["Key"] > after
            ]
            if page:
                yield page
            if not answer.get("IsTruncated"):
                return
            token, asked = {"StartAfter": page[-1].name} if page else {}, token
            if answer.get("NextContinuationToken"):
                token = {"ContinuationToken": answer["NextContinuationToken"]}
            if token in ({}, asked):  # the rest may hold a purge
                raise TierError(TIER, "list", "the server's listing ends before its end, or begins again")

    async def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _mapped(self, operation: str, error: Exception) -> TierError:
        endpoint = self._client.meta.endpoint_url if self._client is not None else ""
        code = _code(error)
        refusal = refused(endpoint, error, code) if code else None
        if refusal is not None:
            return TierError(TIER, operation, f"{refusal}: {code}")
        detail = None if code else unreachable(endpoint, error)
        return _mapped(operation, error) if detail is None else Transient(TIER, operation, detail)

    def _stat(self, name: str, answer: Mapping[str, Any], size: int) -> Stat:
        return Stat(name, size, answer.get("ETag", ""), self._used(answer), _stamp(answer.get("LastModified")))

    def _used(self, answer: Mapping[str, Any]) -> Wall | None:
        """The recorded use, and how late it can have been by the object's age and stamp, by the server's own clock."""
        used = recorded_use(answer.get("Metadata", {}))
        date = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        modified = answer.get("LastModified")
        if used is None or date is None or modified is None:
            return used
        try:
            age: float = (parsedate_to_datetime(date) - modified).total_seconds()
        except (TypeError, ValueError):
            return used
        believed = max(self._clock.wall() - age, modified.timestamp()) + SKEW_S
        return cast(Wall, RecordedUse(used, getattr(used, "proof", ""), believed))


class _StayingSession:
    """An HTTP session that follows no redirect: the library would send the session token along to any host. botocore
    itself goes on to another region, with a request that it signs for there."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, method: str, **arguments: Any) -> Any:
        return self._session.request(method, **arguments, allow_redirects=False)


class _RegionLookups:
    """Bounds botocore's search for the region of a bucket that answers with a redirect: it asks HeadBucket, whose own
    redirect makes it ask again, a hundred times for each request. Here one is sent per LOOKUP_S; others fail at once.
    G4 itself never asks HeadBucket."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = -LOOKUP_S

    def __call__(self, **_: Any) -> tuple[Any, dict[str, Any]] | None:
        now = self._clock.monotonic()
        if now >= self._next:
            self._next = now + LOOKUP_S
            return None
        metadata = {"HTTPStatusCode": 403, "HTTPHeaders": {}}
        return SimpleNamespace(status_code=403), {"Error": {"Code": "403", "Message": ""}, "ResponseMetadata": metadata}


def _session_without_redirects() -> type:
    from aiobotocore.httpsession import AIOHTTPSession

    class StayingHTTPSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> _StayingSession:
            return _StayingSession(await super()._get_session(proxy_url))

    return StayingHTTPSession


def _stamp(modified: Any) -> float | None:
    return modified.timestamp() if modified is not None else None


def _content_range(answer: Mapping[str, Any]) -> tuple[int, int]:
    """(first byte, size of the whole object); a server that ignores ranges sends all of it."""
    text = answer.get("ContentRange")
    if not text:
        return 0, answer["ContentLength"]
    try:
        span, _, size = text.removeprefix("bytes ").partition("/")
        return int(span.partition("-")[0]), int(size)
    except ValueError:
        raise Transient(TIER, "get", "unreadable Content-Range") from None


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _mapped(operation: str, error: Exception) -> TierError:
    """A client's exception as ours. Only codes and type names: messages may echo what was signed."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = _code(error)
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status >= 500 or status in (408, 409, 429) or status == 200 or code in _TRANSIENT_CODES:
            return Transient(TIER, operation, f"{code} (HTTP {status})")
        return TierError(TIER, operation, f"{code} (HTTP {status})")
    from botocore import exceptions as botocore

    name = type(error).__name__
    hopeless = (
        botocore.NoCredentialsError, botocore.PartialCredentialsError, botocore.ProfileNotFound,
        botocore.ParamValidationError, botocore.NoRegionError, botocore.CredentialRetrievalError,
    )  # fmt: skip
    if isinstance(error, hopeless):
        return TierError(TIER, operation, name)
    import aiohttp

    if isinstance(error, (botocore.BotoCoreError, aiohttp.ClientError, OSError, EOFError)):
        return Transient(TIER, operation, name)
    return TierError(TIER, operation, name)
