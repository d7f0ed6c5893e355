"""Loads of which all but the judgement is done before they are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from canary_kernels.arrival.op import judge_arrivals, keep_arrivals, put_together, weigh_arrivals

if TYPE_CHECKING:
    from torch import Tensor

    from canary_kernels.arrival.load import ArrivedLoad
    from canary_kernels.buffers import GroupBuffers
    from canary_kernels.checks import Backend


class WeighedLoad:
    """Blocks that were weighed. `judge`, on any stream that waits for that, is one launch or two.

    Holds its tensors: what is launched later has their addresses alone.
    """

    __slots__ = ("_backend", "_blocks", "_buffers", "_keeps", "_launches", "_load", "_matched", "_sent")

    def __init__(
        self, backend: Backend, buffers: GroupBuffers, load: ArrivedLoad, sent: Tensor, *, keeps: bool
    ) -> None:
        """`sent`: as `judge_arrivals` takes it. `keeps`: records of the load's slots are stored, too."""
        self._backend, self._buffers, self._keeps = backend, buffers, keeps
        self._load, self._sent = load, sent
        self._blocks = blocks = weigh_arrivals(backend, buffers, load)
        kept = load if keeps else None
        self._matched, self._launches = put_together(backend, buffers, blocks, sent, kept)

    def judge(self) -> None:
        """As `judge_arrivals` and `keep_arrivals`; once."""
        if self._launches:
            for launch in self._launches:
                launch()
            return
        matched = judge_arrivals(self._backend, self._buffers, self._blocks, self._sent)
        if self._keeps:
            keep_arrivals(self._backend, self._buffers, self._load, matched)
