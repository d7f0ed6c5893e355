"""Shows the cached prefixes of newly admitted requests before the forward that reads them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.reference.groups import ReferenceGroup
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.reference_engine.execution.batch import ForwardBatch
from canary_obs.reference_engine.scheduling.request import Request


def hits_before(
    forward: Callable[[ForwardBatch], Any],
    groups: Mapping[str, ReferenceGroup],
    side_stream: SideStream,
    observer: Observer,
) -> Callable[[ForwardBatch], Any]:
    """A forward that shows the hits of its batch first; `groups` by name, draft layers included."""

    def observed(batch: ForwardBatch) -> Any:
        prefixes = zip(batch.requests, batch.prefixes, strict=True)
        # A request has computed more than what it shares as soon as it has been in a forward.
        new = [request for request, prefix in prefixes if 0 < prefix == request.shared]
        if new and observer.compares_hits:
            side_stream.join()  # which may still have to complete records
            _report(new, groups, observer)
        return forward(batch)

    return observed


def _report(requests: Sequence[Request], groups: Mapping[str, ReferenceGroup], observer: Observer) -> None:
    try:
        for name, group in groups.items():
            slots = np.concatenate([group.joined(request) for request in requests])
            observer.hit(name, torch.from_numpy(slots))
    except Exception as error:  # noqa: BLE001 - a fault of the canary must not reach the engine
        observer.fault("announce", error)
