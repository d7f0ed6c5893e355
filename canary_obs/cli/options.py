"""Options that several commands share. What they name is looked at before the command begins."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from canary_obs.errors import ConfigurationError


def _one_of(option: str, *names: str) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names:
            raise ConfigurationError(option, name, "no such choice", f"Use one of: {', '.join(names)}.")
        return name

    return check


def _writable(path: Path | None) -> Path | None:
    """The path of a file that can be written, tried before an hour of a bench; its folder is made."""
    if path is None:
        return None
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        remedy = "Name a file in a folder that you may write."
        raise ConfigurationError("--output", str(path), rule, remedy) from None
    return path


def _result(path: Path | None) -> Path | None:
    """The path of a file that a bench wrote."""
    if path is not None:
        from canary_obs.bench.comparison import read_result

        read_result(path)
    return path


def require_vllm() -> None:
    """Raises ConfigurationError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigurationError("bench", "vllm", "vLLM is not installed", "Install it: docs/vllm.md.")


def require_sglang() -> None:
    """Raises ConfigurationError where SGLang is not installed."""
    if find_spec("sglang") is None:
        raise ConfigurationError("bench", "sglang", "SGLang is not installed", "Install it: docs/sglang.md.")


Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of weights, traffic and perturbation.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Shape = Annotated[str, typer.Option(help="Engine preset: demo or tiny.")]
Threads = Annotated[
    int, typer.Option(min=1, max=1024, help="CPU threads; more pay only on otherwise idle cores.")
]
Output = Annotated[Path | None, typer.Option(callback=_writable, help="Write the JSON to this file, too.")]
Baseline = Annotated[
    Path | None, typer.Option(callback=_result, help="Compare with this result, not the committed one.")
]
StepShape = Annotated[
    str, typer.Option(callback=_one_of("--shape", "8b", "small", "tiny"), help="8b or small.")
]
EngineShape = Annotated[
    str,
    typer.Option(
        callback=_one_of("--shape", "8b", "small", "qwen3-next", "tiny", "qwen3-next-tiny"),
        help="8b, small, or qwen3-next: 12 layers, of which nine keep a state per request.",
    ),
]
Runner = Annotated[
    str, typer.Option(callback=_one_of("--runner", "v1", "v2"), help="vLLM's model runner: v1 or v2.")
]
Memory = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the GPU's memory for each vLLM.")]
