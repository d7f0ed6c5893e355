"""A prefill engine in another process and a decode engine in this one, whose connectors pass KV on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from canary_obs.engines.toolkit.service_process import free_port
from tests.engines.vllm.real.prefill import MOONCAKE, NIXL, Prefill, let_nixl_wait, settings
from tests.engines.vllm.real.ranks import RanksRig
from tests.engines.vllm.real.rig import Rig, prompts

LENGTH = 207  # tokens: six blocks and a part of the seventh


class Pair:
    """A prefill engine in another process, and a decode engine in this one."""

    def __init__(self, model: Path, connector: str = NIXL, **engine: Any) -> None:
        """`engine`: settings of both."""
        self.model, self.prefill = model, Prefill(model, free_port(), connector=connector, **engine)
        if connector != MOONCAKE:
            let_nixl_wait()
        self.rig = Rig(model, **(engine | settings("kv_consumer", 60, connector=connector)))
        self._seed, self._before = 100, dict[str, tuple[int, int]]()

    def decode(self, params: dict[str, Any], prompt: list[int], tokens: int = 6) -> list[int]:
        """What the decode engine answers."""
        return decode(self.rig, params, prompt, tokens)

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        self._seed += 1
        return prompts(1, seed=self._seed, shared=LENGTH)[0][:LENGTH]

    def loads(self) -> tuple[int, int]:
        """Slots that were compared, and left out, since the last call."""
        return self.loads_by_group()["full"]

    def loads_by_group(self) -> dict[str, tuple[int, int]]:
        """The same of each group."""
        from canary_obs.runtime.report.snapshot import group_counters

        self.rig.settle()
        groups = group_counters(self.rig.canary.state, self.rig.canary.counter_reader)
        now = {name: (counters.loads_compared, counters.loads_left_out) for name, counters in groups.items()}
        before, self._before = self._before, now
        return {
            name: (compared - old[0], left_out - old[1])
            for name, (compared, left_out) in now.items()
            for old in (before.get(name, (0, 0)),)
        }

    def served(self, change: Callable[[dict[str, Any]], None] = lambda _: None, **how: Any) -> set[Any]:
        """Serve a prompt by both engines; what was found."""
        self.rig.fresh()
        self.loads()
        prompt = self.prompt()
        params = self.prefill.ask(prompt, **how)
        change(params)
        self.answer = self.decode(params, prompt)
        self.asked = prompt
        self.rig.settle()
        return set(self.rig.reasons())

    def storm(self, how: Callable[[], dict[str, Any]] = dict) -> tuple[int, int]:
        """Serve prompts that share prefixes, all at once, by both engines, twice, and then by this one alone.

        Nothing may be found, and the answers are the same. Returns how many slots were compared and left out.
        """
        self.rig.fresh()
        self.loads()
        asked, answers = prompts(12, seed=7), []
        for _ in range(2):
            params = [self.prefill.ask(prompt, **how()) for prompt in asked]
            answers.append(decode_all(self.rig, params, asked, 6))
            assert self.rig.settle() == []
        self.rig.fresh()
        assert answers == [self.rig.generate(asked, 6)] * 2
        loads = self.loads()
        assert self.rig.found == []
        return loads

    def use_again(self, blocks: Iterable[int], others: Callable[[int], Iterable[int]]) -> None:
        """Ask for `others`, which returns their blocks, until these have been given to them."""
        mine = set(blocks)
        for number in range(40):
            mine -= set(others(number))
            if not mine:
                return
        raise AssertionError(f"blocks {sorted(mine)} were not used again")

    def give_away_received(self) -> None:
        """Abort requests whose receives are under way, and let others decode in their blocks."""
        rig = self.rig
        requests = list(rig.core.scheduler.requests)
        # vLLM would keep the blocks until the receive ends.
        rig.core.scheduler.finished_recving_kv_req_ids.update(requests)
        rig.llm.llm_engine.abort_request(["aborted"])
        rig.start({str(seed): prompts(1, seed=seed, shared=300)[0] for seed in range(40, 44)})
        rig.step(6)

    def close(self) -> None:
        self.rig.close()
        self.prefill.close()


Arrived = list[tuple[int, int, list[str]]]  # of a decode engine's ranks; see `RanksRig.arrivals`


def check_shares(
    pair: Pair, two: RanksRig, how: Callable[[], dict[str, Any]] = dict
) -> Callable[..., Arrived]:
    """Let the prefill engine of one rank send to a decode engine of two; returns what serves one prompt more.

    It sees how many ranks read from it as they read: then it splits its records, and all is compared.
    """

    def once(**more: Any) -> Arrived:
        two.fresh()
        two.arrivals()
        asked.append(pair.prompt())
        params = pair.prefill.ask(asked[-1], **how(), **more)
        answers.append(decode(two, params, asked[-1]))
        return two.arrivals()

    def served(**more: Any) -> Arrived:
        # On a busy machine Mooncake's transport gives a transfer up after 30 s, now and then: nothing has
        # arrived. It may write all the same, later: the next time the patrol finds that.
        found, given_up = once(**more), False
        for _ in range(3):
            nothing = not any(compared + left_out for compared, left_out, _ in found)
            late = any("patrol kv_data" in reasons for *_, reasons in found)
            given_up |= nothing
            if not (nothing or (given_up and late)):
                break
            found = once(**more)
        return found

    asked, answers = list[list[int]](), list[list[int]]()
    compared, unknown = [(LENGTH, 0, [])] * 2, [(0, LENGTH, [])] * 2
    first, given_up = served(), len(asked) > 1  # a transfer that was given up has shown both ranks already
    whole = "the first one's records are of all heads, and neither rank holds them all"
    assert first == unknown or (given_up and first == compared), whole
    deadline = time.monotonic() + 120
    while (found := served()) != compared:
        assert found == unknown
        assert time.monotonic() < deadline
    assert served() == compared
    two.fresh()
    assert two.generate(asked, 6) == answers
    damaged = served(flip=True)
    assert [arrived[:2] for arrived in damaged] == [(LENGTH, 0)] * 2
    found_by = [reasons for *_, reasons in damaged if reasons]
    assert found_by == [["head kv_data"]], "by the rank that holds its head"
    return served


def decode(rig: Rig, params: dict[str, Any], prompt: list[int], tokens: int = 6) -> list[int]:
    """What this engine answers to a prompt whose KV it is given."""
    (answer,) = decode_all(rig, [params], [prompt], tokens)
    return answer


def decode_all(
    rig: Rig, params: Sequence[dict[str, Any]], asked: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Of several at once."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": own}
        )
        for own in params
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in asked]
    outputs = rig.llm.generate(inputs, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
