"""What a slot held when it was found damaged: what filled it last, which need not be who holds its block."""

from __future__ import annotations

from canary_obs.engine_api.requests import BlockTable
from canary_obs.records import Violation
from canary_obs.runtime.taint.held_blocks import Bools, Content, HeldBlocks, Ints
from canary_obs.runtime.taint.reading import Readers
from canary_obs.vocabulary import Phase


def slot_content(
    row: Violation, table: BlockTable, readers: Readers, step: int, *, overwritten: bool, written: int | None
) -> Content:
    """The content of the row's slot in forward `step`; `overwritten`: before the last filling of its block.

    A request fills a block slot by slot, and may end before the last: earlier contents are part of this
    one as long as it is not known that the slot was written since. `written`: forward of the slot's last
    write, as far as it is known.
    """
    held = readers.held[table.name]
    block, offset = divmod(row.slot, table.block_slots)
    content = held.content(block, step, before_refill=overwritten)
    if row.redetection:
        return content  # what was there before is followed since it was found
    since = content.since
    while since is not None:
        if not overwritten and written is not None:
            filled = written >= since
        elif table.rewritten:
            filled = False  # whoever holds it may not have come to this slot, or have read what was there
        else:
            # A slot that stands for several tokens is written with the last of them.
            own = (offset + 1) * table.block_tokens // table.block_slots - 1
            filling = [
                (life, number * table.block_tokens + own) for life, number in held.fillers(block, since)
            ]
            # What a forward writes over it has not written before, also where it has ended since.
            now = step if row.phase is Phase.HEAD else step + 1
            filled = _wrote(readers, filling, now if content.until is None else min(now, content.until))
        if filled:
            break
        earlier = held.content(block, since - 1, before_refill=False).since
        if earlier is None and readers.forgotten_until(step) < 0:
            break  # nobody held it before
        content, since = Content(earlier, content.until), earlier
    return content


def readers_of(
    held: HeldBlocks, block: int, content: Content, written: int | None
) -> tuple[Ints, Ints, Bools, bool]:
    """Lives that held a content of a block, as `HeldBlocks.of_content`, and whether others fill it anew.

    Those have not come to the slot yet, which was last `written` before: nobody reads what he has to fill.
    """
    lives, starts, joined = held.of_content(block, content)
    if written is None:
        return lives, starts, joined, False
    read = joined | (starts <= written)
    return lives[read], starts[read], joined[read], not read.all()


def before_filling(held: HeldBlocks, block: int, step: int, content: Content) -> int | None:
    """Of a slot that forward `step` writes over: the last one before its request began to fill the block.

    None = the slot holds what that request has written itself, or may have.
    """
    since = held.content(block, step, before_refill=False).since
    return None if since is None or since == content.since else since - 1


def _wrote(readers: Readers, filling: list[tuple[int, int]], until: int) -> bool:
    """Whether one of these lives has certainly computed the token at its position, before forward `until`."""
    lives = readers.lives
    for life, position in filling:
        if readers.computed_at(life, until - 1) > position:
            return True
        emitted, before = lives.emitted[life], lives.emitted_before(life)
        # A request that came back counts the tokens of its earlier lives, too: it may not have come so far.
        if emitted is None or before is None or emitted <= before:
            continue
        if lives.last[life] < until and lives.prompts[life] + emitted - 1 > position:
            return True
    return False
