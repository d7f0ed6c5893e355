"""The page of /metrics, text or OpenMetrics, written several times faster than prometheus_client does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

_go_text: Callable[[float], str] = floatToGoString  # the library leaves it untyped
_OPEN_METRICS = "application/openmetrics-text"
_PLAIN_BELOW = 1e6  # Go switches to exponents here; below, Python writes a float the same way


class _Labels:
    """Label pairs as text; a page repeats the same few thousand times."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], str] = {}

    def text(self, names: Iterable[str], labels: Mapping[str, str]) -> str:
        """Pairs in the order of `names`, joined; empty without labels."""
        return ",".join([self._pair(name, labels[name]) for name in names])

    def _pair(self, name: str, value: str) -> str:
        known = self._pairs.get((name, value))
        if known is None:
            known = self._pairs[name, value] = f'{name}="{_escaped(value)}"'
        return known


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type, text or OpenMetrics as the Accept header asks."""
    _, content_type = choose_encoder(accept)
    open_metrics = content_type.startswith(_OPEN_METRICS)
    labels = _Labels()
    lines = [line for family in registry.collect() for line in _family(family, labels, open_metrics)]
    if open_metrics:
        lines.append("# EOF")
    return "".join([f"{line}\n" for line in lines]).encode(), content_type


def _family(family: Metric, labels: _Labels, open_metrics: bool) -> Iterator[str]:
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
    # Samples of one name carry the same label names: sort them once.
    order: dict[str, list[str]] = {}
    for sample in family.samples:
        names = order.get(sample.name)
        if names is None:
            names = order[sample.name] = sorted(sample.labels)
        inside = labels.text(names, sample.labels)
        line = f"{sample.name}{{{inside}}}" if inside else sample.name
        number = float(sample.value)
        value = repr(number) if 0 <= number < _PLAIN_BELOW else _go_text(number)
        exemplar = _exemplar(sample.exemplar) if open_metrics and sample.exemplar else ""
        yield f"{line} {value}{exemplar}"


def _exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(exemplar.labels.items()))
    time = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{pairs}}} {_go_text(exemplar.value)}{time}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
