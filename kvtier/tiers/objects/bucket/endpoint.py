"""The server that a bucket's client talks to, as errors name it: `http://minio:9000: connection refused (option)`."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

OPTION = "tiers.g4.options.endpoint_url"

NO_TLS = "no TLS at this port"

# Phrases of HTTP libraries that wrap the cause in text. Only ours are printed: theirs may hold what was signed.
_PHRASES = {
    "connection refused": "connection refused",
    "dns error": "host name not known",
    "failed to lookup address": "host name not known",
    "certificate": "certificate not trusted",
    "no route to host": "no route to host",
    "network is unreachable": "network is unreachable",
    "connection reset": "connection reset",
    "timed out": "no answer in time",
    "wrong version number": NO_TLS,
    "wrong_version_number": NO_TLS,
    "invalidcontenttype": NO_TLS,
}

# Codes of S3, of Azure and of Google, and what each is called here, with the setting that is likely to be wrong.
_REFUSALS = {
    "NoSuchBucket": ("no such bucket", "tiers.g4.url"),
    "InvalidBucketName": ("no bucket can have this name", "tiers.g4.url"),
    "InvalidAccessKeyId": ("this access key is not known", "tiers.g4.options.key"),
    "SignatureDoesNotMatch": ("the secret does not belong to the access key", "tiers.g4.options.secret"),
    "InvalidToken": ("the session token is not valid", "tiers.g4.options.token"),
    "ExpiredToken": ("the session token has ended", "tiers.g4.options.token"),
    "AuthorizationHeaderMalformed": ("another region", "tiers.g4.options.client_kwargs.region_name"),
    "RequestTimeTooSkewed": ("this machine's clock is off", "synchronise it"),
    "ContainerNotFound": ("no such container", "tiers.g4.url"),
    "AuthenticationFailed": ("the key does not belong to the account", "tiers.g4.options.account_key"),
    "AuthorizationFailure": ("the key does not belong to the account", "tiers.g4.options.account_key"),
    "AuthorizationPermissionMismatch": ("no right to do this", "the identity's role on the container"),
    "AuthenticationRequired": ("no valid credentials", "tiers.g4.options.token, GOOGLE_APPLICATION_CREDENTIALS"),
    "AccessDenied": ("no right to do this", "tiers.g4.options.key, or the bucket's policy"),
}
_DENIED = ("access denied", "tiers.g4.options.key and secret, or the bucket's policy")
_CODE = re.compile(r"<Code>(\w{1,40})</Code>")


def shown(url: str) -> str:
    """Scheme, host and port of an endpoint, without user, path and query; what it is called where none is set. Pure."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an endpoint that is no URL"
    if not host:
        return "the provider's own endpoint"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"


def unreachable(url: str, error: BaseException) -> str | None:
    """The detail of an error for a server that could not be talked to; None if it answered, or nobody can say. Pure."""
    for each in _chain(error):
        cause = _cause(each)
        if cause is not None:
            return f"{shown(url)}: {cause} ({OPTION})"
    return None


def refused(url: str, error: BaseException, code: str = "") -> str | None:
    """The detail of an error for an answer that stays the same until somebody changes a setting; None for others.
    `code`: S3's, if it is known. Pure."""
    text = "" if code else str(error)
    found = _CODE.search(text)
    code = found[1] if found is not None else code
    denied = code in ("401", "403", "Forbidden") or "status code: 403" in text or "status code: 401" in text
    cause = _REFUSALS.get(code, _DENIED if denied else None)
    return None if cause is None else f"{shown(url)}: {cause[0]} ({cause[1]})"


def _cause(error: BaseException) -> str | None:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "host name not known"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "certificate not trusted"
    if isinstance(error, ssl.SSLError) and getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
        return NO_TLS
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = str(error).lower()
    if "error sending request" in text or "connect" in type(error).__name__.lower():
        return next((ours for theirs, ours in _PHRASES.items() if theirs in text), None)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it stems from: libraries keep them as cause, context or an attribute."""
    seen: set[int] = set()
    todo: list[object] = [error]
    while todo:
        each = todo.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        kept = getattr(each, "kwargs", None)
        inner = kept.get("error") if isinstance(kept, dict) else None
        todo += [each.__cause__, getattr(each, "os_error", None), inner, each.__context__]
