"""Tables in metadata of the forms that vLLM's backends have, against those of a runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from canary_obs.engine_api.views import ComparedTables, GroupStep
from canary_obs.engines.vllm.attention_tables import AttentionTables
from canary_obs.engines.vllm.groups import VllmGroup

ROWS, WIDTH, TOKENS = 6, 4, 5
LAYERS = ("layer 0", "layer 1")


def group(
    name: str, layers: tuple[str, ...] = LAYERS, *, draft: bool = False, of_tokens: bool = True
) -> VllmGroup:
    view = SimpleNamespace(name=name)
    own = SimpleNamespace(view=view, layers=layers, draft=draft, states=False, of_tokens=of_tokens)
    return cast("VllmGroup", own)


def a_step() -> GroupStep:
    table = torch.arange(ROWS * WIDTH, dtype=torch.int32).reshape(ROWS, WIDTH)
    return GroupStep(slot_table=table, out_slots=torch.arange(8)[:TOKENS])


def plain(table: Tensor, slots: Tensor) -> Any:
    return SimpleNamespace(block_table=table, slot_mapping=slots)


def split(decodes: Tensor, prefills: Tensor | None, slots: Tensor) -> Any:
    return SimpleNamespace(
        num_decodes=len(decodes), slot_mapping=slots, decode=SimpleNamespace(block_table=decodes),
        prefill=None if prefills is None else SimpleNamespace(block_tables=prefills),
    )  # fmt: skip


class Given:
    """One group, whose layers are given some metadata."""

    def __init__(self) -> None:
        self.tables, self.own = AttentionTables([group("full"), group("draft", draft=True)]), a_step()

    def __call__(self, *metadata: Any, mappings: Any = None) -> GroupStep:
        both = metadata * 2 if len(metadata) == 1 else metadata
        by_layer = dict(zip(LAYERS, both, strict=True))
        steps = {"full": self.own, "draft": self.own}
        self.shown = self.tables.given(by_layer, mappings, steps, TOKENS)
        self.same = self.shown is steps
        assert self.shown["draft"] is self.own
        return self.shown["full"]

    @property
    def counts(self) -> ComparedTables:
        (counts,) = self.tables.counts.values()
        return counts


def test_the_runners_own_tensors_are_shown_as_they_are() -> None:
    given = Given()
    own, slots = given.own.slot_table, given.own.out_slots
    padded = plain(own[:4], torch.arange(8))
    for metadata in (plain(own[:3], slots), split(own[:2], own[2:5], slots), split(own[:2], None, slots)):
        given(metadata)
        assert given.same
    assert padded.slot_mapping.data_ptr() != slots.data_ptr()
    given(plain(own, slots), mappings=dict.fromkeys(LAYERS, slots))
    assert given.same
    assert given.counts == ComparedTables(4, None)


def test_another_table_is_shown_instead_of_the_runners() -> None:
    given = Given()
    own, slots = given.own.slot_table, given.own.out_slots
    stale = own[:3] + 100
    # In one of two layers that are given metadata of their own.
    for metadata in ((plain(stale, slots),), (plain(own, slots), plain(stale, slots))):
        step = given(*metadata)
        assert step.slot_table.shape == own.shape
        assert torch.equal(step.slot_table[:3], stale)
        assert step.out_slots is slots
        assert own[0, 0] == 0
    assert given.counts == ComparedTables(2, None)


def test_a_wrong_part_is_seen_in_its_rows() -> None:
    given = Given()
    own, slots = given.own.slot_table, given.own.out_slots
    for decodes, prefills in (
        (own[:2], own[2:5] + 100),
        (own[:2] + 100, own[2:5]),
        (own[:2], own[1:4]),  # of the row before
    ):
        step = given(split(decodes, prefills, slots))
        assert torch.equal(step.slot_table[:5], torch.cat((decodes, prefills)))
    # The right address, with rows of another length.
    apart = own.as_strided((2, WIDTH), (WIDTH + 1, 1))
    assert torch.equal(given(plain(apart, slots)).slot_table[:2], apart)
    assert given.counts == ComparedTables(4, None)


def test_another_mapping_is_shown_instead_of_the_runners() -> None:
    given = Given()
    own, slots = given.own.slot_table, given.own.out_slots
    shifted = torch.arange(8) + 1
    for metadata, mappings in (
        (plain(own, shifted), None),
        (plain(own, slots), dict.fromkeys(LAYERS, shifted)),
        (plain(own, slots), {LAYERS[0]: slots, LAYERS[1]: shifted}),
    ):
        step = given(metadata, mappings=mappings)
        assert step.out_slots.tolist() == shifted[:TOKENS].tolist()
        assert step.slot_table is own
    assert given.counts == ComparedTables(3, None)


def test_what_cannot_be_compared_is_not_counted() -> None:
    given = Given()
    own, slots = given.own.slot_table, given.own.out_slots
    nothing = SimpleNamespace(slot_mapping=slots)
    for metadata, gap in (
        ((nothing,), "SimpleNamespace has no table"),
        ((SimpleNamespace(slot_mapping=slots, decode=nothing, num_decodes=1),), "has no table"),
        ((plain(own[:, :2], slots),), "blocks of another size"),
        ((split(own[:4], None, slots), nothing), "has no table"),
        ((plain(own + 1, slots), plain(own + 2, slots)), "several tables"),
    ):
        given(*metadata)
        assert given.counts.forwards == 0
        assert given.counts.gap is not None
        assert gap in given.counts.gap
    per_token = split(own[:3], None, slots)
    per_token.num_decodes = 1
    given(per_token)
    assert "a row per token" in str(given.counts.gap)
    for metadata, gap in ((None, "one per layer"), ([{}], "one per layer"), ({}, "KeyError")):
        steps = {"full": given.own}
        assert given.tables.given(metadata, None, steps, TOKENS) is steps
        assert gap in str(given.counts.gap)
    assert given.counts.forwards == 0


def test_a_group_of_one_layer() -> None:
    tables, own = AttentionTables([group("full", ("layer 0",)), group("swa", ("layer 1",))]), a_step()
    good, bad = plain(own.slot_table, own.out_slots), plain(own.slot_table + 1, own.out_slots)
    shown = tables.given({"layer 0": good, "layer 1": bad}, None, {"full": own, "swa": own}, TOKENS)
    assert shown["full"] is own
    assert torch.equal(shown["swa"].slot_table, own.slot_table + 1)
    assert [found.forwards for found in tables.counts.values()] == [1, 1]


def test_entries_are_shown_where_attention_writes_them() -> None:
    tables, own = AttentionTables([group("c4", of_tokens=False)]), a_step()
    written = torch.tensor([-1, 9, -1, -1, 10, 77])
    given = dict.fromkeys(LAYERS, plain(own.slot_table[:2], written))
    assert tables.entry_mappings(given, TOKENS)["c4"].tolist() == [-1, 9, -1, -1, 10]
    entries = GroupStep(slot_table=own.slot_table, out_slots=torch.tensor([9, 10]))
    assert tables.given(given, None, {"c4": entries}, TOKENS)["c4"] is entries
    assert tables.counts["c4"] == ComparedTables(1, None)


def test_a_table_of_entries_that_is_not_the_runners_is_shown() -> None:
    tables, own = AttentionTables([group("c4", of_tokens=False)]), a_step()
    other, slots = own.slot_table[:2] + 50, torch.tensor([9, -1, -1, -1, -1])
    entries = GroupStep(slot_table=own.slot_table, out_slots=slots[:1])
    given = dict.fromkeys(LAYERS, plain(other, slots))
    shown = tables.given(given, None, {"c4": entries}, TOKENS)["c4"]
    assert torch.equal(shown.slot_table[:2], other)
    assert torch.equal(shown.out_slots, entries.out_slots)
    assert tables.counts["c4"] == ComparedTables(1, None)


def test_layers_whose_entries_go_to_several_places_are_not_compared() -> None:
    tables, own = AttentionTables([group("c4", of_tokens=False)]), a_step()
    both = (plain(own.slot_table, torch.tensor([9, -1])), plain(own.slot_table, torch.tensor([-1, 9])))
    entries = GroupStep(slot_table=own.slot_table, out_slots=torch.tensor([9]))
    tables.given(dict(zip(LAYERS, both, strict=True)), None, {"c4": entries}, TOKENS)
    assert tables.counts["c4"].forwards == 0
    assert tables.counts["c4"].gap is not None
