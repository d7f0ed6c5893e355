"""`canary-obs bench cpu` on a small step."""

import json

from canary_obs.bench.cpu import CpuPlan, run_cpu


def test_every_operation_of_both_backends_is_timed(capsys):
    assert run_cpu(CpuPlan(requests=2, prefix=20, layers=1, rounds=3, seed=1, json=True)) == 0
    result = json.loads(capsys.readouterr().out)
    names = {"batch", "compare", "write", "verify_head", "complete", "verify_tail", "step"}
    assert result["requests"] == 2
    for backend in ("numba_us", "torch_us"):
        assert set(result[backend]) == names
        assert result[backend]["step"] >= max(result[backend].values()) > 0
    assert result["violations"] == 0
