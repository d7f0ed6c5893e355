"""Parts that are not installed: which extra brings them."""

from __future__ import annotations

_EXTRAS = {
    "engine": ("torch", "triton", "numpy", "numba", "safetensors"),
    "serve": (
        "fastapi",
        "starlette",
        "pydantic",
        "uvicorn",
        "prometheus_client",
        "opentelemetry",
        "structlog",
    ),
}


def explained(error: ModuleNotFoundError) -> str | None:
    """One line with the remedy; None for a module that no extra brings."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in _EXTRAS.items():
        if name in modules:
            return f"{name} is not installed, which this command needs: pip install 'canary-obs[{extra}]'."
    return None
