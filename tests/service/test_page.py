"""The console's pages: static files that load nothing from elsewhere and hold no script of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "canary_obs/service/web"
PAGES = {"/": "overview.html", "/incidents/any": "incident.html", "/sign-in": "sign-in.html"}
_ASSET = re.compile(r'(?:src|href)="((?:\.\./)*)console/assets/([^"]+)"')


@pytest.mark.parametrize(("path", "file"), PAGES.items())
def test_a_page_is_served_with_a_strict_policy(client, path, file):
    answer = client.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (WEB / file).read_text("utf-8")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"


@pytest.mark.parametrize(("path", "file"), PAGES.items())
def test_what_a_page_loads_is_served_relative_to_it(client, path, file):
    found = _ASSET.findall((WEB / file).read_text("utf-8"))
    assert found
    for prefix, name in found:
        assert prefix == "../" * (path.count("/") - 1)
        answer = client.get(f"/console/assets/{name}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("file", sorted(WEB.iterdir()), ids=lambda file: file.name)
def test_the_files_load_nothing_from_elsewhere_and_run_no_inline_code(file):
    text = file.read_text("utf-8").replace("http://www.w3.org/", "")
    for foreign in (
        "http://",
        "https://",
        "//cdn",
        "@import",
        "eval(",
        "innerHTML",
        "localStorage",
        "style=",
    ):
        assert foreign not in text, foreign
    if file.suffix == ".html":
        assert re.search(r"<script(?![^>]*\bsrc=)", text) is None
        assert re.search(r"\son[a-z]+=|<style", text) is None
    imports = re.findall(r'from "\./([^"]+)"', text)
    assert {name for name in imports if not (WEB / name).is_file()} == set()


@pytest.mark.parametrize("name", ["sign-in.html", "..%2Fapp.py", "nothing.js", "app.py"])
def test_only_the_consoles_own_assets_are_served(client, name):
    assert client.get(f"/console/assets/{name}").status_code == 404
