"""docs/replays.md out of the replays: `python -m tests.replays.table > docs/replays.md`."""

from __future__ import annotations

from tests.replays.replay import ENGINES, Replay, collected
from tests.replays.unread import SEARCHED, UNREAD

_HEAD = """# Incident replays

Public reports of corrupted KV, each rebuilt as one file in `tests/replays/reports`: the bug is planted where
the report has it, in the logic of a real vLLM's or SGLang's scheduler, connector or host tier on a CPU, and
requests are served. What the canary finds first, and after how many forwards, must be exactly this.
`KV_CANARY_VERIFY_ON_HIT` and `KV_CANARY_PREFIX_DATA` are on, `KV_CANARY_STATE_INTERVAL` is 1, patrol and
sweeps run once, at the end; all else has its default. Steps are the forwards that began between the moment
wrong bytes were in the engine and the first finding: 0 = before any forward could use them.

Made by `python -m tests.replays.table > docs/replays.md`; run by `test_replays.py` in
`tests/engines/vllm/real` and `tests/engines/sglang/real`.
"""


def table() -> str:
    """The page."""
    replays = list(collected().values())
    listed = [replay for replay in replays if replay.listed]
    others = [replay for replay in replays if not replay.listed]
    seen = sum(bool(replay.finds) for replay in listed)
    lines = [_HEAD, f"## The fifteen reports: {seen} of 15 seen\n"]
    lines += _rows(listed)
    lines += [
        f"\nNot replayed, and so not known to be seen: {', '.join(map(_link, UNREAD))}. Its text was not "
        f"found. Searched were {SEARCHED}.",
    ]
    if others:
        lines += ["\n## Others of the same kinds\n", *_rows(others)]
    return "\n".join(lines) + "\n"


def _rows(replays: list[Replay]) -> list[str]:
    head = ["| report | mechanism | rebuilt | on | seen | steps |", "|---|---|---|---|---|---|"]
    return head + [
        f"| {_link(each.report)} {each.title} | {each.mechanism} | {each.rebuilt} | {ENGINES[each.rig]} "
        f"| {'; '.join(each.finds) or 'no'} | {each.steps if each.finds else ''} |"
        for each in replays
    ]


def _link(report: str) -> str:
    owner, name, _, number = report.removeprefix("https://github.com/").split("/")
    return f"[{owner if name == owner else name}#{number}]({report})"


if __name__ == "__main__":
    print(table(), end="")
