"""Launches the checks around one model forward: identities, links and bytes of every group."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from torch import Tensor

from canary_kernels import layout
from canary_kernels.fingerprint import compare_slots, complete_slots
from canary_kernels.forward_start import start_forward
from canary_kernels.layer_write import check_layer, note_layer
from canary_kernels.verify import verify_rows
from canary_kernels.write import write_identities
from canary_obs.config import CanaryConfig
from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.launches import FEW_TOKENS
from canary_obs.engine_api.views import StepView
from canary_obs.runtime.device.replays import Launch, Replays
from canary_obs.runtime.device.state import FORWARD_TICKS, DeviceState, Group
from canary_obs.runtime.early_comparison import EarlyComparison
from canary_obs.runtime.first_reads import FirstReads
from canary_obs.runtime.forward_account import ForwardAccount
from canary_obs.runtime.health import Health
from canary_obs.runtime.launch_account import LaunchAccount
from canary_obs.runtime.launched_checks import Batches, launch_checks
from canary_obs.runtime.prefix_slots import prefix_slots
from canary_obs.runtime.shown_groups import Shown, groups_of

Inject = Callable[[StepView, int], None]


class ForwardChecks:
    """Launches only; waits for the device nowhere but in `prefix_slots`."""

    def __init__(
        self, state: DeviceState, health: Health, account: ForwardAccount, first_reads: FirstReads,
        config: CanaryConfig, adapter: EngineAdapter,
    ) -> None:  # fmt: skip
        self._state, self._health, self._account, self._first_reads = state, health, account, first_reads
        self._scheduled, self._compared = adapter.requests_scheduled, 0
        self._reuse, self._prefix = config.reuse_data, config.checks_prefix_data
        self._batches: Batches = ()
        self._batched: StepView | None = None  # the view that `_last_batches` are of
        self._last_batches: Batches = ()
        self._owing: StepView | None = None  # whose new slots are to be fingerprinted
        self._last: Shown | None = None
        self._launched = LaunchAccount(state.owed)
        # A layer that changes from forward to forward, and slots that the host has to list, are not captured.
        changing = self._prefix or any(group.layers.num_layers for group in state.groups)
        self.replays = None if changing else Replays(state.clock.device)
        self._replay: Launch | None = None  # due with the tail: it is the head's launches, too
        self._rest: Callable[[], None] | None = None  # of the columns of the forward under way
        self._early, self._began = EarlyComparison(state), (-1, -1)  # clock and others as a forward began
        self._clock_late = False  # the head brings it up to this forward, by this:
        self._start_late = partial(start_forward, state.backend, state.clock, FORWARD_TICKS)

    def start(self) -> None:
        """Begin: what the engine has scheduled so far is not compared."""
        self._compared = self._scheduled() or 0

    def before_write(self, view: StepView, step: int, inject: Inject | None = None) -> None:
        """Compare the bytes that forward number `step` is about to overwrite, and those copied for it.

        `inject`: called before anything is compared.
        """
        self._account.begin(view.groups)
        state, shown = self._state, self._show(view)
        if view.launches is not None:
            self._rest = view.launches.stage(step)
        if inject is not None:
            state.tick(step)
            self._start(view, 0)
            inject(view, step)
        for group, slots in self._first_reads.take_copied() if self._first_reads.waiting else ():
            state.tick(step)
            compare_slots(state.backend, group.buffers, group.plan, slots, layout.Phase.HIT)
            self._health.count_launch(group.index, layout.Phase.HIT)
        launched = self._launched
        if shown is not launched.shown:
            launched.begin(shown)
        if self._reuse:
            launched.compared += 1
        follows = state.advance(step)
        self._began = state.now, state.adoptions.others
        if follows and inject is None and self.replays is not None:
            last = self.replays.before
            if last.view is not view or last.parts is not shown:
                last.renew(view, shown, may=may_repeat(view))
            if last.launch is None and last.may:
                launch = partial(self._start_and_compare, view, shown, FORWARD_TICKS)
                last.launch = self.replays.use((view.launches, *shown.slots), launch)
            if last.launch is not None:
                last.launch()
                state.clock_is_set()
                self.replays.replayed += 1
                return
        if follows and inject is None and view.launches is not None:
            self._start(view, FORWARD_TICKS)
            state.clock_is_set()
        else:
            state.set_clock()
            if inject is None:
                self._start(view, 0)
        for group, slots in shown.groups:
            if self._reuse:
                given = group.backend, group.buffers, group.plan, slots, layout.Phase.HEAD
                compare_slots(*given, of_forward=True)
            if (layer := group.layers.next_layer()) is not None:
                note_layer(state.backend, group.buffers, layer, group.layers.witness, slots)

    def may_compare_early(self, view: StepView) -> bool:
        """Whether `compare_early` may take the place of `before_write`: the last forward showed this view."""
        state = self._state
        if self.replays is None or view is not self._batched or view.launches is not None:
            return False
        # What was launched since that forward began, other than its checks, may not be over yet.
        others = (state.now, state.adoptions.others) != self._began or not state.clock_set
        return not others and self._account.expects(view.groups)

    def compare_early(self, view: StepView, slots: Tensor, step: int) -> None:
        """The same while the last forward runs, whose checks still read the clock: the head sets it.

        `slots`: the new ones (int64 [n]), which the view's tensors do not have yet.
        """
        self._account.begin(view.groups)
        shown = self._show(view)
        self._launched.begin(shown)
        self._clock_late = self._state.advance(step)
        self._began = self._state.now, self._state.adoptions.others
        if self._reuse:
            self._launched.compared += 1
            self._early.launch(shown, slots)

    def before_load(self, group: Group, slots: Tensor, step: int) -> None:
        """Compare the bytes of slots (int64 [n]; -1 = skip) that a load writes over after forward `step`."""
        if not self._reuse:
            return
        self._account.before_comparison(group.name)
        state = self._state
        state.tick(step)
        state.arrivals.compared_before(state.now)
        state.owed.compared(group.index, layout.Phase.HEAD, slots.shape[0])
        slots = slots.to(group.memory.device, non_blocking=True).contiguous()
        compare_slots(state.backend, group.buffers, group.plan, slots, layout.Phase.HEAD)

    def _start_and_compare(self, view: StepView, shown: Shown, ticks: int) -> None:
        self._start(view, ticks)
        for group, slots in shown.groups if self._reuse else ():
            given = group.backend, group.buffers, group.plan, slots, layout.Phase.HEAD
            compare_slots(*given, of_forward=True)

    def _start(self, view: StepView, ticks: int) -> None:
        launches = view.launches
        if launches is not None:
            start_forward(self._state.backend, self._state.clock, ticks, launches.host, view.rows.shape[0])
            if launches.before_write is not None:
                launches.before_write()
        elif ticks:
            start_forward(self._state.backend, self._state.clock, ticks)

    def head(self, view: StepView) -> None:
        """Write the identities of the new tokens; verify the links of every prefix.

        Of batches that repeat, this is left to `tail`, which launches all of it as one; see `launch_head`.
        """
        self._owing, self._replay, launches = view, None, view.launches
        if self._rest is not None and launches is not None:
            rest, self._rest = self._rest, None
            rest()
            given = self._state.clock, 0, launches.host, view.rows.shape[0]
            start_forward(self._state.backend, *given, rows=False)  # whose memory may be gone
        if view is not self._batched:  # a batch that repeats is shown as the same view
            self._batched, groups = view, self._show(view).groups
            self._last_batches = tuple((group, group.batch(view)) for group, _ in groups)
        self._batches, state = self._last_batches, self._state
        late = self._clock_late and not state.clock_set
        if self.replays is not None and self._batches:
            last = self.replays.clocked if late else self.replays.after
            if last.view is not view or last.parts is not self._batches:
                last.renew(view, self._batches, may=may_repeat(view))
            if last.launch is None and last.may:
                start = self._start_late if late else None
                parts = launches, *[batch for _, batch in self._batches], *([state] if late else [])
                last.launch = self.replays.use(parts, partial(launch_checks, self._batches, launches, start))
            self._replay = last.launch
            if self._replay is not None:
                return
        self._clock_late = False
        if late:
            self._start_late()
            state.clock_is_set()
        if launches is not None:
            launches.launch_head()
        for group, batch in self._batches:
            group.first_positions.compute(batch.prefix_lens)
            write_identities(state.backend, group.buffers, batch)
            verify_rows(state.backend, group.buffers, batch, layout.Phase.HEAD)
            self._health.count_launch(group.index, layout.Phase.HEAD)

    def launch_head(self) -> None:
        """Leave nothing to the tail: other work on the records comes in between."""
        if self._replay is not None and self._owing is not None:
            replays, self.replays = self.replays, None
            self.head(self._owing)
            self.replays = replays

    def tail(self) -> None:
        """Fingerprint the new slots; verify all links; compare prefix bytes where configured."""
        state, health, replay, view = self._state, self._health, self._replay, self._owing
        if view is not None:
            shown = self._last
            if shown is None or shown.steps is not view.groups:
                shown = self._show(view)
            launched = self._launched
            if shown is not launched.shown:
                launched.begin(shown)
            launched.completed += 1
            if (total := self._scheduled()) is not None:
                # Every request that was scheduled is due a comparison of its tokens; the engine counts them.
                # A second forward in a step takes the place of one that failed; drafting schedules nothing.
                due, known = total - self._compared, view.known_lens
                if known is not None and due < known.shape[0]:
                    due = known.shape[0]
                self._compared = total
                launched.requests += due if due > 0 else 0
        self._owing = self._replay = None
        if replay is not None:
            replay()
            if self._clock_late:
                self._clock_late = False
                state.clock_is_set()
            if view is not None and view.launches is not None:
                view.launches.due = False
            if self.replays is not None:
                self.replays.replayed += 1
            for group, _ in self._batches:
                runs = health.launched_runs[group.index]
                runs[layout.Phase.HEAD] += 1
                runs[layout.Phase.TAIL] += 1
        for group, batch in self._batches if replay is None else ():
            complete_slots(state.backend, group.buffers, group.plan, batch.out_slots)
            if (layer := group.layers.noted_layer()) is not None:
                check_layer(state.backend, group.buffers, layer, group.layers.witness, batch.out_slots)
            verify_rows(state.backend, group.buffers, batch, layout.Phase.TAIL)
            health.count_launch(group.index, layout.Phase.TAIL)
            if self._prefix:
                slots = prefix_slots(batch)
                state.owed.compared(group.index, layout.Phase.TAIL, slots.shape[0])
                compare_slots(state.backend, group.buffers, group.plan, slots, layout.Phase.TAIL)
        if self.replays is not None and self.replays.due and view is not None:
            # The forward of a prompt takes long, and its host is ahead of the device.
            self.replays.end_forward(long=not may_repeat(view))
        self._batches = ()
        self._account.end()

    def _show(self, view: StepView) -> Shown:
        """What a view shows; one that is completed, or of a batch that repeats, shows the same steps."""
        last, steps = self._last, view.groups
        if last is None or last.steps is not steps or not all(map(operator.is_, steps.values(), last.parts)):
            last = self._last = groups_of(view, self._state)
        return last

    def abandon(self, view: StepView) -> None:
        """Adopt the output slots of a forward that failed: their content is unknown."""
        self._batches, self._owing, self._rest, self._clock_late = (), None, None, False
        self._compared = self._scheduled() or 0
        for group in self._state.named(view.groups):
            group.adopt(view.groups[group.name].out_slots)
        self._account.end()

    def never_began(self, view: StepView) -> None:
        """`abandon` a forward that was counted, but not begun here."""
        self._account.begin(view.groups)
        self.abandon(view)


def may_repeat(view: StepView) -> bool:
    """Whether as many, and few, tokens of each request are computed. A forward of prompts hardly repeats.

    What is kept, and waits for its capture, is of such forwards alone.
    """
    requests, tokens = view.rows.shape[0], view.input_ids.shape[0]
    return tokens <= FEW_TOKENS * requests and (tokens == requests or tokens % requests == 0)
