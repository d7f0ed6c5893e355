"""What speculation adds to the hooks of a scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canary_obs.engines.sglang.speculation import Speculation, draft_runners, drafts_left_out, drafts_trees

TABLE = torch.arange(40, dtype=torch.int32).view(4, 10)
TARGET: Any = SimpleNamespace(last=None)


class Emptied:
    """An observer that keeps which slots lose their records."""

    def __init__(self) -> None:
        self.slots: list[tuple[str, list[int]]] = []

    def invalidated(self, group: str, slots: Any) -> None:
        self.slots.append((group, [slot for slot in slots.tolist() if slot >= 0]))


def scheduler(*runners: Any) -> Any:
    target = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=TABLE))
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=target),
        draft_worker=SimpleNamespace(_draft_model_runners=lambda: runners),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: True),
    )


def batch(*, decodes: bool) -> Any:
    kv = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=length)) for length in (6, 4)]
    return SimpleNamespace(
        reqs=kv, seq_lens=torch.tensor([2, 3]), req_pool_indices=torch.tensor([2, 3]),
        forward_mode=SimpleNamespace(is_decode=lambda: decodes),
    )  # fmt: skip


def test_what_drafting_may_write_has_no_record() -> None:
    observer: Any = Emptied()
    Speculation(scheduler(object()), observer, None, TARGET).begin(batch(decodes=True))
    assert observer.slots == [("draft", [22, 23, 24, 25, 33])]


def test_what_several_models_drafted_stays_until_it_is_written_again() -> None:
    observer: Any = Emptied()
    target: Any = SimpleNamespace(last="of the batch before")
    runners = [SimpleNamespace(draft_model_idx=number) for number in range(2)]
    Speculation(scheduler(*runners), observer, None, target).begin(batch(decodes=True))
    assert observer.slots == []
    assert target.last is None


def test_the_older_sglang_keeps_its_runners_elsewhere() -> None:
    runner = SimpleNamespace()
    worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=[runner]))
    older = SimpleNamespace(draft_worker=worker)
    assert draft_runners(older) == (runner,)


def test_what_draft_models_keep_is_named_with_its_bytes() -> None:
    """K and V apart, or one number."""
    pools = [SimpleNamespace(get_kv_size_bytes=lambda held=held: held) for held in ((30, 20), 50)]
    (found,) = drafts_left_out(scheduler(*[SimpleNamespace(token_to_kv_pool=pool) for pool in pools]))
    assert found.described(400).startswith(
        "layers of draft models are not checked (25.0% of KV bytes): on GPUs"
    )
    assert drafts_left_out(scheduler()) == ()


@pytest.mark.parametrize(("runners", "decodes"), [((), True), ((object(),), False)])
def test_what_nobody_drafts_keeps_its_records(runners: Any, decodes: bool) -> None:
    observer: Any = Emptied()
    Speculation(scheduler(*runners), observer, None, TARGET).begin(batch(decodes=decodes))
    assert observer.slots == []


@pytest.mark.parametrize(
    ("algorithm", "branches", "trees"),
    [(None, None, False), ("EAGLE", 1, False), ("EAGLE3", 4, True), ("NGRAM", 1, True)],
)
def test_which_drafts_branch(algorithm: str | None, branches: int | None, trees: bool) -> None:
    arguments = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=branches)
    assert drafts_trees(arguments) is trees


def test_a_scheduler_may_have_no_drafts() -> None:
    assert draft_runners(SimpleNamespace(draft_worker=None)) == ()
    assert draft_runners(SimpleNamespace()) == ()
