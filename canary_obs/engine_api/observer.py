"""What an adapter calls: the hooks that the canary runs around an engine's forwards and steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from canary_obs.engine_api.loads import ArrivedBlocks, LoadedBlocks
from canary_obs.engine_api.requests import ChangedRequests
from canary_obs.engine_api.views import StepView


class Observer(Protocol):
    """The canary as an adapter sees it.

    No hook waits for the device, except `received` in mode `raise`. In mode `log` no hook raises.
    A forward is either `before_forward`, `after_forward`, or, where its input tensors stay unchanged until
    its checks are done, `before_write`, `forward_launched`, `after_forward`.
    """

    @property
    def step(self) -> int:
        """Forwards that have begun here."""

    @property
    def injects(self) -> bool:
        """Whether faults are injected into what a forward is about to use."""

    overhead: dict[str, float]  # host seconds by hook; an adapter adds its own time to "adapter"

    def before_forward(self, step: StepView) -> None:
        """Run all checks that precede a forward. Call on the stream that runs the forward."""

    def before_write(self, step: StepView, early: Tensor | None = None) -> None:
        """Compare the bytes that the forward will overwrite. Call on the stream that runs the forward.

        Reads `groups` and `launches` only; `request_ids`, `digests` and `expected_ids` may be missing until
        `forward_launched`. Unless the observer `injects`, the values of all other tensors, and of the slot
        tables, may follow by then, too.

        `early`: where the forward will write (int64 [n] on the device, the same in each group), while the
        tensors of the view still have what the last forward's checks read. Call on a stream that the forward
        waits for, and that waits for all that has written these slots or their records, but not for the last
        forward, which writes none of them. Only after `may_compare_early`.
        """

    def may_compare_early(self, step: StepView) -> bool:
        """Whether `before_write` may be given `early`: the last forward showed this very view."""

    def forward_launched(self, step: StepView) -> None:
        """Run the remaining checks of a forward announced by `before_write`, from its complete view.

        Call on any stream that waits for what `before_write` launched.
        """

    def after_forward(self, step: StepView) -> None:
        """Fingerprint what the forward wrote. Call on its stream, or on one that waits for it.

        The view's tensors and the slot tables must stay unchanged until this work is done.
        """

    def forward_failed(self, step: StepView) -> None:
        """The forward raised, or cannot be checked: the content of its output slots is unknown.

        Also for a forward that was not begun here.
        """

    def fault(self, part: str, error: Exception) -> None:
        """The adapter itself failed in `part`: counted, and the state becomes `blind`."""

    def after_step(self, stream: AbstractContextManager[None] = ...) -> None:
        """Once per engine step, outside any captured graph, after its forwards were launched.

        Best called before the engine waits for the step's results. Launches inside `stream`, which must wait
        for `after_forward`; by default the current stream. It is entered only when something is launched.
        """

    def idle(self) -> bool:
        """Work to do while the engine has no requests. True = call again soon."""

    @property
    def state_interval(self) -> int:
        """Of so many forwards of the same requests, an adapter may show states in one alone; 1 = in each.

        The others it leaves out of its views, and of `EngineAdapter.forwards`. Before the first of them, what
        the states hold is given to `before_load`, and then to `awaited`. When `adoptions` has changed, the
        next forward is shown.
        """

    @property
    def adoptions(self) -> int:
        """How often records were declared unknown, after which slots get a baseline of what they hold."""

    @property
    def compares_hits(self) -> bool:
        """Whether `hit` compares anything: else it need not be called."""

    def hit(self, group: str, slots: Tensor) -> None:
        """Slots (int64 [n]) joined a request through the prefix cache.

        On the CPU, or on the engine's device; -1 = one that is named already, or none. The next forward reads
        them. Their bytes are compared here, so call it when they are there (not for the destinations of
        copies, which `copied` covers), on the stream that will run the forward, or next to it, once the
        engine has counted that. Earlier than `before_write` is better: the device compares while the host
        prepares the forward. `EngineAdapter.prefix_hits` counts the same slots, those that are -1 included.
        """

    @property
    def follows_readers(self) -> bool:
        """Whether damage is known: who reads it is reported as soon as `requests_changed` shows it."""

    def requests_changed(self, shown: ChangedRequests) -> None:
        """Requests began, ended, were preempted, or got blocks, since the forward before.

        Call before the forward that follows, or, with `shown.step`, later, in the order of the forwards: at
        the latest when `EngineAdapter.show_requests` is called, and while `follows_readers` in the same step.
        Not where nothing has changed. From these changes it is known who has read a slot that is found to be
        damaged; without them it is said not to be known.
        """

    def copied(self, group: str, source: Tensor, destination: Tensor) -> None:
        """The engine copied KV bytes from slots `source` to slots `destination` (int64 [n] each).

        The copies are compared when the next forward begins: by then they must have been made.
        """

    def received(
        self, group: str, slots: Tensor, records: Tensor | None = None, peer: str = "", request: str = ""
    ) -> None:
        """KV bytes arrived from outside the engine in `slots` (int64 [n], each once): they are there.

        Call on the stream that the bytes were written on, or on one that waits for it.

        `records` is what `records_of` returned at the sender: int64 [n, RECORD_WORDS], or int64 [shares, n,
        RECORD_WORDS] from senders that hold different heads or layers. The bytes are compared with them; in
        mode `raise` a mismatch raises KVCacheViolation here. Without records the bytes are fingerprinted as
        they arrived (a baseline): damage after that is seen, damage on the way is not.

        `peer` names the instance that sent them, one of few, and never a request; `request` is the one that
        they are for, which findings then name. "" = unknown.
        """

    def before_load(self, group: str, slots: Tensor) -> None:
        """KV bytes from elsewhere are about to be written over `slots` (int64 [n]).

        What they hold now is compared with its records, as before a forward writes. Call before the first
        byte may arrive, on a stream that the writes follow; `received` or `load_begun` comes later.
        """

    def awaited(self, group: str, slots: Tensor) -> None:
        """KV bytes will arrive in `slots` (int64 [n]) later; `received` announces them.

        Until then the slots count as unverified where they are met, and no baseline is taken of them.
        """

    def load_begun(self, load: str, group: str, blocks: LoadedBlocks) -> None:
        """A load will fill these blocks: like `awaited`, and what they hold now is remembered.

        `load` is the name of the request that it is for.

        Call before the first byte may arrive. `load_ended`, `load_failed` or `load_dropped` follows.
        """

    def load_ended(self, load: str, group: str, arrived: ArrivedBlocks) -> None:
        """The engine reported this load complete: the bytes are there, and nothing has read them yet.

        Blocks whose bytes equal a copy that may have been sent are as good as written here; others get a
        baseline. Bytes that equal no copy, or that are those from before where other tokens are to be, are
        violations; in mode `raise` they raise KVCacheViolation here.
        """

    def load_failed(self, load: str) -> None:
        """This load has failed: to read its slots before they are written is a violation."""

    def load_dropped(self, load: str) -> None:
        """Nobody will report on this load: its request has ended, and its slots go to others."""

    def block_folds(
        self, group: str, slots: Tensor, *, baselines: bool = False, shares: Sequence[range] = ()
    ) -> Tensor | None:
        """What `ArrivedBlocks.sent` needs of blocks that are sent or stored; None = not protecting.

        slots: int64 [blocks, size], -1 = not filled. int64 [blocks, 3] on the same device: 1 where all of a
        block's records are complete, else 0; then K and V folded, from the records, not from the bytes.
        `baselines`: those will do, as of states, whose baselines are taken when a forward has written them.

        With `shares`, ranges of global head numbers, together all that are held here, int64 [len(shares),
        blocks, 3], whose folds sum to the blocks'. Those of all shares but the last are of the bytes as they
        are now, and the last is what the records have besides: damage fails at a receiver of its own heads or
        of the last share.
        """

    def records_of(self, group: str, slots: Tensor, shares: Sequence[range] = ()) -> Tensor | None:
        """Records to send along with the bytes of `slots` (int64 [n]); None = not protecting.

        int64 [n, RECORD_WORDS]. With `shares`, ranges of global head numbers held here, int64 [len(shares),
        n, RECORD_WORDS]: one record per share, whose fingerprints sum to the whole slot's.
        """

    def record_format(self, group: str) -> int | None:
        """Format number of this group's records; None = not protecting.

        Records of a sender with another number must not be passed to `received`.
        """

    def invalidated(self, group: str, slots: Tensor) -> None:
        """The content of `slots` (int64 [n]) is undefined from now on; their records are cleared."""
