"""S3 through obstore: Rust's object_store, at a fraction of the CPU per byte.

Its fsspec adapter drops conditions, versions and metadata, so this uses the store behind it. It can delete only
unconditionally and has no self-copy that changes metadata: where s3fs is installed, those requests go through it
(combined.py); else `delete` compares versions first, and the caller rewrites an object to renew it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from kvtier.errors import ConfigError, CorruptError, TierError
from kvtier.tiers.objects.bucket.direct_http import (
    DIRECT_BYTES,
    REST_S,
    SIGNED_S,
    DirectHTTP,
    Headers,
    answer_of,
    reachable,
    size_of,
)
from kvtier.tiers.objects.bucket.endpoint import refused, unreachable
from kvtier.tiers.objects.bucket.protocol import (
    LIST_PAGE,
    TIER,
    USED,
    Scatter,
    Stat,
    Transient,
    clip,
    recorded_use,
    use_text,
)
from kvtier.times import Wall

T = TypeVar("T")
_CHUNK = 4 << 20

# s3fs's names of options that both libraries have.
_S3_NAMES = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "anon": "skip_signature"}


def translated(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """s3fs options as obstore configuration, None if one has no counterpart. Pure."""
    out: dict[str, Any] = {}
    for name, value in options.items():
        if name in _S3_NAMES:
            out[_S3_NAMES[name]] = value
        elif name == "endpoint_url":
            out["endpoint"] = value
        elif name == "client_kwargs" and set(value) <= {"region_name", "endpoint_url"}:
            if "region_name" in value:
                out["region"] = value["region_name"]
            if "endpoint_url" in value:
                out["endpoint"] = value["endpoint_url"]
        else:
            return None
    return {name: value for name, value in out.items() if value is not None}


class TokenForwarded(ConfigError):
    """The client's chain gives a session token, which obstore would send to whatever host the endpoint redirects to."""


class ObstoreBucket:
    """One bucket of an S3 server. `config` is obstore's; without keys in it, boto's chain is asked for them."""

    renewable = False
    keeps_proof = True
    _used = USED
    """The name of the metadata that records a use."""
    _endpoint_key = "endpoint"

    def __init__(
        self, bucket: str, config: Mapping[str, Any], *, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        self._bucket = bucket
        self._config = dict(config)
        self._connect_timeout = timedelta(seconds=connect_timeout_s)
        self._read_timeout = timedelta(seconds=read_timeout_s)
        self._read_timeout_s = read_timeout_s
        self._store: Any = None
        self._direct: DirectHTTP | None = None
        self._whole_until = 0.0  # by the loop: until then no ranges are asked for

    async def start(self) -> None:
        from obstore.store import S3Store

        credentials = None
        if "access_key_id" not in self._config and not self._config.get("skip_signature"):
            credentials = await asyncio.get_running_loop().run_in_executor(None, _boto_credentials)
            if credentials is not None and self._config.get("endpoint"):
                credentials = await _without_token(credentials)
        # Frames carry digests, and TLS guards the transfer; signing every byte costs more than sending it.
        self._open(S3Store, {"unsigned_payload": not self._plain, **self._config}, credentials)
        if self._plain and not self._config.get("skip_signature") and reachable(self._config["endpoint"]):
            self._direct = DirectHTTP(self._connect_timeout.total_seconds(), self._read_timeout_s)

    @property
    def _plain(self) -> bool:
        return self._endpoint.startswith("http://")

    @property
    def _endpoint(self) -> str:
        """The server's URL, "" for the provider's own."""
        return str(self._config.get(self._endpoint_key, ""))

    def _open(self, store: Callable[..., Any], config: Mapping[str, Any], credentials: Any = None) -> None:
        """Make the library's store, without a request. Raises ConfigError."""
        try:
            self._store = store(
                self._bucket,
                client_options={
                    "allow_http": self._plain,
                    "connect_timeout": self._connect_timeout,
                    # In object_store this bounds a whole request: long enough for a stride on a slow line. `read`
                    # catches stalls chunk by chunk.
                    "timeout": 12 * self._read_timeout,
                },
                retry_config={"max_retries": 0, "retry_timeout": 12 * self._read_timeout},
                credential_provider=credentials,
                config=config,
            )
        except Exception as error:
            raise ConfigError(f"tiers.g4.options: obstore does not take them ({type(error).__name__})") from None

    def _etag(self, told: str | None) -> str:
        """An ETag as conditions have it."""
        return told or ""

    def _version(self, told: Mapping[str, Any]) -> str:
        """`Stat.etag` by what the library tells of an object."""
        return self._etag(told["e_tag"])

    def _condition(self, etag: str) -> dict[str, str]:
        """The library's condition on the version `etag`."""
        return {"e_tag": etag}

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        return await self._put(name, data, used, "create")

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        return await self._put(name, data, used, "overwrite" if etag is None else self._condition(etag))

    async def _put(self, name: str, data: bytearray, used: Wall, mode: Any) -> Stat | None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            answer = await self._store.put_async(
                name, data, attributes={self._used: use_text(used)}, mode=mode, use_multipart=False
            )
        except (AlreadyExistsError, PreconditionError):
            return None
        except FileNotFoundError:
            if isinstance(mode, dict):
                return None
            raise TierError(TIER, "put", "no such bucket") from None
        except Exception as error:
            raise self._mapped("put", error) from None
        return Stat(name, len(data), self._version(answer), used)

    async def head(self, name: str) -> Stat | None:
        try:
            answer = await self._store.get_async(name, options={"head": True})
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._mapped("head", error) from None
        return self._stat(name, answer)

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        stop = start + sum(len(buffer) for buffer in into)
        if self._direct is not None and self._direct.usable and stop - start >= DIRECT_BYTES:
            headers = await self._direct.get(await self._signed(name), start, into, clipped)
            if headers is not None:
                return _answered(name, headers)
        try:
            answer = await self._get(name, start, stop)
        except FileNotFoundError:
            return None
        except Exception as error:
            # The library raises the same error for a range behind the end and for a broken server.
            there = await self.head(name)
            if there is not None and there.size < (start + 1 if clipped else stop):
                raise CorruptError(f"the object has {there.size} bytes, wanted up to {stop}") from None
            raise self._mapped("get", error) from None
        size, (first, last) = answer.meta["size"], answer.range
        if (size < stop and not clipped) or first > start:
            raise CorruptError(f"the object has {size} bytes, wanted up to {stop}")
        scatter = Scatter(clip(into, size - start), skip=start - first)
        try:
            async with asyncio.timeout(None) as stall:
                stream = aiter(answer.stream(min_chunk_size=_CHUNK))
                while not scatter.full:
                    stall.reschedule(asyncio.get_running_loop().time() + self._read_timeout_s)
                    chunk = await anext(stream)
                    scatter.feed(memoryview(chunk))
        except StopAsyncIteration:
            raise Transient(TIER, "get", f"body of {last - first} bytes shorter than announced") from None
        except TimeoutError:
            raise Transient(TIER, "get", "stalled") from None
        except Exception as error:
            raise self._mapped("get", error) from None
        return self._stat(name, answer)

    async def _signed(self, name: str) -> str:
        import obstore

        expires = timedelta(seconds=SIGNED_S)
        try:
            if "access_key_id" in self._config:
                url: str = obstore.sign(self._store, "GET", name, expires)  # microseconds: no credentials to fetch
            else:
                url = await obstore.sign_async(self._store, "GET", name, expires)
        except Exception as error:
            raise self._mapped("get", error) from None
        return url

    async def _get(self, name: str, start: int, stop: int) -> Any:
        now = asyncio.get_running_loop().time()
        if now >= self._whole_until:
            try:
                return await self._store.get_async(name, options={"range": (start, stop)})
            except Exception as error:
                if "non-partial response" not in str(error):
                    raise
                # This server ignores ranges and sends the whole object, which the library takes for a failure; or it
                # did so once, or a proxy before it.
                self._whole_until = now + REST_S
        return await self._store.get_async(name)

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        raise NotImplementedError("obstore has no copy onto itself: `renewable` is false, callers rewrite")

    async def delete(self, name: str, etag: str | None = None) -> bool:
        if etag is not None:
            there = await self.head(name)
            if there is None or there.etag != etag:
                return False
        try:
            await self._store.delete_async(name)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._mapped("delete", error) from None
        return True

    async def delete_many(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            await self._store.delete_async(list(names))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._mapped("delete", error) from None

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        # object_store lists whole path segments: filter by a prefix that ends inside one.
        folder = prefix.rpartition("/")[0]
        stream = aiter(self._store.list(folder or None, offset=after or None, chunk_size=LIST_PAGE))
        while True:
            try:
                page = await anext(stream)
            except StopAsyncIteration:
                return
            except Exception as error:
                raise self._mapped("list", error) from None
            found = [
                Stat(each["path"], each["size"], self._version(each), None, each["last_modified"].timestamp())
                for each in page
                if each["path"].startswith(prefix) and each["path"] > after
            ]
            if found:
                yield found

    async def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        self._store = None

    def _stat(self, name: str, answer: Any) -> Stat:
        meta, used = answer.meta, recorded_use(answer.attributes, self._used)
        return Stat(name, meta["size"], self._version(meta), used, meta["last_modified"].timestamp())

    def _mapped(self, operation: str, error: Exception) -> TierError:
        refusal = refused(self._endpoint, error)
        if refusal is not None:
            return TierError(TIER, operation, refusal)
        detail = unreachable(self._endpoint, error)
        return _mapped(operation, error) if detail is None else Transient(TIER, operation, detail)


def _answered(name: str, headers: Headers) -> Stat:
    answer = answer_of(headers)
    modified, used = answer["LastModified"], recorded_use(answer["Metadata"])
    return Stat(name, size_of(headers), answer["ETag"], used, modified.timestamp() if modified is not None else None)


def _mapped(operation: str, error: Exception) -> TierError:
    """obstore's exception as ours. Type names only: its messages carry URLs and servers' texts."""
    from obstore import exceptions as obstore

    name = type(error).__name__
    hopeless = (
        obstore.PermissionDeniedError, obstore.UnauthenticatedError, obstore.InvalidPathError,
        obstore.NotSupportedError, obstore.UnknownConfigurationKeyError, ValueError, TypeError,
    )  # fmt: skip
    return (TierError if isinstance(error, hopeless) else Transient)(TIER, operation, name)


async def _without_token(provide: Callable[[], Awaitable[dict[str, Any]]]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """The provider, which raises TokenForwarded, as this does, where there is a session token."""

    async def checked() -> dict[str, Any]:
        found = await provide()
        if found["token"]:
            raise TokenForwarded(
                "tiers.g4.client: obstore sends a session token along with redirects to any host, and the client's own "
                "chain has one: set client: s3fs for this endpoint (pip install 'kvtier[s3]')"
            )
        return found

    await checked()
    return checked


def _boto_credentials() -> Callable[[], Awaitable[dict[str, Any]]] | None:
    """boto's own chain (environment, profiles, SSO, roles) as a provider; None leaves it to obstore's shorter one."""
    try:
        import botocore.session
    except ImportError:
        return None
    found = botocore.session.get_session().get_credentials()
    if found is None:
        return None

    async def provide() -> dict[str, Any]:
        frozen = await asyncio.get_running_loop().run_in_executor(None, found.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # Ask again after five minutes: boto refreshes what is about to expire.
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),
        }

    return provide
