"""A child answers, is too late, dies, and goes with all that it started."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kvtier.testing import Child, ChildFailed

PROGRAM = """
import json, os, subprocess, sys, time
orders, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
def say(answer):
    print(json.dumps(answer), file=answers, flush=True)
say("ready")
print("noise on its standard output", flush=True)
for line in orders:
    order = json.loads(line)
    if order == "sleep":
        time.sleep(60)
    elif order == "die":
        os._exit(3)
    elif order == "spawn":
        say(subprocess.Popen(["sleep", "60"]).pid)
    else:
        say({"asked": order})
sys.exit(7)
"""


def start() -> Child:
    return Child([sys.executable, "-c", PROGRAM], 20)


def test_orders_are_answered_and_noise_is_kept_apart() -> None:
    child = start()
    assert child.ready == "ready"
    assert [child.ask(order, 10) for order in (1, {"two": "ü"})] == [{"asked": 1}, {"asked": {"two": "ü"}}]
    assert "noise" in child.last_words()
    assert child.end(10) == 7


@pytest.mark.parametrize(("order", "what"), [("sleep", "did not answer"), ("die", "died")])
def test_one_that_gives_no_answer_is_ended_and_its_last_words_are_told(order: str, what: str) -> None:
    child = start()
    with pytest.raises(ChildFailed, match=f"(?s){what}.*noise"):
        child.ask(order, 1)
    assert child.process.poll() is not None
    with pytest.raises(ChildFailed):
        child.ask(1, 1)


def test_killing_it_ends_what_it_started() -> None:
    child = start()
    grandchild = child.ask("spawn", 10)
    child.kill()
    child.kill()
    deadline = time.monotonic() + 10
    while _state(grandchild) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _state(pid: int) -> str:
    """Z also where there is no such process any more."""
    out = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return out.stdout.strip()[:1] or "Z"
