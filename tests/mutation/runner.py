"""Plants each defect in a copy of the tree and runs the tests that must notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from tests.mutation.mutant import Mutant

ROOT = Path(__file__).parents[2]
_PARTS = (
    "canary_obs",
    "kernels",
    "tests",
    "docs",
    "pyproject.toml",
    "CHANGELOG.md",
    "README.md",
    "SECURITY.md",
)
_PASSED, _FAILED = 0, 1  # pytest's exit codes
_SECONDS = 300
_PART = 60  # tests that run at once on sources without a defect
_FORKS = Path(__file__).with_name("forks.py")
_PROFILE = "defects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a defect: killed, survived, or why it could not be tried."""

    mutant: Mutant
    result: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a test failed because of it."""
        return self.result == "killed"

    def __str__(self) -> str:
        change = f"{self.mutant.old.strip()!r} -> {self.mutant.new.strip()!r}"
        return f"{self.result:9s} {self.seconds:5.1f} s  {self.mutant.file}: {change}"


class Tree:
    """A copy of the sources, changed and put right again, so that what is compiled stays valid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for part in _PARTS:
            source, target = ROOT / part, folder / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("results"))
            else:
                shutil.copy2(source, target)
        self._output = folder / "output"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "kernels")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("CANARY_TESTS_UNTIL", None)  # what is skipped would let a defect survive
        self._forks = subprocess.Popen(
            [sys.executable, "-P", str(_FORKS), str(_SECONDS), str(self._output), _PROFILE],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._forks.communicate()  # closes its input, which ends it

    @property
    def printed(self) -> str:
        """End of pytest's last output."""
        return self._output.read_text(errors="replace")[-3000:]

    def run(self, tests: Iterable[str]) -> int:
        """Exit code of pytest on some tests; FAILED as well when they do not end."""
        # The same draws everywhere: where CI is set, hypothesis takes a profile that ignores the seed.
        draws = [f"--hypothesis-profile={_PROFILE}", "--hypothesis-seed=0"]
        options = [
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            # No defect's tests use these, and a run imports them for half a second.
            "-p",
            "no:schemathesis",
            "-p",
            "no:xdist",
            "-W",
            "ignore:Module already imported",
        ]
        arguments = [*options, *draws, *dict.fromkeys(tests)]
        to, answers = self._forks.stdin, self._forks.stdout
        assert to is not None
        assert answers is not None
        print(json.dumps(arguments), file=to, flush=True)
        code = json.loads(answers.readline())
        return _FAILED if code is None else int(code)

    def run_all(self, tests: Sequence[str]) -> int:
        """As `run`, of many tests: a part after the other, each of which has the time of one run."""
        parts = [tests[at : at + _PART] for at in range(0, len(tests), _PART)]
        return next((code for code in map(self.run, parts) if code != _PASSED), _PASSED)

    def try_out(self, mutant: Mutant) -> Verdict:
        """Plant, test, put right."""
        started = time.monotonic()
        path = self._folder / mutant.file
        before, stamp = path.read_text(encoding="utf-8"), path.stat()
        if before.count(mutant.old) != 1:
            result = f"text found {before.count(mutant.old)} times"
        else:
            path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
            code = self.run(mutant.tests)
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            result = {_PASSED: "survived", _FAILED: "killed"}.get(code, f"pytest ended with {code}")
        return Verdict(mutant=mutant, result=result, seconds=time.monotonic() - started)


def try_all(mutants: Iterable[Mutant], folder: Path, workers: int) -> Iterator[Verdict]:
    """Verdicts in order; raises RuntimeError when a test fails without any defect."""
    mutants = tuple(mutants)
    idle: SimpleQueue[Tree] = SimpleQueue()
    with ThreadPoolExecutor(workers) as pool, ExitStack() as opened:
        made = list(pool.map(lambda number: Tree(folder / str(number)), range(workers)))
        trees = [opened.enter_context(tree) for tree in made]
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        # Each tree its share: what they compile on the way serves the mutants after them.
        shares = [tests[number::workers] for number in range(workers)]
        for tree, code in zip(trees, pool.map(Tree.run_all, trees, shares), strict=True):
            if code != _PASSED:
                raise RuntimeError(f"pytest ended with {code} on sources without a defect:\n{tree.printed}")
            idle.put(tree)

        def turn(mutant: Mutant) -> Verdict:
            tree = idle.get()
            try:
                return tree.try_out(mutant)
            finally:
                idle.put(tree)

        yield from pool.map(turn, mutants)
