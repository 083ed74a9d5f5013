"""Control objects (pins, deltas, purges) with a tag: what lacks a right one is as if it were not there.

body ‖ key id (8) ‖ tag (16) over the object's name below the prefix, and the body
"""

from __future__ import annotations

from kvtier.errors import CorruptError
from kvtier.keyring import KEY_ID_BYTES, TAG_BYTES, Keyring, UnknownKey

SIGNATURE_BYTES = KEY_ID_BYTES + TAG_BYTES
_PURPOSE = "control"


class NotAccepted(CorruptError):
    """Signed by a key that is retired, or that the keyring does not have."""


class Signer:
    """Signs and opens the control objects below a prefix."""

    def __init__(self, keyring: Keyring, root: str) -> None:
        """`root`: what every name begins with; a bucket's content can be moved to another prefix."""
        self._keyring = keyring
        self._root = root

    def sign(self, name: str, body: bytes | bytearray) -> bytearray:
        """The bytes of the object `name`."""
        id, tag = self._keyring.tag(_PURPOSE, self._below(name), body)
        return bytearray(body) + id + tag

    def open(self, name: str, raw: bytes | bytearray) -> bytes:
        """The body of an object. Raises CorruptError if it was not signed under this name by an accepted key:
        NotAccepted where it is none."""
        body, id, tag = raw[:-SIGNATURE_BYTES], raw[-SIGNATURE_BYTES:-TAG_BYTES], raw[-TAG_BYTES:]
        if len(raw) < SIGNATURE_BYTES:
            raise CorruptError(f"{len(raw)} bytes, and no signature")
        try:
            self._keyring.check(bytes(id), bytes(tag), _PURPOSE, self._below(name), body)
        except UnknownKey as unknown:
            raise NotAccepted(str(unknown)) from None
        return bytes(body)

    def is_active(self, raw: bytes | bytearray) -> bool:
        """Whether the key that signed is the one that signs now. Pure."""
        return raw[-SIGNATURE_BYTES:-TAG_BYTES] == self._keyring.active.id

    def _below(self, name: str) -> bytes:
        return name.removeprefix(self._root).encode()
