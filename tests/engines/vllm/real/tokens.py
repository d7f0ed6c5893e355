"""Tokens of a real vLLM's worker that are not the scheduler's, and comparisons of them that do not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from canary_kernels.layout import Phase
from canary_obs.engines.toolkit.known_tokens import KnownColumns
from canary_obs.engines.vllm.token_chains import CHAINS_ATTRIBUTE, TokenChains
from canary_obs.runtime import forward
from canary_obs.vocabulary import Reason, State
from tests.engines.vllm.real.forwards import PATIENCE, acknowledge, replaced
from tests.engines.vllm.real.rig import Rig, prompts

NOT_COMPARED, NOT_CHECKED = "were not compared with the scheduler's", "tokens were not checked"


@contextmanager
def garbled_prompt(rig: Rig) -> Iterator[None]:
    """One token of each prompt is another one when the worker receives it."""
    execute_model = rig.worker.execute_model

    def garble(output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in output.scheduled_new_reqs:
            for name in ("prompt_token_ids", "prefill_token_ids"):
                if (tokens := getattr(new, name)) is not None:
                    setattr(new, name, [*tokens[:40], tokens[40] ^ 1, *tokens[41:]])
        return execute_model(output, *args, **kwargs)

    with replaced(rig.worker, "execute_model", garble):
        yield


def swap_samples(rig: Rig) -> bool:
    """Exchange the newest tokens of two requests where the worker keeps them; False = they are equal."""
    if hasattr(rig.runner, "req_states"):
        states = rig.runner.req_states
        rows = list(states.req_id_to_index.values())[:2]
        newest = [int(states.total_len.gpu[row]) - 1 for row in rows]
        held = states.all_token_ids.gpu
        for memory, places in ((held, newest), (states.last_sampled_tokens, [0, 0])):
            first, second = (int(memory[row, place]) for row, place in zip(rows, places, strict=True))
            memory[rows[0], places[0]], memory[rows[1], places[1]] = second, first
        return first != second
    batch = rig.runner.input_batch
    if (sampled := batch.prev_sampled_token_ids) is not None:
        batch.prev_sampled_token_ids = sampled.flip(0)  # another tensor: the scheduler reads the old one
        return bool(sampled[0] != sampled[1])
    places = [int(batch.num_computed_tokens_cpu[row]) for row in range(2)]
    tokens = batch.token_ids_cpu
    first, second = (int(tokens[row, place]) for row, place in enumerate(places))
    tokens[0, places[0]], tokens[1, places[1]] = second, first
    return first != second


def reasons(rig: Rig) -> list[str]:
    return sorted({violation.reason.value for violation in rig.settle()})


def ways(rig: Rig) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Context managers by way; while one is entered, nothing is compared."""
    known, chains = rig.adapter.known_tokens, vars(rig.core.scheduler)[CHAINS_ATTRIBUTE]
    verify_rows = forward.verify_rows

    def nothing(*_: Any) -> KnownColumns:
        return KnownColumns(None, None)  # type: ignore[arg-type]

    def head_only(backend: Any, buffers: Any, batch: Any, phase: Phase) -> None:
        if phase is Phase.HEAD:
            verify_rows(backend, buffers, batch, phase)

    def of_long_ago(requests: Any, scheduled: Any, _computed: Any) -> Any:
        then = {
            name: SimpleNamespace(
                num_computed_tokens=1, num_tokens=1, prompt_embeds=None,
                all_token_ids=requests[name].all_token_ids[:1],
            )
            for name in scheduled
        }  # fmt: skip
        return TokenChains().advance(then, scheduled)

    @contextmanager
    def advanced(by: Callable[..., Any]) -> Iterator[None]:
        with replaced(chains, "advance", by), replaced(chains, "advance_later", by):
            yield

    assert isinstance(chains, TokenChains)
    return {
        "the scheduler does not send its tokens": lambda: advanced(lambda *_: None),
        "the scheduler's tokens are those of long ago": lambda: advanced(of_long_ago),
        "a forward is not given the scheduler's tokens": lambda: replaced(known, "columns", nothing),
        "the tail does not verify": lambda: replaced(forward, "verify_rows", head_only),
    }


def tried(rig: Rig) -> dict[str, Any]:
    """What is found of wrong tokens, and of each way not to compare: verdict and seconds."""
    report: dict[str, Any] = {"unseen": {}}
    rig.fresh()
    acknowledge(rig)
    rig.generate(prompts(3, seed=5, shared=100), 6)
    assert rig.settle() == []
    assert rig.canary.verdict() == (State.OK, ()), rig.canary.verdict()
    with garbled_prompt(rig):
        rig.generate(prompts(1, seed=6), 2)
    report["garbled"] = reasons(rig)
    rig.fresh()
    rig.start({"a": prompts(1, seed=7)[0], "b": prompts(1, seed=8)[0]}, 60)
    rig.step(6)
    assert rig.settle() == []
    while not swap_samples(rig):
        rig.step()
    rig.step(3)
    report["swapped"] = reasons(rig)
    report["positions"] = [found.position for found in rig.found if found.reason is Reason.WRITE_TOKEN]
    rig.fresh()
    for number, (way, entered) in enumerate(ways(rig).items()):
        acknowledge(rig)
        rig.settle()
        started = time.monotonic()
        with entered():
            rig.generate(prompts(3, seed=70 + number, shared=100), 6)
            while (verdict := rig.canary.verdict())[0] is State.OK:
                assert time.monotonic() - started < PATIENCE, way
                rig.settle()
        seconds = time.monotonic() - started
        found = {"state": str(verdict[0]), "reasons": list(verdict[1]), "seconds": seconds}
        report["unseen"][way] = found | {"accused": [repr(violation) for violation in rig.settle()]}
        rig.fresh()
    acknowledge(rig)
    return report
