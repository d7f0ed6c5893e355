"""Dashboards keep Grafana's published schema, and every panel can be read without its author."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dashboards.build import BOARDS, GENERATED, TAG
from tests.ops.tools import judge

SCHEMA = Path(__file__).parent / "grafana_schema"
FILES = sorted(GENERATED.glob("*.json"))


def boards() -> list[dict]:
    return [json.loads(path.read_text("utf-8")) for path in FILES]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """Grafana's types and the TypeScript compiler, pinned by package-lock.json."""
    folder = tmp_path_factory.mktemp("schema") / "check"
    shutil.copytree(SCHEMA, folder)
    judge("npm", "ci", "--ignore-scripts", cwd=folder)
    return folder


def put(folder: Path, name: str, content: dict) -> None:
    text = f"import type {{ Board }} from './board';\nexport const board: Board = {json.dumps(content)};\n"
    (folder / f"{name}.ts").write_text(text)


@pytest.mark.ops
def test_the_schema_accepts_them_and_can_refuse(workshop: Path) -> None:
    for path, content in zip(FILES, boards(), strict=True):
        put(workshop, path.stem, content)
    judge("node", "node_modules/typescript/bin/tsc", "-p", ".", cwd=workshop)
    spoilt = boards()[0]
    spoilt["panels"][1]["gridPos"] = {"x": "left"}
    put(workshop, "spoilt", spoilt)
    with pytest.raises(AssertionError, match=r"spoilt\.ts"):
        judge("node", "node_modules/typescript/bin/tsc", "-p", ".", cwd=workshop)


def test_they_find_one_another() -> None:
    assert {content["uid"] for content in boards()} == {board.uid for board in BOARDS}
    for content in boards():
        assert content["tags"] == [TAG]
        assert {link["type"] for link in content["links"]} == {"dashboards", "link"}
        names = [variable["name"] for variable in content["templating"]["list"]]
        assert names == ["datasource", "cluster", "instance", "rank", "group"]
        assert {entry["name"] for entry in content["annotations"]["list"]} == {
            "Violations",
            "Counted before the first scrape",
            "Sweeps",
        }


@pytest.mark.parametrize("content", boards(), ids=lambda content: content["uid"])
def test_panels_are_numbered_placed_and_explained(content: dict) -> None:
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith((".", "?")), panel["title"]
            assert panel["type"] == "text" or panel["targets"]
