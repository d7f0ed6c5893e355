"""`canary-obs bench cpu` on a small step."""

from canary_obs.bench.cpu import CpuPlan, run_cpu


def test_every_operation_of_both_backends_is_timed():
    result = run_cpu(CpuPlan(requests=2, prefix=20, layers=1, rounds=3, seed=1))
    assert result.failed == {}
    operations = {"batch", "compare", "write", "verify_head", "complete", "verify_tail", "step"}
    figures = result.figures
    assert result.plan["requests"] == 2
    for backend in ("numba_us", "torch_us"):
        assert set(figures[backend]) == operations
        assert figures[backend]["step"] >= max(figures[backend].values()) > 0
    assert result.faults == {"violations": 0}
    assert {"commit", "cpu", "torch", "time"} <= result.environment.keys()
