"""How many ranks of decode engines read from this one, and the shares of heads that they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from threading import Thread
from typing import Any

import torch

from canary_obs.engine_api.observer import Observer
from canary_obs.engines.toolkit.guarded import guarded
from canary_obs.engines.toolkit.head_shares import head_shares
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.offload_keys import connectors_named
from canary_obs.runtime.device.warm_up import expected_compilation

_PULLED = {"NixlConnector", "NixlPullConnector"}
_HEARTBEAT = b"HB:"  # names requests


class TransferReaders:
    """Of one worker of a prefill engine.

    A decode engine whose ranks each hold a part of this one's heads says so when it has read the first
    prompt; records of later ones are split for it.
    """

    def __init__(self, groups: Sequence[VllmGroup], observer: Observer) -> None:
        self._groups, self._observer = groups, observer
        self._known = {1}  # numbers of ranks that were seen
        self._thread: Thread | None = None
        self._begun: dict[str, list[range]] = {}  # those that are prepared, or could not be
        self.shares: dict[str, list[range]] = {}  # of heads, by group; absent = whole

    def note(self, ranks: int) -> None:
        """So many ranks of a decode engine read from this one."""
        if ranks in self._known or ranks < 1 or self._thread is not None:
            return
        known = self._known | {ranks}
        shares = self._shares_for(known)
        if shares != self._begun:
            self._known, self._begun = known, shares
            self._thread = Thread(target=self._prepare, args=(shares,), name="kv-canary-shares", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for what is being prepared."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def wrap(self, patches: MethodPatches, connector: Any) -> None:
        """Follow what decode engines say to NIXL's workers; other versions' prompts stay whole."""
        for each in connectors_named(connector, _PULLED):
            worker: Any = getattr(each, "connector_worker", None)
            agent = getattr(worker, "nixl_wrapper", None)
            if hasattr(agent, "get_new_notifs"):
                # Older versions say how many ranks it has in all.
                all_ranks = not hasattr(worker, "expected_consumer_notifications_by_req")
                own = getattr(worker, "world_size", 1) if all_ranks else 1
                patches.wrap(agent, "get_new_notifs", partial(self._around_notifs, own))

    def _around_notifs(self, own: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_new_notifs(*args: Any, **kwargs: Any) -> Any:
            notifs = original(*args, **kwargs)
            if notifs:
                guarded(self._observer, "announce", self._follow, notifs, own)
            return notifs

        return get_new_notifs

    def _follow(self, notifs: Mapping[str, Sequence[bytes]], own: int) -> None:
        for each in chain.from_iterable(notifs.values()):
            ranks = each.rpartition(b":")[2]
            if ranks.isdigit() and not each.startswith(_HEARTBEAT):
                self.note(int(ranks) // own)

    def _shares_for(self, known: set[int]) -> dict[str, list[range]]:
        found = {group.view.name: head_shares(group.view.sources, known) for group in self._groups}
        return {name: shares for name, shares in found.items() if shares}

    def _prepare(self, shares: dict[str, list[range]]) -> None:
        """On a thread of its own: to compile the kernels of shares takes a while."""
        if guarded(self._observer, "announce", self._launched, shares):
            self.shares = shares
        self._thread = None

    def _launched(self, shares: dict[str, list[range]]) -> bool:
        """Launch each kernel once, for no slots. False = the canary does not protect just now."""
        with expected_compilation():
            for group in self._groups:
                name = group.view.name
                if name in shares:
                    nothing = torch.full((1, group.block_slots), -1, dtype=torch.int64)
                    with _on(group.view.sources[0].tensor.device):
                        if self._observer.block_folds(name, nothing, shares=shares[name]) is None:
                            return False
        return True


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The current device of a new thread is the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
