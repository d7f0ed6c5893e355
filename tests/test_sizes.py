"""Which tests `make test-slow` runs a second time, whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sizes import sized, sized_names

EXAMPLES = sized(2, 1)

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


def test_such_a_test_is_marked(request: pytest.FixtureRequest) -> None:
    assert EXAMPLES
    assert request.node.get_closest_marker("sized") is not None


def test_another_one_is_not(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("sized") is None


def test_a_module_without_sizes_has_none() -> None:
    assert sized_names("TIMES = 1\n\ndef test_it(): assert TIMES\n") == set()


def test_files_of_real_engines_are_not_named_where_no_engine_is_installed() -> None:
    """pytest collects a file that is named, whatever its folder's conftest.py ignores."""
    print_them = ["--no-print-directory", "--eval", "print-them: ; @echo $(WHOLE_TESTS)", "print-them"]
    root = Path(__file__).parents[1]
    named = subprocess.run(["make", "-C", str(root), *print_them], capture_output=True, text=True, check=True)
    files = [Path(name) for name in named.stdout.split()]
    assert Path("tests/test_sizes.py") in files
    assert [file for file in files if "real" in file.parts] == []
