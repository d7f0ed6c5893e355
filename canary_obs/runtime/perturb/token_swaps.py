"""Next tokens of two requests exchanged on their way from the sampler to the forward that writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from canary_obs.engine_api.views import StepView
from canary_obs.runtime.perturb.injection import Injection, Outcome
from canary_obs.runtime.perturb.target import Target
from canary_obs.vocabulary import PerturbMode

_UNREAD = "no later forward read the two tokens"


class _Next(NamedTuple):
    """A request that adds one token to its prefix."""

    place: int  # in the forward's input ids
    token: int
    slot: int
    position: int


@dataclass(slots=True, kw_only=True)
class _Swap:
    """Two exchanged tokens, and whether their slots were rewritten or read since."""

    injection: Injection
    pair: tuple[_Next, _Next]
    records: list[tuple[int, ...]] | None = None  # of both slots, once written
    read: bool = False  # by a later forward


class TokenSwaps:
    """Mode next_token_swap: neither the engine's own token lists nor its scheduler see the exchange.

    What the forward writes is consistent in itself: wrong tokens with their own KV. Nothing is restored.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._swaps: list[_Swap] = []  # open ones

    def swap(self, view: StepView, step: int) -> str | None:
        """Exchange two of the forward's inputs; returns why not, None = it did."""
        target = self._target
        if target.group.batch(view).input_ids is not view.input_ids:
            return "the group's entries are not the tokens of the forward"
        adding = self._adding_one(view)
        if len(adding) < 2:
            return "fewer than two requests add one token each"
        first = target.random.choice(adding)
        others = [other for other in adding if other.token != first.token]
        if not others:
            return "all requests that add one token add the same"
        pair = first, target.random.choice(others)
        if any(target.holds(one.slot) for one in pair):
            return "a slot that the forward writes holds an injection already"
        for one, other in (pair, pair[::-1]):
            view.input_ids[one.place] = other.token
        slots, positions = [one.slot for one in pair], [one.position for one in pair]
        injection = target.injection(
            PerturbMode.NEXT_TOKEN_SWAP, slots[0], step, position=positions[0],
            also=self._written(view, pair), following=frozenset(position + 1 for position in positions),
            detail=f"with slot={slots[1]}, position={positions[1]}",
        )  # fmt: skip
        self._swaps.append(_Swap(injection=injection, pair=pair))
        return None

    def follow(self, view: StepView) -> None:
        """A forward is next: note what it reads."""
        self._drop_closed()
        if self._target.name not in view.groups:
            return
        unread = [swap for swap in self._swaps if not swap.read]
        if not unread:
            return
        prefixes, table = self._target.prefixes(view), self._target.table(view)
        for swap in unread:
            swap.read = any(
                first <= one.position < stop and self._target.slot_at(table, row, one.position) == one.slot
                for one in self._left(swap)
                for row, first, stop in prefixes
            )

    def _left(self, swap: _Swap) -> list[_Next]:
        """Those of the pair that nobody has written over: another request may have the slot by now."""
        now = zip(swap.pair, swap.records or (), self._records(swap), strict=False)
        return [one for one, then, record in now if record == then]

    def written(self) -> None:
        """The forward is over."""
        for swap in self._swaps:
            if swap.records is None:
                swap.records = self._records(swap)

    def abandon(self) -> None:
        """The forward has failed: what it wrote counts as unverified."""
        for swap in self._swaps:
            if swap.records is None:
                self._close(swap, Outcome.MASKED, "the forward failed")
        self._drop_closed()

    def settle(self) -> None:
        """Close those whose slots were both rewritten; every violation up to now is known."""
        for swap in self._swaps:
            if swap.records is not None and not set(swap.records) & set(self._records(swap)):
                if swap.read:
                    self._close(swap, Outcome.MISSED, "read by a later forward, which no check named")
                else:
                    self._close(swap, Outcome.MASKED, _UNREAD)
        self._drop_closed()

    def finish(self) -> None:
        """Every check was made; what is open now and was never read could not be found."""
        for swap in self._swaps:
            if not swap.read:
                self._close(swap, Outcome.MASKED, _UNREAD)
        self._swaps.clear()

    def _adding_one(self, view: StepView) -> list[_Next]:
        batch = self._target.group.batch(view)
        tokens, slots = view.input_ids.tolist(), batch.out_slots.tolist()
        columns = batch.rows, batch.prefix_lens, batch.extend_lens, batch.token_starts
        return [
            _Next(place=place, token=tokens[place], slot=slots[place], position=prefix)
            for row, prefix, extend, place in zip(*(column.tolist() for column in columns), strict=False)
            if row >= 0 and prefix > 0 and extend == 1 and slots[place] >= 0
        ]

    def _written(self, view: StepView, pair: tuple[_Next, _Next]) -> frozenset[tuple[str, int]]:
        """Where the two tokens are written, in every group that holds the forward's own tokens."""
        return frozenset(
            (name, int(shown.out_slots[one.place]))
            for name, shown in view.groups.items()
            if shown.tokens is None or shown.tokens.input_ids is view.input_ids
            for one in pair
        )

    def _records(self, swap: _Swap) -> list[tuple[int, ...]]:
        return [self._target.record(one.slot) for one in swap.pair]

    def _close(self, swap: _Swap, outcome: Outcome, why: str) -> None:
        if swap.injection.outcome is Outcome.OPEN:
            self._target.injections.close(swap.injection, outcome, why)

    def _drop_closed(self) -> None:
        self._swaps = [swap for swap in self._swaps if swap.injection.outcome is Outcome.OPEN]
