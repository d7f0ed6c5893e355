"""The page of /metrics, text or OpenMetrics, written several times faster than prometheus_client does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

_go_text: Callable[[float], str] = floatToGoString  # the library leaves it untyped
_OPEN_METRICS = "application/openmetrics-text"
_PLAIN_BELOW = 1e6  # Go switches to exponents here; below, Python writes a float the same way


class _Pairs(dict[tuple[str, str], str]):
    """Label pairs as text, by name and value; a page repeats the same few thousands of times."""

    def __missing__(self, pair: tuple[str, str]) -> str:
        name, value = pair
        text = self[pair] = f'{name}="{_escaped(value)}"'
        return text


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type, text or OpenMetrics as the Accept header asks."""
    _, content_type = choose_encoder(accept)
    open_metrics = content_type.startswith(_OPEN_METRICS)
    pairs = _Pairs()
    lines: list[str] = []
    for family in registry.collect():
        lines += _heading(family, open_metrics)
        lines += _lines(family, pairs, open_metrics)
    if open_metrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode(), content_type


def _heading(family: Metric, open_metrics: bool) -> Iterator[str]:
    name, documentation = family.name, family.documentation
    if open_metrics:
        documentation = _escaped(documentation)
    else:
        name += "_total" if family.type == "counter" else ""
        documentation = documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {documentation}"
    yield f"# TYPE {name} {family.type}"
    if open_metrics and family.unit:
        yield f"# UNIT {name} {family.unit}"


def _lines(family: Metric, pairs: _Pairs, open_metrics: bool) -> Iterator[str]:
    # Samples of one name carry the same label names: sort them once.
    order: dict[str, list[str]] = {}
    text_of = pairs.__getitem__
    for sample in family.samples:
        name, labels, value = sample[:3]
        names = order.get(name)
        if names is None:
            names = order[name] = sorted(labels)
        # Looked up in C: a Python call per pair would take half of the page's time.
        inside = ",".join(map(text_of, [(label, labels[label]) for label in names]))
        shown = f"{name}{{{inside}}}" if inside else name
        number = repr(float(value)) if 0 <= value < _PLAIN_BELOW else _go_text(value)
        pointer = _exemplar(sample.exemplar) if open_metrics and sample.exemplar else ""
        yield f"{shown} {number}{pointer}"


def _exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(exemplar.labels.items()))
    time = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{pairs}}} {_go_text(exemplar.value)}{time}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
