"""The pictures are what their sources say, and name modules that are there."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kvtier

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
SOURCES = sorted(PICTURES.glob("*.toml"))
SVG = "{http://www.w3.org/2000/svg}"
# Where a package lies whose folder is not inside kvtier/.
OUTSIDE = ("connectors", "kernels")

each = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@pytest.fixture(scope="module")
def draw() -> Callable[[str], str]:
    function: Callable[[str], str] = runpy.run_path(str(PICTURES / "draw.py"))["draw"]
    return function


def said(source: Path) -> list[str]:
    """Every text that the source asks for, without the marks of lines."""
    picture = tomllib.loads(source.read_text())
    texts = [picture["title"], picture["desc"]]
    for box in picture["box"]:
        texts += [re.sub("^[#`~!] ", "", line) for line in box.get("lines", ())]
        texts += [box["code"]] if "code" in box else []
    return texts + [arrow["label"] for arrow in picture["arrow"] if "label" in arrow]


def modules(source: Path) -> set[str]:
    """The modules and names of kvtier's that a source shows."""
    boxes = tomllib.loads(source.read_text())["box"]
    shown = [line.removeprefix("` ") for box in boxes for line in box.get("lines", ()) if line.startswith("` ")]
    shown += [box["code"] for box in boxes if "code" in box]
    return {name for text in shown for name in text.split(", ")}


def test_there_are_pictures() -> None:
    assert [source.stem for source in SOURCES] == ["block", "tiers"]


@each
def test_a_picture_is_what_its_source_draws(source: Path, draw: Callable[[str], str]) -> None:
    committed = source.with_suffix(".svg").read_text()
    assert draw(source.read_text()) == committed, "run `make pictures`"


@each
def test_labels_agree_with_the_source(source: Path) -> None:
    tree = ElementTree.parse(source.with_suffix(".svg")).getroot()
    found = [node.text for tag in ("title", "desc", "text") for node in tree.iter(SVG + tag)]
    assert sorted(text or "" for text in found) == sorted(said(source))


@each
def test_modules_named_are_there(source: Path) -> None:
    for name in modules(source):
        parts = name.removeprefix("kvtier.").split(".")
        place = (ROOT if parts[0] in OUTSIDE else ROOT / "kvtier").joinpath(*parts)
        assert place.is_dir() or place.with_suffix(".py").is_file() or name.removeprefix("kvtier.") in kvtier.__all__, (
            name
        )


@each
def test_nothing_is_fetched_and_nothing_tells_of_a_tool(source: Path) -> None:
    text = source.with_suffix(".svg").read_text()
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    root = ElementTree.fromstring(text)
    assert "viewBox" in root.attrib and not {"width", "height"} & set(root.attrib)
    assert not {node.tag for node in root.iter()} & {SVG + tag for tag in ("image", "script", "foreignObject")}


def test_a_text_that_may_not_fit_is_refused(draw: Callable[[str], str]) -> None:
    source = SOURCES[0].read_text()
    line = next(line for line in said(SOURCES[0])[2:] if len(line) > 20)
    with pytest.raises(ValueError, match="may not fit"):
        draw(source.replace(line, line * 4))


@pytest.mark.parametrize("colours", ["LIGHT", "DARK"])
def test_text_stands_out_from_what_is_behind_it(colours: str) -> None:
    """A contrast of at least 4.5 to 1 (WCAG AA) for every colour of text on every box, and on the paper."""
    palette: dict[str, str] = runpy.run_path(str(PICTURES / "draw.py"))[colours]
    fills = [value.partition(" ")[0] for name, value in palette.items() if " " in value or name == "paper"]
    for name in ("ink", "faint", "code", "down", "up", "out"):
        behind = fills if name in ("ink", "code") else [palette["paper"], palette["plain"].partition(" ")[0]]
        for fill in behind:
            low, high = sorted((luminance(palette[name]), luminance(fill)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, fill)


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
