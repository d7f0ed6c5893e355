"""Completion scripts: bash runs the one for bash, and every command and option is in all of them."""

from __future__ import annotations

import subprocess

import pytest

from canary_obs.cli import run


def completed(script: str, *words: str) -> set[str]:
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _canary_obs; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_and_options(capsys):
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "canary-obs", "sw") == {"sweep", "sweeps"}
    assert completed(script, "canary-obs", "sweeps", "ca") == {"cancel"}
    assert completed(script, "canary-obs", "sweep", "--wait", "--ra") == {"--ranks"}
    assert completed(script, "canary-obs", "incident", "show", "--j") == {"--json"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_every_command(shell, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("status", "doctor", "tour", "export", "cancel", "show", "token-file", "ranks"):
        assert word in script
    assert run(["completion", "tcsh"]) == 2
    assert "Use one of: bash, zsh, fish." in capsys.readouterr().err
