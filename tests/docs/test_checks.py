"""docs/checks.md: which token sources each engine's views have, and who counts what is due."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from canary_kernels.layout import KNOWN_LAG
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter, PrefixCache
from canary_obs.engines.reference.adapter import ReferenceAdapter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/checks.md").read_text("utf-8")
ADAPTERS = {
    "reference engine": "canary_obs/engines/reference/adapter.py",
    "vLLM V1": "canary_obs/engines/vllm/runner_v1.py",
    "vLLM V2": "canary_obs/engines/vllm/runner_v2.py",
    "SGLang": "canary_obs/engines/sglang/batch_views.py",
}
OWNERS = {"EngineAdapter": EngineAdapter, "PrefixCache": PrefixCache}


def rows(title: str) -> list[list[str]]:
    """Cells of the first table under a title, without its head."""
    under = PAGE.split(f"# {title}\n", 1)[1]
    table = under[under.index("|") :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def token_sources(file: str) -> tuple[bool, bool, bool]:
    """Whether views have digests, expected_ids and known_digests, by the adapter's StepTypes."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "StepTypes"
    ]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    known = given.get("has_known_tokens", "False")
    return given["has_digests"] == "True", given["expected_ids"] != "None", known == "True"


def test_the_token_sources_are_those_of_the_adapters() -> None:
    table = rows("Tokens: `write_token` and `token`")
    described = {name: tuple(cell == "yes" for cell in cells) for name, *cells in table}
    assert described == {name: token_sources(file) for name, file in ADAPTERS.items()}


def test_step_types_are_read_right() -> None:
    types = ReferenceAdapter.step_types
    assert token_sources(ADAPTERS["reference engine"]) == (
        types.has_digests,
        types.expected_ids is not None,
        types.has_known_tokens,
    )


def test_every_account_of_an_adapter_is_listed() -> None:
    named = set(re.findall(r"`(?:EngineAdapter|PrefixCache)\.(\w+)`", str(rows("Accounts of what was due"))))
    assert named == {
        "forwards", "prefix_hits", "requests_scheduled", "compared_tables", "count", "allocation",
    }  # fmt: skip


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_method_of_the_contract_that_is_named_exists(file: str) -> None:
    text = (ROOT / "docs" / file).read_text("utf-8")
    for owner, name in re.findall(r"`(EngineAdapter|PrefixCache)\.(\w+)", text):
        assert hasattr(OWNERS[owner], name), f"{owner}.{name}"


def test_what_is_on_by_default() -> None:
    """`KV_CANARY_X` (on), (off), or (`value`): what the code has."""
    found = re.findall(r"`KV_CANARY_(\w+)` \((on|off|0: off|`[^`]+`)\)", PAGE)
    assert len(found) >= 7
    for name, said in found:
        value = getattr(CanaryConfig(), name.lower())
        if isinstance(value, bool):
            assert said == ("on" if value else "off"), name
        else:
            assert said == ("0: off" if value == 0 else f"`{value}`"), name


def test_how_old_the_schedulers_tokens_may_be() -> None:
    assert f"nothing of the last {KNOWN_LAG} tokens" in " ".join(PAGE.split())
