"""Every seeded defect is killed by the suite, by the test that it names."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from tests import forked, mutation
from tests.mutation import runner
from tests.mutation.mutant import Mutant
from tests.mutation.runner import ROOT, Tree, try_all
from tests.sizes import TURNS, WHOLE, of_turn, turn

_MODULES = [import_module(f"{mutation.__name__}.{found.name}") for found in iter_modules(mutation.__path__)]
MUTANTS = [mutant for module in _MODULES for mutant in getattr(module, "ALL", ())]
WORKERS = 2


def test_every_defect_applies() -> None:
    stale: list[object] = []
    for mutant in MUTANTS:
        if _read(mutant.file).count(mutant.old) != 1 or mutant.old == mutant.new:
            stale.append(mutant)
        for test in mutant.tests:
            path, name, *_ = f"{test}::".split("::")
            if not {f"def {name.partition('[')[0]}", f"class {name}"} & _defined(path):
                stale.append(test)
    assert stale == []


def test_every_case_that_a_defect_names_is_collected() -> None:
    """A case that is called otherwise by now would end the long run before its first defect."""
    cases = {test for mutant in MUTANTS for test in mutant.tests if "[" in test}
    files = sorted({case.partition("::")[0] for case in cases})
    command = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    done = forked.run("pytest", *command, *(str(ROOT / file) for file in files), env=os.environ)
    assert cases - set(done.stdout.splitlines()) == set()


def _defined(path: str) -> set[str]:
    return set(re.findall(r"^ *((?:def|class) \w+)", _read(path), re.MULTILINE))


def _read(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_many_tests_run_in_parts_each_of_which_has_the_time_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine all of them at once had not ended when that time was over."""
    runs = list[int]()
    monkeypatch.setattr(runner, "_PART", 1)
    monkeypatch.setattr(runner, "_PARTS", ("tests/mutation",))
    monkeypatch.setattr(Tree, "run", lambda _, tests: runs.append(len(tests)) or 1 - len(tests))
    (no_forks := tmp_path / "nothing.py").touch()
    monkeypatch.setattr(runner, "_FORKS", no_forks)
    file, named = "tests/mutation/mutant.py", ("one", "two", "three")
    list(try_all([Mutant(file, "def mutants(", "def mutants_(", named)], tmp_path, 1))
    assert runs[:3] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_defect_is_killed(tmp_path: Path) -> None:
    verdicts = []
    own = turn()
    print("all defects" if own is None else f"turn {own + 1} of {TURNS}; {WHOLE}=1 tries all defects")
    for verdict in try_all(of_turn(MUTANTS, own), tmp_path, WORKERS):
        print(verdict)
        verdicts.append(verdict)
    print(f"{sum(verdict.killed for verdict in verdicts)} of {len(verdicts)} killed")
    assert [verdict for verdict in verdicts if not verdict.killed] == []
