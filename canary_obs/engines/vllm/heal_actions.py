"""What healing can do to vLLM's blocks and requests, on the thread that runs its scheduler."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from canary_obs.engines.vllm.forward_count import FORWARDS_ATTRIBUTE
from canary_obs.errors import QuarantineRefused
from canary_obs.healing.plan import Block, HeldRequest
from canary_obs.slot_facts import request_name

_REMEMBERED = 512  # requests that have ended


class VllmActions:
    """Actor of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        managers = self._manager.coordinator.single_type_managers
        self._pools = [manager.block_pool for manager in managers]  # by group; often one for all
        self.key_tokens = int(self._pools[0].hash_block_size)
        self.given_out = int(vars(scheduler).get(FORWARDS_ATTRIBUTE, 0)) - 1  # the caller counts from then on
        self._block_tokens = [int(manager.block_size) for manager in managers]
        self.begun: dict[str, tuple[int, int, int]] = {}  # by request: since, joined, kept
        self.restarts: dict[str, int] = {}
        self.dropped_after: dict[str, int] = {}  # by request that was started again: a forward
        self.barred: set[str] = set()  # requests whose blocks must not be cached
        self.ended: list[Any] = []  # requests whose clients must hear of it
        self._finished: OrderedDict[str, Sequence[bytes]] = OrderedDict()
        self._out: Counter[tuple[int, int]] = Counter()  # quarantines by id of the pool and block number

    @property
    def pools_of_groups(self) -> list[Any]:
        """The pool of each group."""
        return self._pools

    @property
    def pools(self) -> list[Any]:
        """The pools of all groups, each once."""
        return list({id(pool): pool for pool in self._pools}.values())

    @property
    def pool_blocks(self) -> int:
        """Blocks of all pools without the null blocks."""
        return sum(int(pool.num_gpu_blocks) - 1 for pool in self.pools)

    @property
    def copies_elsewhere(self) -> str | None:
        """The connector, which may have stored a block before or after it was damaged."""
        connector = self._scheduler.connector
        return None if connector is None else type(connector).__name__

    # The view --------------------------------------------------------------------------------------

    def requests(self) -> Iterator[HeldRequest]:
        """Running requests, and waiting ones that hold blocks or have sent tokens."""
        from vllm.v1.request import RequestStatus

        for name, request in self._scheduler.requests.items():
            blocks = self._manager.get_block_ids(name)
            # Of a request that was preempted, vLLM still delivers the tokens of forwards under way.
            late = 0 if request.drop_stale_output else request.num_stale_output_tokens
            sent = request.num_output_tokens + late
            if request.is_finished() or not (sent or any(blocks)):
                continue
            restartable = request.status == RequestStatus.RUNNING and not request.resumable
            since, joined, kept = self.begun.get(name, (0, 0, 0))
            yield HeldRequest(
                block_tokens=self._block_tokens, since=since, joined=joined,
                computed=request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0),
                request=name, name=request_name(name), blocks=blocks, keys=request.block_hashes,
                sent=sent, restartable=restartable, restarts=self.restarts.get(name, 0),
                dropped_after=self.dropped_after.get(name), kept=kept,
            )  # fmt: skip

    def finished_keys(self, name: str) -> Sequence[bytes]:
        """Of the last requests that have ended."""
        return self._finished.get(name, ())

    def keys_of(self, block: Block) -> list[bytes]:
        """The hashes that the pool has for the block."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        pool, number = self._pools[block[0]], block[1]
        first = pool.blocks[number].block_hash
        return [
            bytes(get_block_hash(key))
            for key in ((first,) if first is not None else ()) + tuple(_more_hashes(pool).get(number, ()))
        ]

    def blocks_of(self, key: bytes) -> Iterator[Block]:
        """Blocks of every group whose pool has them under the hash."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        for group, pool in enumerate(self._pools):
            found = pool.cached_block_hash_to_block._cache.get(make_block_hash_with_group_id(key, group))
            if found is not None:
                for block in found.values() if isinstance(found, dict) else (found,):
                    yield group, block.block_id

    def cached_keys(self) -> set[bytes]:
        """The keys of all cached blocks."""
        return {bytes(key[:-4]) for pool in self.pools for key in pool.cached_block_hash_to_block._cache}

    def is_cached(self, key: bytes) -> bool:
        """Whether any block is cached under the key."""
        return any(True for _ in self.blocks_of(key))

    # The actions -----------------------------------------------------------------------------------

    def evict(self, blocks: Iterable[Block]) -> None:
        """Take blocks out of the hash maps; requests that hold them keep them."""
        by_pool: dict[int, set[int]] = {}
        for group, number in blocks:
            by_pool.setdefault(id(self._pools[group]), set()).add(number)
        for pool in self.pools:
            if numbers := by_pool.get(id(pool)):
                pool.evict_blocks(numbers)

    def recompute(self, request: str) -> int:
        """Preempt the request, and drop what its forwards under way return."""
        scheduler = self._scheduler
        found = scheduler.requests[request]
        tokens = int(found.num_computed_tokens)
        scheduler.running.remove(found)
        scheduler._preempt_request(found, time.monotonic(), drop_stale_output=True)
        # It may be scheduled in the next step: as one that was not in the step before.
        scheduler.prev_step_scheduled_req_ids.discard(request)
        self.restarts[request] = self.restarts.get(request, 0) + 1
        self.dropped_after[request] = self.given_out
        self.barred.discard(request)
        return tokens

    def end(self, request: str) -> None:
        """Finish the request with an error, which the client gets with the outputs of this step."""
        from vllm.v1.request import RequestStatus

        self.ended += self._scheduler.finish_requests((request,), RequestStatus.FINISHED_ERROR)

    def bar(self, request: str) -> None:
        """Cache no block of this request from now on."""
        self.barred.add(request)

    def quarantine(self, block: Block) -> None:
        """Hold a reference to the block, which nobody ever gives back. Raises QuarantineRefused."""
        pool = self._pools[block[0]]
        out = {number for own, number in self._out if own == id(pool)} | {block[1]}
        left, needed = int(pool.num_gpu_blocks) - 1 - len(out), self._longest_request(pool)
        if left < needed:
            raise QuarantineRefused(
                f"block {block[1]} cannot be left out: {left} blocks would be left, and a request of "
                f"max_model_len={self._scheduler.max_model_len} needs {needed}"
            )
        pool.touch([pool.blocks[block[1]]])
        self._out[id(pool), block[1]] += 1

    def _longest_request(self, pool: Any) -> int:
        """Blocks of the pool that one request can need."""
        groups, config = self._manager.kv_cache_config.kv_cache_groups, self._scheduler.vllm_config
        specs = [group.kv_cache_spec for group, own in zip(groups, self._pools, strict=True) if own is pool]
        return sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs)

    def release(self, block: Block) -> None:
        """Give back the reference."""
        pool = self._pools[block[0]]
        pool.free_blocks([pool.blocks[block[1]]])
        self._out -= Counter({(id(pool), block[1]): 1})

    # Around a step's results -----------------------------------------------------------------------

    def note_begun(self, output: Any) -> None:
        """Remember with which forward requests began or went on, and what they have from the cache."""
        number = int(getattr(output, FORWARDS_ATTRIBUTE, 0))
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, number, int(new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._begin(name, number, int(computed))

    def _begin(self, name: str, number: int, joined: int) -> None:
        request = self._scheduler.requests.get(name)
        self.begun[name] = number, joined, 0 if request is None else request.num_output_tokens

    def note_finished(self, request: Any) -> None:
        """Remember the hashes of a request that ends: its forwards may still be found wrong."""
        name = request.request_id
        self._finished[request_name(name)] = request.block_hashes
        if len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)
        self.restarts.pop(name, None)
        self.dropped_after.pop(name, None)
        self.begun.pop(name, None)
        self.barred.discard(name)

    def inform_clients(self, outputs: dict[int, Any]) -> None:
        """Add an error for each request that was ended to the outputs of its client."""
        if not self.ended:
            return
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        for request in self.ended:
            of_client = outputs.get(request.client_index)
            if of_client is None:
                of_client = outputs[request.client_index] = EngineCoreOutputs(outputs=[])
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        self.ended = []


def _more_hashes(pool: Any) -> dict[int, Any]:
    """Hashes of blocks that have several, by block number; older versions have none."""
    found: dict[int, Any] = getattr(pool, "cached_block_hashes_by_block", {})
    return found
