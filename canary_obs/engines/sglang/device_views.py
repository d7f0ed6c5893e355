"""StepViews for checks that run next to the engine: their tensors stay as they are until the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_kernels.checks import Backend
from canary_kernels.decode import DecodeMemory, DecodeStep, Known, keep_decode
from canary_kernels.forward_start import RING_ROWS
from canary_obs.copy_records.draft_trees import own_slots
from canary_obs.engine_api.views import GroupStep, StepTypes, StepView
from canary_obs.engines.sglang.batch_views import EXTENDING, BatchViews
from canary_obs.engines.sglang.device_states import DeviceStates, TrackedStates
from canary_obs.engines.sglang.groups import SglangGroup
from canary_obs.engines.sglang.states import STATE
from canary_obs.engines.sglang.window_slots import WindowSlots
from canary_obs.engines.toolkit.device_digests import backend_for
from canary_obs.errors import UnsupportedEngine

_WIDTH = 512  # tables are copied in multiples of so many slots
_MOST_TABLES = 4096
_MOST_DRAFTS = 16  # tokens of each request, where SGLang adapts how far it drafts
_HELD = 3  # forwards: the one under way, the next one, and one more

_Longs = NDArray[np.int64]


class _Columns(NamedTuple):
    """Views of the memory for one number of requests: the same objects each time."""

    prefixes: Tensor
    extends: Tensor
    starts: Tensor
    same: Tensor  # extends when each request extends by as many
    rows: Tensor
    each: Tensor  # starts then
    digests: Tensor
    known_lens: Tensor
    known_digests: Tensor
    # Of all that are new: input ids, positions, slots, and those of windows, if any.
    tokens: tuple[Tensor, ...]


class DeviceViews(BatchViews):
    """With the overlap loop SGLang writes the next batch's tables while this one's forward still runs.

    It waits until the forward has read what it reads, not until other work has. So the rows of a batch, and
    its lengths, are copied: on the stream of the forward, before it, or by `keep_late`, which the scheduler
    has to wait for. What the batch owns is kept alive by the view. Lengths on the host are the scheduler's.
    Slots of a window group are read of SGLang's mapping with the rows; what a prompt writes, before it.

    Where drafts are verified, how many of the last ones were accepted may be known on the device alone. So
    there are no digests: the tail compares what the scheduler knows, and the links show the rest.
    """

    def __init__(self, runner: Any, groups: Sequence[SglangGroup], *, drafts: int = 0) -> None:
        """`drafts`: tokens of each request that a forward verifies, in chains; 0 = none drafts."""
        super().__init__(runner, groups, own_tables=False)
        self._drafts = drafts
        device, (most, _) = self._table.device, self._table.shape
        own = [group.own_slots for group in groups if isinstance(group.own_slots, WindowSlots)]
        self._windows = own[0] if own else None  # the other groups have the request table's slots
        self._backend = backend_for(device)
        most_added = max(drafts, _MOST_DRAFTS) if drafts else 1
        self._memory = DecodeMemory.allocate(self._table, windows=bool(own), most_added=most_added)
        self._lengths = torch.zeros((2, most + 1), dtype=torch.int64, device=device)
        self._counting = torch.arange(most + 1, device=device)
        self._equal: dict[int, tuple[Tensor, Tensor]] = {}  # by new tokens of each request: these, and starts
        for added in {1, drafts or 1}:
            self._add_width(added)
        pinned = device.type == "cuda"
        staging = [torch.zeros((3, most), dtype=torch.int64, pin_memory=pinned) for _ in range(RING_ROWS)]
        self._staging = cycle([(buffer, buffer.numpy()) for buffer in staging])
        self._columns: dict[tuple[int, int], _Columns] = {}  # by requests and new tokens of each
        self._decoding: StepView | None = None  # the last one, also of drafts
        self._without_states: StepView | None = None  # the same, for forwards that are shown without them
        self._late: Callable[[], None] | None = None  # for `keep_late`
        self._late_slots: Tensor | None = None
        # Of the last ones: SGLang may let go of what the device still has to copy.
        self._held = deque[tuple[Any, ...]](maxlen=_HELD)
        self._known = False  # whether the memory has what is known after the last batch
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by requests and width
        by_row = [group.by_row for group in groups if group.by_row is not None]
        if by_row:
            self.states = DeviceStates(by_row[0], self.step_types)
        if self.states is not None and runner.req_to_token_pool.enable_mamba_extra_buffer:
            self.tracked = TrackedStates(runner.server_args, self.states)
        if self._backend is Backend.TRITON:
            self._compile()

    @property
    def step_types(self) -> StepTypes:
        """Types of the views to come."""
        return replace(super().step_types, has_digests=not self._drafts)

    def repeats(self, batch: Any, requests: Sequence[Any]) -> bool:
        """Whether the batch decodes the requests of the last view, which then shows this one, too."""
        # Slots that have left a window since the last step are free, and may be written again: not early.
        # A state is written by each forward of its request.
        apart = self._windows is None and self.states is None
        known = self._decoding is not None and apart and not self._drafts
        return known and batch.forward_mode.is_decode() and self._names[0] == requests

    def build(self, batch: Any, requests: Sequence[Any], *, late: bool = False) -> StepView:
        """The view of a forward batch of these requests; on the stream that runs the forward.

        `late`: the view's tensors, but for those that the batch of a prompt owns, have their values once
        `keep_late` was called. A batch that decodes has to be one that `repeats` the last one.
        Raises UnsupportedEngine for a forward mode that is not covered yet, LookupError for other requests.
        """
        count, names = self._checked_requests(batch, requests)
        verifies, decodes = batch.forward_mode.name == "TARGET_VERIFY", batch.forward_mode.is_decode()
        if (states := self.states) is not None:
            states.keep(batch.req_pool_indices, requests, names, decodes=decodes)
        width = int(batch.spec_info.draft_token_num) if verifies else 1
        columns = self._columns.get((count, width)) or self._make_columns(count, width)
        known, self._known = self._known, False
        if verifies or decodes:
            if verifies:
                self._keep_drafts(batch, requests, width)
            else:
                self._keep(batch, requests, count, known=known, late=late)
            self._known = True
            view = self._decoding
            # Else it has the same tensors.
            if view is None or view.request_ids is not names or view.input_ids is not columns.tokens[0]:
                view = self._decoding = self._view_of(
                    names, columns, columns.same, columns.each, columns.tokens
                )
                others = {name: step for name, step in view.groups.items() if name != STATE}
                self._without_states = replace(view, groups=others)
            if states is not None and not states.shown:
                view = self._without_states or view
        else:
            before, ends = _extended(batch)
            # The forward gives the batch other tensors, of more rows, where it pads it.
            own = batch.req_pool_indices, batch.extend_prefix_lens, batch.extend_seq_lens
            self._late = partial(self._copy, own, requests, before, ends, columns)
            if not late:
                self.keep_late()
            tokens = batch.input_ids, batch.positions, batch.out_cache_loc, *self._written(batch)
            view = self._view_of(names, columns, columns.extends, columns.starts, tokens)
            self._decoding = None
        return view

    @property
    def late_slots(self) -> Tensor:
        """int64 [n], of the engine: new slots of the decode whose view was built last, with `late`."""
        assert self._late_slots is not None
        return self._late_slots

    def keep_late(self) -> None:
        """Launch what `build` left out; nothing if it left out nothing, or that was launched.

        Raises LookupError for tokens that the scheduler lacks.
        """
        if self._late is not None:
            late, self._late = self._late, None
            late()

    def _keep(self, batch: Any, requests: Sequence[Any], count: int, *, known: bool, late: bool) -> None:
        """One launch. What it reads of the batch, but for the tokens, is not the positions' to say."""
        lens, (staging, values) = batch.seq_lens_cpu, next(self._staging)
        tokens = self._chains.next_tokens(requests, lens.tolist()) if known else None
        if tokens is None:
            ends, given = lens.numpy(), Known.GIVEN
            values[:, :count] = self._chains.advance(requests, ends - 1, ends)
        else:
            values[0, :count] = tokens
            given = Known.NEXT_BEFORE if self._chains.late else Known.NEXT
        step = DecodeStep(
            self._table, batch.req_pool_indices, batch.seq_lens, batch.input_ids, batch.positions,
            batch.out_cache_loc, staging, self._mapping,
        )  # fmt: skip
        self._late, self._late_slots = None, None
        if late:
            self._late, self._late_slots = partial(self._keep_held, step, given), step.out_slots
        else:
            keep_decode(self._backend, self._memory, step, given)

    def _keep_held(self, step: DecodeStep, given: Known) -> None:
        self._held.append(step)
        keep_decode(self._backend, self._memory, step, given)

    def _copy(
        self, own: tuple[Tensor, Tensor, Tensor], requests: Sequence[Any], before: _Longs, ends: _Longs,
        columns: _Columns,
    ) -> None:  # fmt: skip
        """`_keep` of a batch that extends, by its rows and lengths; what else it owns is not copied."""
        self._held.append(own)
        (rows, prefixes, extends), count = own, len(requests)
        self._copy_rows(rows, count, int(ends.max()))
        columns.prefixes.copy_(prefixes)
        columns.extends.copy_(extends)
        torch.cumsum(columns.extends, 0, out=columns.starts[1:])
        staging, values = next(self._staging)
        values[:, :count] = self._chains.advance(requests, before, ends)
        self._memory.known.copy_(staging, non_blocking=True)
        self._known = True

    def _keep_drafts(self, batch: Any, requests: Sequence[Any], width: int) -> None:
        """`_keep` of a batch that verifies so many tokens of each request: its lengths are without them."""
        staging, values = next(self._staging)
        values[:, : len(requests)] = self._chains.known(requests)
        step = DecodeStep(
            self._table, batch.req_pool_indices, batch.seq_lens, batch.input_ids, batch.positions,
            batch.out_cache_loc, staging, self._mapping, width, width,
        )  # fmt: skip
        self._late = None
        self._keep_held(step, Known.GIVEN)

    def _view_of(
        self, names: list[str], columns: _Columns, extends: Tensor, starts: Tensor, tokens: Sequence[Tensor]
    ) -> StepView:
        steps = [GroupStep(slot_table=self._memory.table, out_slots=tokens[2])]
        if self._memory.windows is not None:
            steps.append(GroupStep(slot_table=self._memory.windows, out_slots=tokens[3]))
        groups = {
            group.view.name: steps[group.own_slots is not None]
            for group in self._groups
            if group.by_row is None
        }
        if self.states is not None:
            groups[STATE] = self.states.last
        return StepView(
            request_ids=names,
            rows=columns.rows,
            prefix_lens=columns.prefixes,
            extend_lens=extends,
            token_starts=starts,
            input_ids=tokens[0],
            positions=tokens[1],
            digests=None if self._drafts else columns.digests,
            groups=groups,
            known_lens=columns.known_lens,
            known_digests=columns.known_digests,
        )

    def _make_columns(self, count: int, width: int) -> _Columns:
        extends, starts = self._lengths
        if width not in self._equal:  # SGLang has changed how far it drafts
            self._add_width(width)
        same, each = self._equal[width]
        digests, known_lens, known_digests = self._memory.known[:, :count]
        windowed, added = self._memory.window_slots, count * width
        written = [] if windowed is None else [windowed[:added]]
        made = self._columns[count, width] = _Columns(
            prefixes=self._memory.prefix_lens[:count], extends=extends[:count], starts=starts[: count + 1],
            same=same[:count], rows=self._counting[:count], each=each[: count + 1],
            digests=digests, known_lens=known_lens, known_digests=known_digests,
            tokens=(*self._memory.tokens[:, :added], *written),
        )  # fmt: skip
        return made

    def _add_width(self, width: int) -> None:
        self._equal[width] = torch.full_like(self._counting, width), self._counting * width

    def _copy_rows(self, rows: Tensor, count: int, longest: int) -> None:
        width = min(-(-longest // _WIDTH) * _WIDTH, self._table.shape[1])
        found = self._tables.get((count, width))
        if found is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            found = self._tables[count, width] = self._table[:, :width], self._memory.table[:count, :width]
        source, own = found
        torch.index_select(source, 0, rows, out=own)
        if self._windows is not None and self._memory.windows is not None:
            self._memory.windows[:count, :width] = self._windows[own]

    def _written(self, batch: Any) -> list[Tensor]:
        """Slots in the window group, if there is one, that the forward of a prompt writes."""
        return [] if self._windows is None else [own_slots(self._windows, batch.out_cache_loc)]

    @property
    def _mapping(self) -> Tensor | None:
        return None if self._windows is None else self._windows.mapping

    def _compile(self) -> None:
        """Compile the launch for decodes now, rather than in the first one."""
        one, (staging, _) = self._counting[1:2], next(self._staging)
        step = DecodeStep(self._table, one, one, one, one, one, staging, self._mapping)
        keep_decode(self._backend, self._memory, step, Known.GIVEN)


def _extended(batch: Any) -> tuple[_Longs, _Longs]:
    """Tokens of each request before and after the forward, int64 [n] each, as the scheduler has them."""
    if (mode := batch.forward_mode.name) not in EXTENDING:
        raise UnsupportedEngine(f"SGLang's forward mode {mode} is not covered yet")
    before = np.array(batch.extend_prefix_lens_cpu, dtype=np.int64)
    return before, before + np.array(batch.extend_seq_lens_cpu, dtype=np.int64)
