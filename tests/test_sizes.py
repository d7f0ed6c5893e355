"""Which tests `make test-slow` runs a second time, whole, and in the turn of which commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.sizes import BY_TURN, TURNS, WHOLE, of_turn, sized, sized_names, turn

CASES = range(sized(TURNS, 1))
ROOT = Path(__file__).parents[1]

SOURCE = """
from tests.sizes import sized

TIMES = sized(2, 1)
TWICE: int = 2 * TIMES
OTHER = 3

@pytest.fixture
def rig():
    return Rig(TWICE)

def helper():
    return range(TIMES)

def test_by_a_fixture(rig): ...

def test_by_a_helper():
    assert helper()

@settings(max_examples=sized(2, 1))
def test_by_its_decorator(): ...

class TestGroup:
    def test_inside(self):
        assert TWICE

def test_of_its_own(other):
    assert OTHER
"""


def test_a_test_is_sized_by_whatever_it_uses() -> None:
    assert {name for name in sized_names(SOURCE) if name.lower().startswith("test")} == {
        "test_by_a_fixture", "test_by_a_helper", "test_by_its_decorator", "TestGroup"
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_such_a_test_is_marked(request: pytest.FixtureRequest, case: int) -> None:
    assert case in CASES
    assert request.node.get_closest_marker("sized") is not None


def test_another_one_is_not(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("sized") is None


def test_a_module_without_sizes_has_none() -> None:
    assert sized_names("TIMES = 1\n\ndef test_it(): assert TIMES\n") == set()


def test_files_of_real_engines_are_not_named_where_no_engine_is_installed() -> None:
    """pytest collects a file that is named, whatever its folder's conftest.py ignores."""
    print_them = ["--no-print-directory", "--eval", "print-them: ; @echo $(WHOLE_TESTS)", "print-them"]
    named = subprocess.run(["make", "-C", str(ROOT), *print_them], capture_output=True, text=True, check=True)
    files = [Path(name) for name in named.stdout.split()]
    assert Path("tests/test_sizes.py") in files
    assert [file for file in files if "real" in file.parts] == []


def test_the_turns_of_three_commits_run_everything_once() -> None:
    everything = list(range(10))
    assert sorted(one for turn in range(TURNS) for one in of_turn(everything, turn)) == everything
    assert of_turn(everything, None) == everything


@pytest.mark.parametrize(
    ("commit", "value", "expected"),
    [
        ("00000004" + 32 * "f", None, 1),
        ("00000004" + 32 * "f", BY_TURN, 1),
        ("00000005" + 32 * "f", BY_TURN, 2),
        ("00000004" + 32 * "f", "1", None),
        ("", BY_TURN, None),  # no checkout of git
    ],
)
def test_the_commit_says_whose_turn_it_is(
    monkeypatch: pytest.MonkeyPatch, commit: str, value: str | None, expected: int | None
) -> None:
    done = subprocess.CompletedProcess((), 0, stdout=commit)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.delenv(WHOLE, raising=False)
    if value is not None:
        monkeypatch.setenv(WHOLE, value)
    assert turn() == expected


def test_pytest_runs_those_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WHOLE, BY_TURN)
    command = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "sized", "--rootdir"]
    done = forked.run("pytest", *command, str(ROOT), __file__, env=os.environ)
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == of_turn([f"test_such_a_test_is_marked[{case}]" for case in range(TURNS)], turn())
