"""A single-node Ceph RGW on loopback, from Debian's packages, without systemd: a second complete S3 server.

    apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common
    python -m tests.tiers.objects.support.ceph FOLDER     # prints how to reach it, serves until standard input ends

One monitor, one OSD on a file, one gateway; cephx on (without it the gateway hangs). Takes about 20 seconds to start
and a gigabyte of memory at its peak: for `make test-long`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

from kvtier.testing.servers import ACCESS_KEY, SECRET_KEY, S3Server

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_STEP_S = 60.0


def missing() -> list[str]:
    """Programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class CephRGW(S3Server):
    """Honours conditional puts; ignores a condition on a delete and SDK checksums (16.2)."""

    program = "radosgw"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.absolute())
        self._daemons: list[subprocess.Popen[bytes]] = []

    def command(self) -> list[str]:
        return ["radosgw", "-c", str(self._conf), "-n", "client.rgw.a", "-f"]

    @property
    def _conf(self) -> Path:
        return self._folder / "ceph.conf"

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        new = not self._conf.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        if new:
            self._lay_out()
        self._daemon("ceph-mon", "-c", str(self._conf), "-i", "a", "-f")
        self._until("ceph", "--connect-timeout", "2", "mon", "stat")
        if new:
            self._make_osd()
        self._daemon("ceph-osd", "-c", str(self._conf), "-i", "0", "-f")
        self._until("ceph", "osd", "stat", says="1 up")
        if new:
            self._run(
                "radosgw-admin", "user", "create", "--uid=kv", "--display-name=kv",
                f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}",
            )  # fmt: skip
        super().start()

    def _end(self, how: signal.Signals) -> None:
        super()._end(how)
        while self._daemons:
            daemon = self._daemons.pop()
            if daemon.poll() is None:
                os.killpg(daemon.pid, signal.SIGKILL if how is signal.SIGKILL else signal.SIGTERM)
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(daemon.pid, signal.SIGKILL)
                    daemon.wait(10)

    def _lay_out(self) -> None:
        here, monitor = self._folder, self._ports[1]
        for name in ("run", "logs", "mon.a", "osd.0"):
            (here / name).mkdir(parents=True, exist_ok=True)
        cluster = str(uuid4())
        self._conf.write_text(_CONF.format(d=here, fsid=cluster, m=monitor, m1=self._ports[2], s3=self._ports[0]))
        mon, admin = str(here / "mon.keyring"), str(here / "keyring")
        self._run("ceph-authtool", "--create-keyring", mon, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        caps = [word for cap in ("mon", "osd", "mds") for word in ("--cap", cap, "allow *")]
        self._run("ceph-authtool", "--create-keyring", admin, "--gen-key", "-n", "client.admin", *caps)
        gateway = ["--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"]
        self._run("ceph-authtool", admin, "--gen-key", "-n", "client.rgw.a", *gateway)
        self._run("ceph-authtool", mon, "--import-keyring", admin)
        addresses = f"[v2:127.0.0.1:{monitor},v1:127.0.0.1:{self._ports[2]}]"
        self._run("monmaptool", "--create", "--addv", "a", addresses, "--fsid", cluster, str(here / "monmap"))
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(here / "monmap"), "--keyring", mon)

    def _make_osd(self) -> None:
        secret = self._run("ceph-authtool", "--gen-print-key").strip()
        name = str(uuid4())
        self._run("ceph", "osd", "new", name, "-i", "-", stdin=f'{{"cephx_secret": "{secret}"}}')
        keyring = str(self._folder / "osd.0" / "keyring")
        self._run("ceph-authtool", "--create-keyring", keyring, "-n", "osd.0", "--add-key", secret)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", name)

    def _daemon(self, *command: str) -> None:
        with (self._folder / "logs" / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self._folder
                )
            )

    def _run(self, *command: str, stdin: str | None = None) -> str:
        """One administrative step. Raises RuntimeError with what it said."""
        done = subprocess.run(
            ("env", f"CEPH_CONF={self._conf}", *command), input=stdin, capture_output=True, text=True,
            timeout=_STEP_S, cwd=self._folder,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-1000:]}")
        return done.stdout

    def _until(self, *command: str, says: str = "") -> None:
        give_up = time.monotonic() + _STEP_S
        while True:
            try:
                if says in self._run(*command):
                    return
            except (RuntimeError, subprocess.TimeoutExpired):
                pass
            if time.monotonic() > give_up:
                raise RuntimeError(f"{' '.join(command)} never succeeded")
            time.sleep(0.2)


_CONF = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{m},v1:127.0.0.1:{m1}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {d}/keyring
auth allow insecure global id reclaim = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 2
run dir = {d}/run
admin socket = {d}/run/$name.asok
pid file = {d}/run/$name.pid
log file = {d}/logs/$name.log
mon cluster log file = {d}/logs/cluster.log
[mon]
keyring = {d}/mon.keyring
mon data = {d}/mon.$id
[osd]
keyring = {d}/osd.$id/keyring
osd data = {d}/osd.$id
osd objectstore = bluestore
bluestore block size = 8589934592
osd memory target = 1073741824
osd class update on start = true
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{s3}
rgw thread pool size = 64
rgw enable usage log = false
rgw gc obj min wait = 30
rgw gc processor period = 30
rgw dns name = 127.0.0.1
"""


def main(folder: Path) -> None:
    """Serve from `folder` until standard input ends."""
    absent = missing()
    if absent:
        raise SystemExit(f"not installed: {', '.join(absent)}; see the head of this file")
    server = CephRGW(folder)
    server.start()
    try:
        print(f"endpoint_url: {server.endpoint}")
        print(f"AWS_ACCESS_KEY_ID={ACCESS_KEY} AWS_SECRET_ACCESS_KEY={SECRET_KEY}", flush=True)
        sys.stdin.read()
    finally:
        server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
