"""The hooks for slots that change outside of forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from canary_obs.config import CanaryConfig
from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.runtime.announcements import Announcements
from canary_obs.runtime.delivery import ViolationDelivery
from canary_obs.runtime.faults import Faults
from canary_obs.runtime.hit_account import HitAccount
from canary_obs.runtime.run_state import RunState
from canary_obs.runtime.taint.report import TaintReporter
from canary_obs.runtime.transfer import RecordShares
from canary_obs.vocabulary import Mode, ObserverPart

_RAISE_SECONDS = 5.0  # mode raise waits so long for the comparison of received bytes


class SlotHooks:
    """Part of the Observer. An announcement that fails leaves every slot adopted: what it said is unknown."""

    def __init__(
        self,
        run: RunState,
        faults: Faults,
        announcements: Announcements,
        delivery: ViolationDelivery,
        hits: HitAccount | None,
        taint: TaintReporter,
        config: CanaryConfig,
    ) -> None:
        """`hits`: None = prefix hits are not compared."""
        self.state_interval = config.states_checked_every
        self.taint = taint
        self._hook_run, self._hook_faults = run, faults
        self._announcements, self._delivery, self.hits = announcements, delivery, hits
        self._shares = RecordShares(announcements.state, faults)

    @property
    def adoptions(self) -> int:
        """How often records were declared unknown."""
        return self._announcements.state.adoptions.count

    @property
    def compares_hits(self) -> bool:
        """Whether `hit` compares anything."""
        return self.hits is not None

    @property
    def follows_readers(self) -> bool:
        """Whether damage is known, and who reads it is to be reported."""
        return bool(self.taint.tracker.damages)

    def hit(self, group: str, slots: Tensor) -> None:
        """Compare the bytes of slots that joined a request, before the forward that reads them first."""
        if self.hits is not None and slots.shape[0]:
            self._announce(self._hit, group, slots)

    def _hit(self, group: str, slots: Tensor, step: int) -> None:
        assert self.hits is not None
        self.hits.give(group, slots.shape[0])
        self._announcements.hit(group, slots, step)

    def requests_changed(self, shown: ChangedRequests) -> None:
        """Follow which requests hold which blocks."""
        run, faults = self._hook_run, self._hook_faults
        step = run.step if shown.step is None else shown.step
        if run.armed and not faults.guard(ObserverPart.TAINT, self.taint.follow, shown, step):
            self.taint.tracker.lost(None)

    def copied(self, group: str, source: Tensor, destination: Tensor) -> None:
        """Copy the records of copied slots; compare the copies before the next forward."""
        self._announce(self._announcements.copied, group, source, destination)

    def received(
        self, group: str, slots: Tensor, records: Tensor | None = None, peer: str = "", request: str = ""
    ) -> None:
        """Compare received bytes with the records that came with them; without records: a baseline."""
        self._announce(self._announcements.received, group, slots, records, peer, request)
        if records is not None:
            self._raise_what_arrived()

    def _raise_what_arrived(self) -> None:
        if self._hook_run.armed and self._hook_faults.mode is Mode.RAISE:
            self._delivery.drain(_RAISE_SECONDS)
            self._delivery.raise_pending()

    def before_load(self, group: str, slots: Tensor) -> None:
        """Compare what these slots hold before a load writes over it."""
        self._announce(self._announcements.before_load, group, slots)

    def awaited(self, group: str, slots: Tensor) -> None:
        """Leave these slots unverified until `received`."""
        self._announce(self._announcements.awaited, group, slots)

    def load_begun(self, load: str, group: str, blocks: LoadedBlocks) -> None:
        """Leave these blocks unverified until `load_ended`, and remember what they hold now."""
        self._announce(self._announcements.loads.begin, load, group, blocks)

    def load_ended(self, load: str, group: str, arrived: ArrivedBlocks) -> None:
        """Compare what has arrived with what was sent, and with what lay there before."""
        self._announce(self._announcements.loads.end, load, group, arrived)
        self._raise_what_arrived()

    def load_failed(self, load: str) -> None:
        """Empty the records of its slots: they must be written before they are read."""
        self._announce(self._announcements.loads.fail, load)

    def load_dropped(self, load: str) -> None:
        """Forget a load on which nobody will report."""
        self._announcements.loads.drop(load)

    def block_folds(
        self, group: str, slots: Tensor, *, baselines: bool = False, shares: Sequence[range] = ()
    ) -> Tensor | None:
        """Folded fingerprints of blocks, from their records; None = not armed, or reading them failed."""
        if not self._hook_run.armed:
            return None
        return self._shares.folds(group, slots, baselines=baselines, shares=shares)

    def records_of(self, group: str, slots: Tensor, shares: Sequence[range] = ()) -> Tensor | None:
        """Records to send with the bytes of these slots; None = not armed, or reading them failed."""
        return self._shares.read(group, slots, shares) if self._hook_run.armed else None

    def record_format(self, group: str) -> int | None:
        """Format number that a sender's records must have to be compared here."""
        return self._shares.format_of(group) if self._hook_run.armed else None

    def invalidated(self, group: str, slots: Tensor) -> None:
        """Empty the records of these slots."""
        self._announce(self._announcements.invalidated, group, slots)

    def _announce(self, apply: Callable[..., None], *arguments: object) -> None:
        run, faults = self._hook_run, self._hook_faults
        if run.armed:
            faults.guard(ObserverPart.HEAD, self._announcements.before)
        if run.armed and not faults.guard(ObserverPart.ANNOUNCE, apply, *arguments, run.step):
            faults.or_disarm(run, self._announcements.state.adopt_all)
