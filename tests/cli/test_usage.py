"""A command line that is refused: one line that names what was given and where the usage is; exit code 2."""

from __future__ import annotations

import sys

import pytest

from canary_obs import __version__
from canary_obs.cli import run


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("serve --port x", ("--port='x': ", "integer", "'canary-obs serve --help'")),
        ("serve --port=x", ("--port='x': ",)),
        ("serve --port", ("--port", "requires a", "'canary-obs serve --help'")),
        ("serve --wait=-1", ("--wait='-1': ", "0", "'canary-obs serve --help'")),
        ("serve --wait nan", ("--wait='nan': ",)),
        ("serve --prot 1", ("--prot", "--port", "'canary-obs serve --help'")),
        ("serve --nosuch", ("--nosuch", "'canary-obs serve --help'")),
        ("serve extra", ("extra", "'canary-obs serve --help'")),
        ("serv", ("serv", "Did you mean 'serve'?", "'canary-obs --help'")),
        ("--nosuch", ("--nosuch", "'canary-obs --help'")),
        ("keys", ("folder", "Missing", "'canary-obs keys --help'")),
        ("incident show", ("ID|FILE", "Missing", "'canary-obs incident show --help'")),
        ("bench nosuch", ("nosuch", "'canary-obs bench --help'")),
        ("bench demo --blocks 1", ("--blocks='1': ", "2", "'canary-obs bench demo --help'")),
        ("bench hit --hits 1 --hits x", ("--hits='1, x': ", "integer", "'canary-obs bench hit --help'")),
        ("bench vllm-gpu --memory x", ("--memory='x': ", "number", "'canary-obs bench vllm-gpu --help'")),
        ("demo --duration 0", ("--duration='0': ", "0.1", "'canary-obs demo --help'")),
        ("demo --json=1", ("--json", "'canary-obs demo --help'")),
        ("demo --threads 100000", ("--threads='100000': ", "1024")),
        ("demo --seed=-1", ("--seed='-1': ", "0")),
        ("bench sweep-start --output /dev/null/x", ("--output='/dev/null/x': cannot be written", "folder")),
        ("bench sweep-start --output /", ("--output='/': cannot be written: Is a directory",)),
        ("bench cpu --baseline /no/such", ("--baseline='/no/such': ", "a file that a bench wrote")),
        (
            "bench sweep-start --slots 1024 --block-size 5000",
            ("--block-size=5000: ", "1024 slots", "--slots"),
        ),
        ("bench vllm-gpu --shape huge", ("--shape='huge': no such choice. Use one of: 8b, small",)),
        ("bench hit --runner v3", ("--runner='v3': no such choice. Use one of: v1, v2",)),
        ("bench vllm-load --memory 2", ("--memory='2': ", "'canary-obs bench vllm-load --help'")),
        ("metrics --format html", ("--format='html': no such format",)),
    ],
)
def test_a_refused_command_line_is_one_line(line, texts, capsys) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert err.endswith(".\n"), err
    for text in texts:
        assert text in err


@pytest.mark.parametrize("name", ["vllm", "vllm-gpu", "vllm-load", "vllm-host", "hit"])
def test_a_bench_of_vllm_says_that_vllm_is_missing(name, monkeypatch, capsys) -> None:
    monkeypatch.setattr("canary_obs.cli.options.find_spec", lambda _name: None)
    assert run(["bench", name]) == 2
    assert (
        capsys.readouterr().err == "error: bench='vllm': vLLM is not installed. Install it: docs/vllm.md.\n"
    )


def test_an_output_is_tried_and_left_as_it_was(tmp_path) -> None:
    new, old = tmp_path / "a/new.json", tmp_path / "old.json"
    old.write_text("{}")
    for path in (new, old):
        assert run(["bench", "sweep-start", "--output", str(path), "--baseline", "/no/such"]) == 2
    assert not new.exists()
    assert old.read_text() == "{}"


def test_a_line_break_that_was_given_does_not_break_the_line(monkeypatch, capsys) -> None:
    for arguments in (["serve", "--no\nsuch"], ["no\nsuch"]):
        assert run(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("KV_CANARY_NO\nSUCH", "1")
    assert run(["settings"]) == 2
    assert capsys.readouterr().err.startswith("error: KV_CANARY_NO SUCH: no setting has this name.")


@pytest.mark.parametrize("line", ["--help", "serve --help", "bench --help", "bench demo --help"])
def test_help_is_a_page_on_standard_output(line, capsys) -> None:
    assert run(line.split()) == 0
    out, err = capsys.readouterr()
    assert "Usage: canary-obs" in out
    assert err == ""


@pytest.mark.parametrize("line", ["", "bench", "incident"])
def test_no_command_at_all_shows_the_help_page(line, capsys) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert "Usage: canary-obs" in out + err
    assert "Commands" in out + err
    assert "error" not in err


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys) -> None:
    def interrupted(*_given: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("canary_obs.telemetry.metric_docs.render", interrupted)
    assert run(["metrics"]) == 130
    assert capsys.readouterr() == ("", "")


def test_the_version_is_printed(capsys) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"canary-obs {__version__}\n"


@pytest.mark.parametrize(
    ("module", "line", "extra"), [("uvicorn", "serve --port 0", "serve"), ("torch", "tour", "engine")]
)
def test_a_part_that_is_not_installed_is_one_line_with_the_remedy(
    module, line, extra, monkeypatch, capsys
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in (module, "canary_obs.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "canary_obs.serve", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: {module} is not installed, which this command needs: pip install 'canary-obs[{extra}]'.\n"
    )
