"""One SGLang engine at a time, in a process of its own, for tests that run it on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import free_ports
from tests.connectors.sglang.support.engine_process import IMPORTED, EngineHost
from tests.connectors.support.forked import Template

HERE = Path(__file__).parent
ANSWER_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without sglang there is nothing to test: a skip that says so, and a failure where a CI must have it."""
    if importlib.util.find_spec("sglang") is not None:
        return
    if os.environ.get("CI"):
        mark: Any = pytest.mark.usefixtures("_sglang_is_missing")
    else:
        mark = pytest.mark.skip(reason="sglang is not installed; `make sglang` installs it beside a CPU torch")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(mark)


@pytest.fixture
def _sglang_is_missing() -> None:
    pytest.fail("CI is set and sglang is not installed; run `make sglang`")


@pytest.fixture(scope="session")
def on_cpu() -> None:
    """SGLang's classes can be used in this process, too."""
    from kvtier.testing import sglang_cpu

    sglang_cpu.install()


class Served:
    """An engine over kvtier, with rank 0's orders and metrics. `own` is a test's to keep answers in."""

    def __init__(
        self,
        model: Path,
        tiers: dict[str, Any],
        arguments: dict[str, Any],
        linker: dict[str, Any],
        more: dict[str, Any],
        witness: Path,
        template: Template,
    ) -> None:
        self.own: list[dict[str, Any]] = []
        self.port, self._control = free_ports(
            2, together=int(arguments.get("tp_size", 1)) * int(arguments.get("dp_size", 1))
        )
        extra = {
            "kvtier_config": {"version": 1, "tiers": tiers, **more},
            "recompute": "never",  # a tiny model computes faster than any disk reads
            "control": self._control,
            "witness": str(witness),
            "metrics_port": self.port,
            **linker,
        }
        self.host = EngineHost(
            {
                "model_path": str(model),
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": {
                    "linker": "TrialLinker",
                    "linker_module_path": "trial_linker",
                    "linker_extra_config": extra,
                },
                **arguments,
            },
            template,
        )

    def order(self, do: str, rank: int = 0, **named: Any) -> Any:
        """One verb of the TrialLinker."""
        with socket.create_connection(("127.0.0.1", self._control + rank), timeout=ANSWER_S) as line:
            line.sendall(json.dumps({"do": do, **named}).encode() + b"\n")
            answer = json.loads(line.makefile().readline())
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def steer(self, **wanted: Any) -> None:
        self.order("steer", **wanted)

    def push_down(self, *tiers: str) -> None:
        """All that was stored is durable, and then leaves these tiers and the device."""
        self.host.flush()
        assert self.order("flush") == 0
        for tier in tiers:
            self.order("evict", tier=tier)

    def read(self, tier: str) -> int:
        """Prompt tokens that requests were given from a tier so far."""
        return int(self.order("stats")["engine"]["tokens_read"].get(tier, 0))

    def metric(self, name: str, **labels: str) -> float:
        return metric_at(self.port, name, **labels)


class HiCache:
    """An engine under HiCache, with kvtier or SGLang's files as its storage."""

    def __init__(self, model: Path, folder: Path, backend: str, template: Template) -> None:
        (self.port,) = free_ports(1)
        extra: dict[str, Any] = {"file_storage_path": str(folder)}
        if backend == "kvtier":
            tiers = {"g2": {"capacity": "4MiB"}, "g3": {"path": str(folder), "capacity": "64MiB"}}
            extra = {
                "backend_name": "kvtier", "module_path": "kvtier.connectors.sglang.hicache",
                "class_name": "KVTierStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": True,
                "kvtier_config": {"version": 1, "tiers": tiers, "deadlines": {"get": "3s"}},
                "metrics_port": self.port,
            }  # fmt: skip
        self.host = EngineHost(
            {
                "model_path": str(model),
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "hicache_write_policy": "write_through",
                "hicache_io_backend": "direct",
                "hicache_mem_layout": "layer_first",
                "hicache_storage_backend": "dynamic" if backend == "kvtier" else "file",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps({**extra, "prefetch_threshold": 16}),
            },
            template,
        )

    def metric(self, name: str, **labels: str) -> float:
        return metric_at(self.port, name, **labels)


def metric_at(port: int, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.split("{")[0].split(" ")[0] == name and all(label in line for label in wanted)
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose greedy tokens depend on the whole prompt."""
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


def make_model(folder: Path, seed: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    # The wide initialiser matters: with the default one, greedy tokens hardly depend on the prompt.
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).float().eval().save_pretrained(folder)
    return folder


WINDOW = 64
LAYERS = "SSFSF"  # of windows and full


def _layer_types() -> list[str]:
    return [{"S": "sliding_attention", "F": "full_attention"}[kind] for kind in LAYERS]


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Mellum, whose windows SGLang keeps in a pool of their own: three layers in two parts."""
    import torch
    from transformers import MellumConfig, MellumForCausalLM

    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=len(LAYERS), num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, initializer_range=0.08, sliding_window=WINDOW, layer_types=_layer_types(),
        mlp_layer_types=["dense"] * len(LAYERS), num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mellum")
    MellumForCausalLM(config).float().eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Granite 4: three layers of Mamba 2 beside two of full attention. Their states forget slowly."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.15, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=256,
        position_embedding_type="nope", tie_word_embeddings=False, attention_multiplier=0.177, mamba_n_heads=8,
        mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=32,
        layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
    )  # fmt: skip
    made = GraniteMoeHybridForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, values in made.named_parameters():
            if name.endswith("A_log"):
                values.fill_(-6.0)
    folder = tmp_path_factory.mktemp("granite")
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 3, whose windows SGLang keeps whole, in the one pool."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=len(LAYERS), num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False, initializer_range=0.08, query_pre_attn_scalar=32,
        sliding_window=WINDOW, layer_types=_layer_types(),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gemma3")
    Gemma3ForCausalLM(config).float().eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """A process that has imported SGLang: an engine that is forked from it is spared most of its start."""
    template = Template(HERE / "support", IMPORTED)
    yield template
    template.close()


@pytest.fixture(scope="module")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory, template: Template) -> Iterator[Callable[..., Served]]:
    """Starts an engine; the one before it is ended first, unless it is to stay `beside`. All have one witness."""
    running: list[Served] = []
    witness = tmp_path_factory.mktemp("witness") / "blocks"

    def start(
        tiers: dict[str, Any], *, path: Path = model, beside: bool = False, arguments: dict[str, Any] | None = None,
        linker: dict[str, Any] | None = None, **config: Any,
    ) -> Served:  # fmt: skip
        while running and not beside:
            running.pop().host.close()
        running.append(Served(path, tiers, arguments or {}, linker or {}, config, witness, template))
        return running[-1]

    yield start
    for served in running:
        served.host.close()


@pytest.fixture
def hicache(model: Path, template: Template) -> Iterator[Callable[..., HiCache]]:
    """Starts an engine under HiCache; the one before it is ended first."""
    running: list[HiCache] = []

    def start(folder: Path, backend: str = "kvtier") -> HiCache:
        while running:
            running.pop().host.close()
        running.append(HiCache(model, folder, backend, template))
        return running[-1]

    yield start
    for engine in running:
        engine.host.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_cpu: None) -> Iterator[Callable[..., Any]]:
    """Makes a linker without an engine; the one before it is closed first."""
    from tests.connectors.sglang.support.linker_bench import Bench

    made: list[Any] = []

    def make(**changed: Any) -> Any:
        (tmp_path / "g3").mkdir(exist_ok=True)
        for old in made:
            old.linker.close()
        made.append(Bench(monkeypatch, tmp_path / "g3", **changed))
        return made[-1]

    yield make
    for old in made:
        old.linker.close()


def prompt_of(seed: int, length: int = 397) -> list[int]:
    """A prompt that shares no page with those of other seeds."""
    return [(i * 7919 + seed * 104729 + 13) % 1000 + 3 for i in range(length)]


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    return prompt_of


@pytest.fixture
def ports() -> Callable[..., list[int]]:
    return free_ports


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An S3 server."""
    from kvtier.testing.servers import SeaweedFS
    from tests.tiers.objects.support.s3 import running

    yield from running(SeaweedFS, tmp_path_factory)


@pytest.fixture
def damage() -> Callable[[Path], int]:
    return flip_bits


def flip_bits(folder: Path) -> int:
    """One bit in every 4 KiB of what lies in a G3 directory's segments or in a bucket's objects; how many."""
    flipped = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".mdb"):
        size = file.stat().st_size
        if size < 64 << 10:
            continue
        with open(file, "r+b") as stream:
            for offset in range(23, size, 4096):  # behind the magic of a frame: without it, an object is foreign
                stream.seek(offset)
                byte = stream.read(1)
                stream.seek(offset)
                stream.write(bytes([byte[0] ^ 1]))
                flipped += 1
    return flipped
