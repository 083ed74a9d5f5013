"""Two vLLM replicas on one bucket: prompt tokens that they compute, by who places the requests.

    python benchmarks/two_replicas.py --dynamo PYTHON --save benchmarks/results

PYTHON has Dynamo's selection service: python -m venv DIR && DIR/bin/pip install --no-deps ai-dynamo-runtime &&
DIR/bin/pip install uvloop 'pydantic<2.14'. Each replica has a G2 of its own and shares G4, a `file://` bucket. The
packaged slice of 12 coding agents (`kvtier.bench.peers.prompts.agents`), whose requests come one after another as they
did, is placed

    round_robin    in turn
    selector       by Dynamo's selector, which knows of G1 and G2 by the replicas' KV events
    killed         by the selector; halfway the replica that runs a request is killed, and its request goes to the other

The selector draws between replicas that know as much of a prompt: where no request runs beside another, that decides
how many of the agents each replica gets. So `selector` is run `--draws` times; its figures are those of the median, and
`selector_draws` has what each draw computed.

Each of the trace's blocks of 512 tokens stands for one block of 32. `computed` are the prompt tokens that a replica did
not have, by its own account. Answers are compared with those of round robin: `differ` counts requests with other tokens
than there, but for ties.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from kvtier.bench.peers import vllm
from kvtier.bench.peers.contest import ENVIRONMENT, Contest, differences, end_process, error_in
from kvtier.bench.peers.prompts import BLOCK_BYTES, BLOCK_TOKENS, agents, make_model, prompts_of
from kvtier.bench.record import record, save
from kvtier.testing.servers import free_ports

NAME = "two_replicas"
MODEL = "tiny"
GPU_BLOCKS, HOST_BLOCKS = 160, 512
"""Of a replica. All prompts together have 555 different blocks."""
START_S = 60.0
EVENTS_S = 2.0
"""After an answer, for its events on their way to the selector: at most. `late` counts the requests for which that was
not enough."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamo", type=Path, required=True, help="an interpreter that has ai-dynamo-runtime")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--host-blocks", type=int, default=HOST_BLOCKS, help="of each replica's G2")
    parser.add_argument("--draws", type=int, default=3, help="runs with the selector")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    results = measured(given.dynamo, given.requests, given.host_blocks, given.draws)
    entry = record(NAME, ["python", *sys.argv], results)
    print(json.dumps(results, indent=2))
    if given.save:
        save(entry, given.save)


def measured(dynamo: Path, requests: int, host_blocks: int = HOST_BLOCKS, draws: int = 3) -> dict[str, Any]:
    """Figures by who places the requests."""
    prompts = prompts_of(agents()[:requests])
    out: dict[str, Any] = {"requests": len(prompts), "prompt_tokens": sum(map(len, prompts))}
    out |= {"gpu_blocks": GPU_BLOCKS, "host_blocks": host_blocks}
    truth: list[dict[str, Any]] = []
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("round_robin", *["selector"] * draws, "killed"):
        with tempfile.TemporaryDirectory(prefix="kvtier-replicas-") as folder, ExitStack() as stack:
            run = Run(stack, Path(folder), prompts, host_blocks, None if name == "round_robin" else dynamo)
            answers = run.replay(kill_at=len(prompts) // 2 if name == "killed" else None)
        truth = truth or answers
        found.setdefault(name, []).append({**_figures(prompts, answers, truth), "late": run.late})
    for name, runs in found.items():
        runs.sort(key=lambda one: one["computed"])
        out[name] = runs[len(runs) // 2]
    out["selector_draws"] = [one["computed"] for one in found["selector"]]
    out["selector_to_round_robin"] = round(out["selector"]["computed"] / out["round_robin"]["computed"], 4)
    return out


def _figures(prompts: list[list[int]], answers: list[dict[str, Any]], truth: list[dict[str, Any]]) -> dict[str, Any]:
    wrong, tied = differences(
        [one["tokens"] for one in answers], [one["tokens"] for one in truth], [one["margins"] for one in truth]
    )
    computed = [len(prompt) - one["cached"] for prompt, one in zip(prompts, answers, strict=True)]
    return {
        "computed": sum(computed),
        "computed_second_half": sum(computed[len(computed) // 2 :]),
        "by_replica": [sum(one["replica"] == replica for one in answers) for replica in (1, 2)],
        "sent_again": sum(one["sent"] - 1 for one in answers),
        "differ": wrong,
        "differ_at_a_tie": tied,
    }


class Run:
    """Two replicas, and the selector if they have one. All end with the stack."""

    def __init__(
        self, stack: ExitStack, folder: Path, prompts: list[list[int]], host_blocks: int, dynamo: Path | None
    ) -> None:
        self._prompts = prompts
        self.late = 0
        contest = Contest(make_model(folder / "tiny-llama"), prompts, GPU_BLOCKS, host_blocks, folder, again=0)
        self._replicas = {number: Replica(stack, contest, number) for number in (1, 2)}
        self._selector = None if dynamo is None else Selector(stack, dynamo, folder / "selector.log")
        for number, replica in self._replicas.items():
            replica.ready()
            if self._selector is not None:
                self._selector.add(number, replica)

    def replay(self, kill_at: int | None = None) -> list[dict[str, Any]]:
        """What the replicas reported, with the one that answered, and how often the request was sent."""
        turns, answers = cycle(self._replicas), []
        for place, prompt in enumerate(self._prompts):
            sent, answer = 0, None
            while answer is None:
                number = next(turns) if self._selector is None else self._selector.place(prompt)
                sent += 1
                self._replicas[number].ask(prompt)
                if place == kill_at and sent == 1:
                    self._replicas[number].kill()
                answer = self._replicas[number].answer()
                if answer is None:
                    assert self._selector is not None
                    self._selector.remove(number)
            answers.append({**answer, "replica": number, "sent": sent})
            if self._selector is not None:
                self.late += not self._selector.heard(number, prompt, EVENTS_S)
        return answers


class Replica:
    """An engine over G2 and the bucket in `contest.folder`, which starts."""

    def __init__(self, stack: ExitStack, contest: Contest, number: int) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        self._log = contest.folder / f"replica-{number}.log"
        tiers = {
            "g2": {"capacity": contest.host_blocks * BLOCK_BYTES},
            "g4": {"url": f"file://{contest.folder / 'bucket'}"},
        }
        published = {"endpoint": _all(self.events), "replay_endpoint": _all(self.replay)}
        more = {
            "kv_transfer_config": {
                "kv_connector": "KVTierConnector",
                "kv_connector_module_path": "kvtier.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "kvtier_config": {"tiers": tiers},
                    "lookup_deadline": "10s",
                    "recompute": "never",  # so small a model computes faster than any bucket delivers
                },
            },
            "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", **published},
        }
        errors = stack.enter_context(self._log.open("w"))
        self._process = subprocess.Popen(
            [*ENVIRONMENT, *vllm.command(contest, "kvtier")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        stack.callback(end_process, self._process, 0.0)
        self._say(vllm.job(contest, more, None, margins=True))

    def ready(self) -> None:
        if self.answer() is None:
            raise SystemExit(f"a replica did not start: {error_in(self._log.read_text())}")

    def ask(self, prompt: list[int]) -> None:
        with suppress(BrokenPipeError):  # it was killed as it had just answered: it has no answer to this one
            self._say(prompt)

    def answer(self) -> dict[str, Any] | None:
        """The next line of its report; None where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def kill(self) -> None:
        """In the midst of a request."""
        time.sleep(0.05)
        end_process(self._process, 0.0)

    def _say(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()


def _all(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "*")


class Selector:
    """Dynamo's selection service."""

    def __init__(self, stack: ExitStack, python: Path, log: Path) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        out = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            [str(python), "-m", "dynamo.select_service", "--port", str(port), "--threads", "1"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        stack.callback(end_process, process, 0.0)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._call("/health")
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the selector did not start: {log.read_text()[-300:]}") from None
                time.sleep(0.1)

    def add(self, number: int, replica: Replica) -> None:
        """A replica that may be chosen."""
        self._call("/workers", {
            "worker_id": number, "model_name": MODEL, "endpoint": f"http://replica-{number}",
            "block_size": BLOCK_TOKENS, "kv_events_endpoints": {"0": replica.events},
            "replay_endpoint": replica.replay, "max_num_batched_tokens": 512, "total_kv_blocks": GPU_BLOCKS,
        })  # fmt: skip

    def remove(self, number: int) -> None:
        """A replica that is gone."""
        self._call(f"/workers/{number}", method="DELETE")

    def place(self, prompt: list[int]) -> int:
        """The replica for a prompt."""
        return int(self._call("/select", {"model_name": MODEL, "token_ids": prompt})["worker_id"])

    def heard(self, number: int, prompt: list[int], most_s: float) -> bool:
        """Wait until it knows that this replica has the whole prompt in G1; whether it did in time."""
        asked, until = {"model_name": MODEL, "token_ids": prompt}, time.monotonic() + most_s
        while time.monotonic() < until:
            known = {worker["worker_id"]: worker for worker in self._call("/overlap_scores", asked)["workers"]}
            if known[number]["device_blocks"] >= len(prompt) // BLOCK_TOKENS:
                return True
            time.sleep(0.01)
        return False

    def _call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        asked = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.loads(answer.read() or b"null")


if __name__ == "__main__":
    main()
