"""Whether the owner of a reservation is alive."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.tiers.disk.owner import Owner
from tests.support.waiting import eventually
from tests.tiers.disk.support.subprocesses import ROOT, environment


def test_a_live_but_stopped_owner_keeps_its_slots() -> None:
    """Reservations go by liveness, not by age."""
    me = Owner.current()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        started = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
        other = Owner(sleeper.pid, started, me.pid_namespace, me.boot, 5)
        sleeper.send_signal(signal.SIGSTOP)
        assert other.alive(me)
        assert not Owner(sleeper.pid, started + 1, me.pid_namespace, me.boot, 5).alive(me), "its id was used again"
        assert not Owner(sleeper.pid, started, me.pid_namespace, bytes(16), 5).alive(me), "an earlier boot"
        assert not Owner(me.pid, me.started, me.pid_namespace, me.boot, 2).alive(me), "an earlier incarnation of us"
        sleeper.kill()
        assert eventually(lambda: not other.alive(me)), "a zombie cannot write"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not other.alive(me)


ALIVE = """
import sys
from kvtier.tiers.disk.owner import Owner
from tests.support.waiting import eventually
print(Owner.decode(bytes.fromhex(sys.argv[1])).alive(Owner.current()))
"""


def test_an_owner_is_alive_in_another_time_namespace() -> None:
    """There the same process seems to have been started at another time after the boot."""
    words = [shutil.which("unshare") or "", "--time", "--boottime", "864000", "--fork"]
    if not words[0] or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a time namespace")
    words += [sys.executable, "-c", ALIVE, Owner.current().encode().hex()]
    told = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert told.stdout == "True\n"
