"""The keyring's key document, opened by AWS KMS: the plug-in `aws` (`security: {kms: aws}`).

    KVTIER_KMS_FILE      a key file that `aws kms encrypt` encrypted with the context {"kvtier": "keyring"}; KMS takes
                         4096 bytes, which is thirty keys
    AWS_…                region, credentials and endpoint, as any AWS client takes them

The plain document is never on a disk. Whoever may call kms:Decrypt with that context can open it. A key that is
disabled in KMS opens nothing from the next start on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config.schema import kms_file
from kvtier.config.strict_yaml import read_document
from kvtier.errors import ConfigError

CONTEXT: Mapping[str, str] = {"kvtier": "keyring"}
"""What the ciphertext is bound to."""

FILE = "KVTIER_KMS_FILE"
CIPHERTEXT_BYTES_MAX = 6144  # the most that KMS decrypts
TIMEOUT_S = 5.0
ATTEMPTS = 2


def key_document() -> Mapping[str, Any]:
    """What the key file holds. Reads the environment and asks KMS, for 20 s at most. Raises ConfigError."""
    name = kms_file()
    if not name:
        raise ConfigError(f"security.kms: aws needs {FILE}, the path of the encrypted key file")
    try:
        with Path(name).open("rb") as file:
            ciphertext = file.read(CIPHERTEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"security.kms: {FILE}={name} cannot be read: {error.strerror}") from None
    if len(ciphertext) > CIPHERTEXT_BYTES_MAX:
        raise ConfigError(f"security.kms: {FILE}={name} has more than {CIPHERTEXT_BYTES_MAX} bytes: KMS takes no more")
    plain = _decrypt(ciphertext)
    try:
        return read_document(plain)
    except ConfigError:
        raise ConfigError(f"security.kms: what {FILE}={name} holds is not strict YAML") from None


def _decrypt(ciphertext: bytes) -> bytes:
    try:
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ConfigError("security.kms: aws needs the package botocore: pip install 'kvtier[kms]'") from None
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"total_max_attempts": ATTEMPTS})
    try:
        client = botocore.session.get_session().create_client("kms", config=config)
        answer = client.decrypt(CiphertextBlob=ciphertext, EncryptionContext=dict(CONTEXT))
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "an error")
        raise ConfigError(
            f"security.kms: AWS KMS answers {code}; check the key's policy for kms:Decrypt, the region, and that the "
            "file was encrypted with --encryption-context kvtier=keyring"
        ) from None
    except BotoCoreError as error:
        raise ConfigError(f"security.kms: AWS KMS cannot be asked: {error}") from None
    return bytes(answer["Plaintext"])
