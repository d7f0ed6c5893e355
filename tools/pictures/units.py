"""Values as Grafana writes them, for the units that the boards use."""

from __future__ import annotations

from collections.abc import Callable

UNITS: dict[str | None, Callable[[float], str]] = {}


def text_of(value: float, unit: str | None) -> str:
    """A value with its unit. Raises KeyError for a unit that no board had when this was written."""
    return UNITS[unit](value)


def _scaled(value: float, names: tuple[str, ...], base: float) -> str:
    size = 0
    while abs(value) >= base and size < len(names) - 1:
        value, size = value / base, size + 1
    return f"{_plain(value)}{names[size]}"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def _duration(value: float) -> str:
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= size:
            return f"{_plain(value / size)} {name}"
    return f"{_plain(value)} s"


UNITS |= {
    None: lambda value: _scaled(value, ("", " K", " Mil", " Bil", " Tri"), 1000),
    "short": lambda value: _scaled(value, ("", " K", " Mil", " Bil", " Tri"), 1000),
    "ops": lambda value: _scaled(value, (" ops/s", "K ops/s", "M ops/s", "G ops/s"), 1000),
    "bytes": lambda value: _scaled(value, (" B", " KiB", " MiB", " GiB", " TiB"), 1024),
    "Bps": lambda value: _scaled(value, (" B/s", " kB/s", " MB/s", " GB/s", " TB/s"), 1000),
    "percentunit": lambda value: f"{_plain(100 * value)}%",
    "s": _duration,
}
