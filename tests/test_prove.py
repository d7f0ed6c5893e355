"""In which order the GPU proofs run, with commands that need no GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.gpu import prove
from tests.gpu.prove import Proof, proofs, run_all

# Waits for a file, so that the order does not depend on timing; then records on which devices it ran.
_SCRIPT = """
import os, pathlib, sys, time
folder, name, awaited = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
end = time.monotonic() + 30
while awaited and not (folder / awaited).exists() and time.monotonic() < end:
    time.sleep(0.01)
with (folder / "order").open("a") as order:
    order.write(f"{name} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
(folder / name).touch()
sys.exit(name == "wrong")
"""


def proof(folder: Path, name: str, awaited: str = "", **facts: object) -> Proof:
    command = sys.executable, "-c", _SCRIPT, str(folder), name, awaited
    return Proof(name=name, command=command, **facts)


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().splitlines()


def test_with_one_gpu_proofs_that_need_it_come_last(tmp_path: Path) -> None:
    wanted = [
        proof(tmp_path, "soak", "suite", long=True), proof(tmp_path, "bench", needs_gpu=True),
        proof(tmp_path, "suite"), proof(tmp_path, "host", needs_host=True), proof(tmp_path, "ranks", gpus=2),
    ]  # fmt: skip
    summary = run_all(wanted, 1, tmp_path)
    assert order(tmp_path) == ["host 0", "suite 0", "soak 0", "bench 0"]
    assert summary.outcomes["ranks"] == {"not_run": "needs 2 GPUs, here are 1"}
    assert not summary.ok  # a proof was not run


def test_with_two_gpus_proofs_that_need_one_run_during_the_soak_and_the_rest_sees_both(
    tmp_path: Path,
) -> None:
    wanted = [
        proof(tmp_path, "soak", "ranks", long=True), proof(tmp_path, "suite"),
        proof(tmp_path, "bench", needs_gpu=True), proof(tmp_path, "ranks", gpus=2),
        proof(tmp_path, "host", needs_host=True),
    ]  # fmt: skip
    summary = run_all(wanted, 2, tmp_path)
    assert order(tmp_path) == ["host 0", "bench 1", "suite 0,1", "ranks 0,1", "soak 0"]
    assert summary.ok
    written = json.loads((tmp_path / "summary.json").read_text())
    assert {name: facts["exit"] for name, facts in written.items()} == dict.fromkeys(summary.outcomes, 0)


def test_without_the_soak_proofs_that_need_the_host_still_run_first(tmp_path: Path) -> None:
    wanted = [
        proof(tmp_path, "host", needs_host=True), proof(tmp_path, "suite"),
        proof(tmp_path, "bench", needs_gpu=True),
    ]  # fmt: skip
    run_all(wanted, 2, tmp_path)
    assert order(tmp_path) == ["host 0", "bench 1", "suite 0,1"]


def test_a_failed_proof_is_reported_and_the_others_run(tmp_path: Path) -> None:
    summary = run_all(
        [proof(tmp_path, "soak", long=True), proof(tmp_path, "wrong"), proof(tmp_path, "more")], 1, tmp_path
    )
    assert (summary.outcomes["wrong"]["exit"], summary.outcomes["more"]["exit"]) == (1, 0)
    assert not summary.ok


def test_every_proof_is_a_command_in_the_readme(tmp_path: Path) -> None:
    found = proofs(tmp_path, 1200.0)
    assert [each.name for each in found if each.long] == ["soak"]
    assert {each.name for each in found if each.needs_host} == {"kernels", "step", "pipeline", "patrol"}
    benches = [f"{name}_{runner}" for name in ("vllm", "load", "hit") for runner in ("v2", "v1")]
    assert [each.name for each in found if each.needs_gpu] == benches
    assert len({each.name for each in found}) == len(found) == 19
    readme = (Path(__file__).parent / "gpu/README.md").read_text("utf-8")
    for each in found:
        if each.command[0] == sys.executable:
            assert importlib.util.find_spec(each.command[2]) is not None, each
            assert each.command[2] in readme or each.name == "suite", each
        else:
            assert f"--tool {each.name}" in readme


@pytest.mark.parametrize("options", [["--output", "x", "--skip", "nothing"], ["--output", "x"]])
def test_refusals(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(sys, "argv", ["prove", *options])
    monkeypatch.setattr(prove.torch.cuda, "device_count", lambda: len(options) // 4)
    with pytest.raises(SystemExit):
        prove.main()
    error = capsys.readouterr().err
    assert ("known are soak, pipeline" if len(options) == 4 else "torch sees no GPU") in error
