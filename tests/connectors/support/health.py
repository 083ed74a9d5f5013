"""An engine's HTTP server that starts."""

from __future__ import annotations

import subprocess
import time
import urllib.request

START_S = 240.0


def wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    """Until `url`/health answers. Raises AssertionError where the process ends before, or after START_S."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(1)
