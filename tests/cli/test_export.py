"""`canary-obs export` writes what a release ships, and the wheel has every file of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from canary_obs.cli import run

ROOT = Path(__file__).parents[2]
FOLDERS = ("docker", "dashboards/generated", "alerts/rules", "alerts/runbooks")


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("dashboards", {"kv-canary-fleet.json": "dashboards/generated/kv-canary-fleet.json"}),
        ("alerts", {"rules/damage.yml": "alerts/rules/damage.yml"}),
        ("k8s", {name: f"docker/kubernetes/{name}" for name in ("chart/Chart.yaml", "base/engine.yaml")}),
        ("compose", {name: name for name in ("docker/compose.yml", "alerts/rules/damage.yml")}),
        ("plugin", {"canary_obs/config.py": "canary_obs/config.py"}),
    ],
)
def test_a_part_is_written_once_and_again_only_by_force(part, names, tmp_path, capsys):
    assert run(["export", part, "--out", str(tmp_path)]) == 0
    written = {line.removeprefix(f"{tmp_path}/") for line in capsys.readouterr().out.splitlines()}
    assert names.keys() <= written
    for name, source in names.items():
        assert (tmp_path / name).read_bytes() == (ROOT / source).read_bytes()
    assert run(["export", part, "--out", str(tmp_path)]) == 2
    assert "exist there" in capsys.readouterr().err
    assert run(["export", part, "--out", str(tmp_path), "--force"]) == 0


def test_an_engine_finds_the_plugin_by_its_path_alone(tmp_path):
    """-S: neither this checkout nor its installation can be imported, as in an engine's image."""
    assert run(["export", "plugin", "--out", str(tmp_path / "plugin")]) == 0
    script = """if True:
        import sys
        from importlib.metadata import entry_points
        sys.path = [path for path in sys.path if "site-packages" not in path] + [sys.argv[1]]
        found = [group for group in ("vllm.general_plugins", "sglang.srt.plugins") for plugin in
                 entry_points(group=group) if callable(plugin.load())]
        import canary_obs, canary_kernels
        print(found, canary_obs.__file__, canary_kernels.__file__)
    """
    path = {"PYTHONPATH": str(tmp_path / "plugin"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", script, sysconfig.get_path("purelib")]
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    plugin = tmp_path / "plugin"
    files = f"{plugin}/canary_obs/__init__.py {plugin}/canary_kernels/__init__.py"
    assert (done.stdout, done.stderr) == (f"['vllm.general_plugins', 'sglang.srt.plugins'] {files}\n", "")


def test_what_cannot_be_written_or_is_no_part_is_refused(tmp_path, capsys):
    assert run(["export", "charts", "--out", str(tmp_path)]) == 2
    assert "Use one of: dashboards, alerts, k8s, compose, plugin." in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(["export", "k8s", "--out", f"{tmp_path}/file/x"]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_the_wheel_has_every_file_of_these_folders():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["data-files"]
    shipped = {
        path.relative_to(ROOT).as_posix()
        for folder, patterns in settings.items()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file() and folder == f"share/canary_obs/{path.parent.relative_to(ROOT).as_posix()}"
    }
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tracked = set(listed.stdout.split())
    assert tracked - shipped == set()
