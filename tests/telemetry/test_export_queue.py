"""Nothing that exports ever waits; what is lost is counted, to the item."""

from __future__ import annotations

import statistics
import threading
import time

import pytest

from canary_obs.attach import install_canary
from canary_obs.config import IN_PROCESS, CanaryConfig, ServiceConfig
from canary_obs.reference_engine import settings
from canary_obs.reference_engine.engine import Engine
from canary_obs.reference_engine.traffic import Traffic, scaled_traffic
from canary_obs.serve import ServiceThread
from canary_obs.telemetry.export_queue import ExportCounts, ExportLimits, ExportQueue
from canary_obs.transport.links import LocalLink
from tests.service.fakes import eventually
from tests.telemetry.receiver import Receiver, open_server

QUICK = ExportLimits(queue=10, batch=4, delay=0.01)


class AuthMiddleware:
    """A receiver that holds the exporting thread until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def send(self, batch) -> bool:
        self.entered.set()
        assert self.open.wait(10)
        self.batches.append(list(batch))
        return True


def test_a_full_queue_counts_and_never_waits():
    gate = AuthMiddleware()
    queue = ExportQueue("test", gate.send, QUICK)
    queue.put(0)
    assert gate.entered.wait(10)
    for number in range(1, 31):
        queue.put(number)
    assert queue.counts == ExportCounts(exported=0, queue_full=20, failed=0)
    gate.open.set()
    queue.close(10)
    assert [number for batch in gate.batches for number in batch] == list(range(11))
    assert max(map(len, gate.batches)) <= QUICK.batch
    assert queue.counts == ExportCounts(exported=11, queue_full=20, failed=0)
    queue.put(99)
    assert queue.counts.queue_full == 21


@pytest.mark.parametrize("answer", [lambda batch: False, lambda batch: 1 / 0])
def test_batches_that_fail_are_counted_and_the_thread_lives_on(answer):
    answers = [answer, lambda batch: True]
    queue = ExportQueue("test", lambda batch: answers.pop(0)(batch), ExportLimits(queue=9, batch=1, delay=9))
    queue.put(1)
    eventually(lambda: queue.counts.failed == 1)
    queue.put(2)
    queue.close(10)
    assert queue.counts == ExportCounts(exported=1, queue_full=0, failed=1)


def test_closing_does_not_wait_for_a_receiver_that_hangs():
    gate = AuthMiddleware()
    queue = ExportQueue("test", gate.send, QUICK)
    queue.put(1)
    assert gate.entered.wait(10)
    queue.put(2)
    started = time.monotonic()
    queue.close(0.05)
    assert time.monotonic() - started < 5
    assert queue.counts.queue_full == 1
    gate.open.set()
    eventually(lambda: queue.counts.exported == 1)


class Side:
    """A damaged engine with its service in the same process: the worst case for the step time."""

    def __init__(self) -> None:
        self.engine = Engine(settings.tiny(seed=6))
        self.link = LocalLink()
        self.service = ServiceThread(
            ServiceConfig(port=0, log_file="/dev/null", snapshot_stale_seconds=600.0), link=self.link
        )
        faults = {"perturb": "real_kv_used=0.5", "perturb_enabled": True, "perturb_warmup": 5}
        config = CanaryConfig(endpoint=IN_PROCESS, snapshot_seconds=0.05, **faults)
        canary = install_canary(self.engine, config, link=self.link)
        assert canary is not None
        self.canary = canary
        self.canary.mark_ready()
        self.traffic = Traffic(
            scaled_traffic(self.engine.config.max_context, self.engine.config.max_running), 6
        )

    def step_seconds(self, steps: int) -> float:
        spent, target = [], self.engine.statistics.steps + steps
        while self.engine.statistics.steps < target:
            self.traffic.advance(self.engine)
            if self.engine.has_work():
                started = time.perf_counter()
                self.engine.step()
                spent.append(time.perf_counter() - started)
        return statistics.median(spent)

    def close(self) -> None:
        self.canary.detach()
        self.service.close()


@pytest.mark.slow
def test_a_receiver_that_answers_errors_does_not_slow_the_engine(monkeypatch):
    plain = Side()
    receiver = Receiver(broken=True)
    server = open_server(receiver, "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "20")
    exporting = Side()
    ratios = []
    for number in range(16):
        first, second = (plain, exporting) if number % 2 else (exporting, plain)
        spent = {side: side.step_seconds(40) for side in (first, second)}
        ratios.append(spent[exporting] / spent[plain])
    tracing = exporting.service._tracing
    plain.close()
    exporting.close()
    server.close()
    counts = tracing.counts
    print(f"\nstep time with a broken receiver: {statistics.median(ratios):.3f} of that without; {counts}")
    assert receiver.requests > 5
    assert counts["logs"].exported == counts["traces"].exported == 0
    assert counts["logs"].failed + counts["logs"].queue_full > 50
    # A cost is shown only when most pairs show it: one pair on a shared machine differs by more than 15 %.
    assert statistics.quantiles(ratios)[0] < 1.15
