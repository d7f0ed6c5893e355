"""The order of the proofs on a GPU, with commands that need none."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.gpu import prove
from tests.gpu.prove import Proof, proofs, run_all

# Waits for a file, so that order does not hang on time; then tells where it ran, in the order of the ends.
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


def test_on_one_gpu_what_needs_it_alone_comes_last(tmp_path: Path) -> None:
    wanted = [
        proof(tmp_path, "soak", "suite", long=True), proof(tmp_path, "bench", alone=True),
        proof(tmp_path, "suite"), proof(tmp_path, "host", quiet=True), proof(tmp_path, "ranks", gpus=2),
    ]  # fmt: skip
    injections = run_all(wanted, 1, tmp_path)
    assert order(tmp_path) == ["host 0", "suite 0", "soak 0", "bench 0"]
    assert injections.ended["ranks"] == {"not_run": "needs 2 GPUs, here are 1"}
    assert not injections.ok  # something was not run


def test_on_two_beside_the_soak_what_is_alone_has_the_other_and_then_the_rest_has_both(
    tmp_path: Path,
) -> None:
    wanted = [
        proof(tmp_path, "soak", "ranks", long=True), proof(tmp_path, "suite"),
        proof(tmp_path, "bench", alone=True), proof(tmp_path, "ranks", gpus=2),
        proof(tmp_path, "host", quiet=True),
    ]  # fmt: skip
    injections = run_all(wanted, 2, tmp_path)
    assert order(tmp_path) == ["host 0", "bench 1", "suite 0,1", "ranks 0,1", "soak 0"]
    assert injections.ok
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: facts["exit"] for name, facts in summary.items()} == dict.fromkeys(injections.ended, 0)


def test_without_the_long_one_the_quiet_ones_have_the_host_as_ever(tmp_path: Path) -> None:
    wanted = [
        proof(tmp_path, "host", quiet=True), proof(tmp_path, "suite"), proof(tmp_path, "bench", alone=True)
    ]  # fmt: skip
    run_all(wanted, 2, tmp_path)
    assert order(tmp_path) == ["host 0", "bench 1", "suite 0,1"]


def test_one_that_does_not_hold_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    injections = run_all(
        [proof(tmp_path, "soak", long=True), proof(tmp_path, "wrong"), proof(tmp_path, "more")], 1, tmp_path
    )
    assert (injections.ended["wrong"]["exit"], injections.ended["more"]["exit"], injections.ok) == (
        1,
        0,
        False,
    )


def test_every_proof_is_a_command_that_the_readme_tells(tmp_path: Path) -> None:
    found = proofs(tmp_path, 1200.0)
    assert [one.name for one in found if one.long] == ["soak"]
    assert {one.name for one in found if one.quiet} == {"kernels", "step", "pipeline", "patrol"}
    assert [one.name for one in found if one.alone] == ["vllm_v2", "vllm_v1"]
    assert len({one.name for one in found}) == len(found) == 14
    told = (Path(__file__).parent / "gpu/README.md").read_text("utf-8")
    for one in found:
        if one.command[0] == sys.executable:
            assert importlib.util.find_spec(one.command[2]) is not None, one
            assert one.command[2] in told or one.name == "suite", one
        else:
            assert f"--tool {one.name}" in told


@pytest.mark.parametrize("given", [["--output", "x", "--skip", "nothing"], ["--output", "x"]])
def test_refusals(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(sys, "argv", ["prove", *given])
    monkeypatch.setattr(prove.torch.cuda, "device_count", lambda: len(given) // 4)
    with pytest.raises(SystemExit):
        prove.main()
    told = capsys.readouterr().err
    assert ("known are soak, pipeline" if len(given) == 4 else "torch sees no GPU") in told
