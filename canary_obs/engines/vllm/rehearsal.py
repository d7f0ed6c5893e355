"""A rehearsal on a vLLM that nobody has tested: two forwards of a made-up request, before any real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import Tensor

from canary_obs.config import IN_PROCESS, CanaryConfig
from canary_obs.engines.toolkit.attachment import protect
from canary_obs.engines.vllm.adapter import VllmAdapter
from canary_obs.engines.vllm.groups import VllmGroup
from canary_obs.engines.vllm.pending_events import EVENTS_ATTRIBUTE
from canary_obs.engines.vllm.token_chains import TOKENS_ATTRIBUTE, TokenChains
from canary_obs.errors import UnsupportedEngine
from canary_obs.runtime.canary import CanaryRuntime
from canary_obs.runtime.device.byte_address import read_slot
from canary_obs.runtime.report.snapshot import group_counters
from canary_obs.vocabulary import Mode, Phase, State

REQUEST = "_kv_canary_rehearsal"
TOKENS = tuple(range(5, 12))
_CHUNKS = (4, 3)  # of the prompt; the second forward reads what the first wrote
_SLOTS = len(TOKENS) + 1  # slots: those of the tokens, and one that nothing may write


def rehearse(worker: Any, config: CanaryConfig, make_adapter: Callable[[], VllmAdapter]) -> str:
    """Run the request through the worker with a canary of its own; returns what is to be said of it.

    The worker has no request yet and an empty KV cache. Raises UnsupportedEngine when hooks were not called,
    bytes are not where the probe writes found them, or an account of the steps does not agree.
    """
    if (why := _why_not(worker)) is not None:
        return f"not rehearsed: {why}"
    blocks = _blocks(worker.model_runner)
    try:
        outputs = list(_outputs(blocks))
    except Exception as error:  # noqa: BLE001 - this version's outputs have other fields
        return f"not rehearsed: its scheduler outputs differ ({type(error).__name__}: {error})"
    quiet = msgspec.structs.replace(
        config, endpoint=IN_PROCESS, mode=Mode.LOG, drill_enabled=False, perturb="", idle_sweep=False
    )
    adapter = make_adapter()
    runtime = protect(adapter, quiet)
    try:
        found = _played(worker, adapter, runtime, outputs, blocks)
    finally:
        runtime.detach()
    if found:
        raise UnsupportedEngine(
            f"vLLM {adapter.version} was rehearsed, as it is newer than the versions tested, and does not "
            f"agree: {'; '.join(found)}; use a tested version or a newer canary_obs"
        )
    return "a rehearsal agreed"


def _why_not(worker: Any) -> str | None:
    """Why no made-up request can be run here without a risk to the engine; None = it can."""
    runner, config = worker.model_runner, worker.vllm_config
    parallel, model = config.parallel_config, runner.model_config
    obstacles = {
        "its ranks run each step together": int(parallel.world_size) * int(parallel.data_parallel_size) > 1,
        "a connector takes part in each step": getattr(config, "kv_transfer_config", None) is not None
        or getattr(config, "ec_transfer_config", None) is not None,
        "drafting takes part in each step": runner.speculative_config is not None,
        "the model does not generate": str(model.runner_type) != "generate" or model.is_encoder_decoder,
        "too few tokens or blocks": int(runner.max_model_len) <= _SLOTS
        or sum(map(len, _blocks(runner))) >= int(runner.kv_cache_config.num_blocks),
    }
    return next((text for text, met in obstacles.items() if met), None)


def _blocks(runner: Any) -> tuple[list[int], ...]:
    """Blocks for the request by vLLM's group number, none of them twice: groups share their bytes."""
    found: list[list[int]] = []
    free = 1  # 0 is the null block
    for group in runner.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        more = int(getattr(spec, "num_speculative_blocks", 0))
        count = -(-_SLOTS // int(spec.block_size)) + more
        found.append(list(range(free, free + count)))
        free += count
    return tuple(found)


def _outputs(blocks: tuple[list[int], ...]) -> Iterator[Any]:
    """The prompt in two chunks, as the scheduler's outputs have it, and the request's end."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    chains, before = TokenChains(), 0
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for count in _CHUNKS:
        output = SchedulerOutput.make_empty()
        if before == 0:
            new = NewRequestData(
                req_id=REQUEST, prompt_token_ids=list(TOKENS), mm_features=[], sampling_params=sampling,
                pooling_params=None, block_ids=blocks, num_computed_tokens=0, lora_request=None,
                prefill_token_ids=list(TOKENS),
            )  # fmt: skip
            output.scheduled_new_reqs = [new]
        else:
            output.scheduled_cached_reqs = CachedRequestData(
                req_ids=[REQUEST], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
                new_block_ids=[None], num_computed_tokens=[before], num_output_tokens=[0],
            )  # fmt: skip
        before += count
        output.num_scheduled_tokens = {REQUEST: count}
        output.total_num_scheduled_tokens = count
        output.num_common_prefix_blocks = [0] * len(blocks)
        request = SimpleNamespace(
            num_computed_tokens=before, num_tokens=len(TOKENS), prompt_embeds=None, all_token_ids=TOKENS
        )
        setattr(output, TOKENS_ATTRIBUTE, chains.advance({REQUEST: request}, output.num_scheduled_tokens))
        setattr(output, EVENTS_ATTRIBUTE, ())
        yield output
    end = SchedulerOutput.make_empty()
    end.finished_req_ids = {REQUEST}
    setattr(end, EVENTS_ATTRIBUTE, ())
    yield end


def _played(
    worker: Any, adapter: VllmAdapter, runtime: CanaryRuntime, outputs: list[Any],
    blocks: tuple[list[int], ...],
) -> list[str]:  # fmt: skip
    """What does not agree after the outputs were run."""
    before = _slot_bytes(adapter, blocks)
    try:
        for output in outputs[:-1]:
            _run(worker, output)
    except Exception as error:  # noqa: BLE001 - the engine's own, on data that it should take
        return [f"its step failed ({type(error).__name__}: {error})"]
    finally:
        _run(worker, outputs[-1])
    with adapter.paused():
        runtime.check_everything()
    return [*_misplaced(adapter, before, _slot_bytes(adapter, blocks)), *_unagreed(adapter, runtime)]


def _run(worker: Any, output: Any) -> None:
    if worker.execute_model(output) is None and output.total_num_scheduled_tokens:
        worker.sample_tokens(None)


def _slot_bytes(adapter: VllmAdapter, blocks: tuple[list[int], ...]) -> dict[str, list[list[Tensor]]]:
    """By group, source and slot: the bytes of the slots that the request gets."""
    found = {}
    for group in adapter.vllm_groups:
        slots = slots_of_request(group, blocks[group.number])
        found[group.view.name] = [
            [read_slot(source, slot) for slot in slots] for source in group.view.sources
        ]
    return found


def slots_of_request(group: VllmGroup, ids: Sequence[int]) -> list[int]:
    """What the made-up request writes in these blocks, and the slot after that, which it leaves alone."""
    if group.states:
        return [ids[(len(TOKENS) - 1) // (group.state_tokens or _SLOTS)]]
    size = group.block_slots
    return [ids[place // size] * size + place % size for place in range(slots_written(group) + 1)]


def slots_written(group: VllmGroup) -> int:
    """Slots that the made-up request leaves written."""
    return 1 if group.states else len(TOKENS) // group.entry_tokens


def _misplaced(
    adapter: VllmAdapter, before: dict[str, list[list[Tensor]]], after: dict[str, list[list[Tensor]]]
) -> Iterator[str]:
    """Sources whose bytes did not change where the forwards wrote, or changed where they did not."""
    for group in adapter.vllm_groups:
        name = group.view.name
        for source, olds, news in zip(group.view.sources, before[name], after[name], strict=True):
            changed = [not bool((old == new).all()) for old, new in zip(olds, news, strict=True)]
            written = slots_written(group)
            if changed != [True] * written + [False] * (len(changed) - written):
                yield (
                    f"layer {source.layer} of group {name} is written elsewhere than probe writes: {changed}"
                )


def _unagreed(adapter: VllmAdapter, runtime: CanaryRuntime) -> Iterator[str]:
    """Accounts of the steps that differ, hooks that were not called, and violations."""
    state, reasons = runtime.verdict()
    if state in (State.BLIND, State.VIOLATED):
        yield f"the state is {state.value}: {', '.join(reasons)}"
    forwards = adapter.forwards()
    unwritten = {group.view.name for group in adapter.vllm_groups if not slots_written(group)}
    for name, counters in group_counters(runtime.state, runtime.counter_reader).items():
        if forwards[name] != len(_CHUNKS):
            yield f"{forwards[name]} forwards of group {name} were counted, {len(_CHUNKS)} were run"
        missing = [phase.value for phase in (Phase.HEAD, Phase.TAIL) if not counters.verified.get(phase)]
        if missing and name not in unwritten:
            yield f"no slot of group {name} was verified at the {' and the '.join(missing)}"
