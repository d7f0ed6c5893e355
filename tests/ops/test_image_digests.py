"""`make image-digests` pins every foreign image, once, and nothing else. No registry is asked here."""

from __future__ import annotations

import pytest

from tools.image_digests import FILES, pinned

OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64


def test_every_foreign_image_of_our_files_is_found() -> None:
    asked: set[str] = set()
    for path in FILES:
        text = path.read_text("utf-8")
        result = pinned(text, lambda name: asked.add(name) or OLD)
        again = pinned(result, lambda _name: NEW)
        assert again == result.replace(OLD, NEW)
        for line in result.splitlines():
            if line.startswith("FROM ") or line.strip().startswith("image: "):
                assert (OLD in line) != ("canary-obs" in line), line
        assert result.replace(f"@{OLD}", "") == text
    assert {name.partition(":")[0].rpartition("/")[2] for name in asked} == {
        "alertmanager", "grafana", "opentelemetry-collector", "prometheus", "python", "tempo",
    }  # fmt: skip


def test_the_name_of_a_stage_stays() -> None:
    text = "FROM python:3.11-slim AS build\nCOPY --from=build /a /b\n"
    expected = f"FROM python:3.11-slim@{OLD} AS build\nCOPY --from=build /a /b\n"
    assert pinned(text, lambda _name: OLD) == expected


@pytest.mark.parametrize("answer", ["", "latest", "sha256:12", OLD + "\n"])
def test_what_is_no_digest_is_not_written(answer: str) -> None:
    with pytest.raises(ValueError, match="python:3"):
        pinned("FROM python:3\n", lambda _name: answer)
