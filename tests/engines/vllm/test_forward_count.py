"""How forwards are counted from scheduler outputs, without a vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from canary_obs.engines.vllm.forward_count import ForwardCount, number_output


def outputs(scheduler: Any, *tokens: int) -> list[Any]:
    made = [
        SimpleNamespace(total_num_scheduled_tokens=count, num_scheduled_tokens={"a": count})
        for count in tokens
    ]
    for output in made:
        number_output(scheduler, output)
    return made


def counter() -> tuple[ForwardCount, Any]:
    count = ForwardCount(("full", "draft"))
    return count, count.around_execute_model(lambda output: output)


def test_only_outputs_with_tokens_count() -> None:
    count, execute_model = counter()
    for output in outputs(SimpleNamespace(), 5, 0, 1):
        assert execute_model(output) is output
    assert count.by_group == {"full": 2, "draft": 2}
    assert count.requests == 2


def test_without_a_scheduler_that_numbers_them_outputs_count_one_by_one() -> None:
    count, execute_model = counter()
    for tokens in (3, 0, 4):
        output = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": tokens})
        execute_model(output)
        count.note(output)
    assert count.by_group == {"full": 2, "draft": 2}


def test_an_output_that_came_past_the_worker_is_counted_by_the_next() -> None:
    count, execute_model = counter()
    scheduler = SimpleNamespace()
    outputs(scheduler, 1, 1, 1)  # before the attachment
    first, _, _, last = outputs(scheduler, 1, 1, 1, 1)
    execute_model(first)
    assert count.by_group["full"] == 1
    execute_model(last)
    assert count.by_group["full"] == 4


def test_an_output_that_two_hooks_see_counts_once() -> None:
    count, execute_model = counter()
    scheduler = SimpleNamespace()
    for output in outputs(scheduler, 1, 1):
        execute_model(output)
        count.note(output)
    assert count.by_group["full"] == 2
    (past,) = outputs(scheduler, 1)
    count.note(past)  # not by the worker's method
    assert count.by_group["full"] == 3


def test_it_is_under_way_until_the_worker_is_done() -> None:
    count = ForwardCount(("full",))
    seen = []

    def execute(output: Any) -> None:
        seen.append(count.under_way)
        if output is None:
            raise RuntimeError

    execute_model = count.around_execute_model(execute)
    execute_model(outputs(SimpleNamespace(), 1)[0])
    assert not count.under_way
    with pytest.raises(AttributeError):
        execute_model(None)
    assert (seen, count.under_way) == ([True], False)
