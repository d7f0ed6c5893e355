"""What must be decided before torch and Triton are imported."""

import os
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

# Workers share the cores: a second OpenMP thread in each only spins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM's n-gram drafts give OpenMP back as many threads as numba has, and torch uses them ever after.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# Of xdist's processes the one that starts the others runs no test: it need not load torch, while they wait.
if "PYTEST_XDIST_WORKER" in os.environ or not any(
    option == "-n" and number != "0" for option, number in pairwise(sys.argv)
):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from tests.sizes import BY_TURN, TURNS, WHOLE, of_turn, sized, sized_names, turn
from tests.unchecked import unchecked  # noqa: F401 - a fixture

# How long an example takes, or its draw, is a matter of the machine and of what else runs on it.
settings.register_profile(
    "tests", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# The longest files, which begin first, so that the workers end together. The first one is there because
# it must not run beside test_pod.py: two servers of two ranks each would spin on the same two cores.
_LONG = (
    "tests/engines/vllm/real/test_processes.py",
    "tests/engines/sglang/real/test_separated.py",
    "tests/engines/sglang/real/test_server.py",
    "tests/engines/sglang/real/test_processes.py",
    "tests/engines/sglang/real/test_drafts.py",
    "tests/engines/sglang/real/test_drafts_in_host_tier.py",
    "tests/engines/sglang/real/test_clean.py",
    "tests/reference_engine/test_disaggregated.py",
    "tests/e2e/test_two_processes.py",
    "tests/kernels/test_compile.py",
    "tests/runtime/test_models.py",
    "tests/cli/test_service_commands.py",
    "tests/runtime/test_trust_gate.py",
    "tests/ops/test_alerts.py",
    "tests/contracts/test_imports.py",
    "tests/runtime/test_speculative.py",
    "tests/runtime/report/test_swa_divergence.py",
    "tests/reference_engine/test_speculative.py",
    "tests/cli/test_refusals.py",
    "tests/runtime/test_faults.py",
    "tests/kernels/test_fingerprint.py",
    "tests/service/test_events.py",
    "tests/e2e/test_drill.py",
)


# Each of these starts several processes, whose ranks and servers spin while they wait: one file at a time.
_SPINNING = {
    f"tests/engines/sglang/real/test_{name}.py"
    for name in ("separated", "server", "processes", "demo", "bench", "differential")
}


def pytest_report_header() -> str | None:
    if os.environ.get(WHOLE) != BY_TURN or (own := turn()) is None:
        return None
    return f"sized tests: turn {own + 1} of {TURNS}; {WHOLE}=1 runs all of them"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _name(item) in _sized_in(item.path):
            item.add_marker("sized")
        if item.get_closest_marker("nightly") and not os.environ.get(WHOLE):
            item.add_marker(pytest.mark.skip(f"nightly: {WHOLE}=1 runs it"))
    items.sort(key=lambda item: _LONG.index(file) if (file := _file(item)) in _LONG else len(_LONG))
    if os.environ.get(WHOLE) == BY_TURN:
        marked = [item for item in items if item.get_closest_marker("sized")]
        others = set(marked).difference(of_turn(marked, turn()))
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=[item for item in marked if item in others])


@pytest.hookimpl(optionalhook=True)  # xdist asks; it need not be installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: the spinning files are taken for one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "spinning" if file in _SPINNING else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """CI's time is limited and its machines are not alike: what is late is skipped, by name."""
    if time.time() > float(os.environ.get("CANARY_TESTS_UNTIL", "inf")):
        pytest.skip("NOT RUN: the time for these tests is over (CANARY_TESTS_UNTIL)")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _name(item: pytest.Item) -> str:
    return item.nodeid.split("::")[1].partition("[")[0]


@cache
def _sized_in(path: Path) -> frozenset[str]:
    source = path.read_text(encoding="utf-8")
    return frozenset(sized_names(source) if sized.__name__ in source else ())
