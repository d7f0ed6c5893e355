"""Shows one vLLM worker to the canary: what both model runners have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from canary_obs.engines.adapter import Observer
from canary_obs.engines.aside import Aside
from canary_obs.engines.vllm.block_events import CARRIED
from canary_obs.engines.vllm.cached_blocks import CachedBlocks, Loaded
from canary_obs.engines.vllm.draft import DraftGroups
from canary_obs.engines.vllm.groups import FoundGroup, find_groups
from canary_obs.engines.vllm.idle import IdleThread
from canary_obs.engines.vllm.seams import Seams
from canary_obs.engines.vllm.versions import V1_VERSIONS, check_version
from canary_obs.engines.vllm.window_tables import NULL_BLOCK, WindowTables, served_by
from canary_obs.errors import UnsupportedEngine
from canary_obs.views import GroupView, StepTypes, StepView, WindowTokens


class VllmAdapter:
    """EngineAdapter of a model runner whose KV cache is initialised. Subclasses build the StepView."""

    name = "vllm"
    tried: tuple[str, ...] = V1_VERSIONS  # of vLLM, with this model runner

    def __init__(self, runner: Any) -> None:
        import vllm

        self.version = str(vllm.__version__)
        check_version(self.version, self.tried)
        self.runner = runner
        # What the runner's methods create under inference mode could not be changed outside of it.
        with torch.inference_mode():
            self.found = find_groups(runner)
        shapes = {group.view.name: (group.number, group.num_blocks, group.block_size) for group in self.found}
        self.blocks = CachedBlocks(shapes, self._blocks_of_requests)
        self._by_name = {group.view.name: group for group in self.found}
        self._windows = WindowTables(self.found)
        self._seams = Seams()
        self._lock = threading.Lock()
        self._idle: IdleThread | None = None
        self._stream: Any = None
        # Drafts are made between two steps, and with them the inputs of a forward change.
        self._aside = Aside(runner.device, wanted=runner.speculative_config is None)
        self.output: Any = None  # the scheduler output of the step under way
        self._served: Any = None  # the last output that had tokens to compute
        self.open: StepView | None = None  # the forward under way in it
        own = [group for group in self.found if group.draft]
        self._drafts = DraftGroups(runner, own, self.step_types) if own else None
        self._spent = 0.0  # seconds of host time in this adapter since it was last reported

    @property
    def step_types(self) -> StepTypes:
        """Types of the forwards to come."""
        raise NotImplementedError

    @property
    def groups(self) -> Sequence[GroupView]:
        """vLLM's KV cache groups; a draft model's layers apart from the target's, encoders left out."""
        return [group.view for group in self.found]

    @property
    def prefix_cache(self) -> CachedBlocks:
        """The block pool's published blocks."""
        return self.blocks

    def slots_in_use(self, group: str) -> Tensor:
        """int64 [n]: slots of running requests and of the prefix cache, on the CPU."""
        used = sorted(self._blocks_of_requests(group) | self.blocks.live_blocks(group))
        return _slots_of(used, self._by_name[group].block_size)

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Requests whose block list names the slot's block."""
        found = self._by_name[group]
        block = slot // found.block_size
        return tuple(request for request, blocks in self.request_blocks(found.number) if block in blocks)

    def lend_scratch(self) -> tuple[str, int]:
        """The first slot of the null block, which vLLM sets apart: nothing that is read lies there."""
        for found in self.found:
            if found.view.sources and not found.draft:
                return found.view.name, NULL_BLOCK * found.block_size
        raise UnsupportedEngine("no group shows its bytes; nothing could be planted")

    def window_tokens(self) -> WindowTokens | None:
        """Tokens of the last forward's requests, in the block lists that it used."""
        if self._served is None or not self._windows.numbers:
            return None
        lists = {number: dict(self.request_blocks(number)) for number in self._windows.numbers}
        return self._windows.compare(served_by(self._served), lists)

    def attach(self, observer: Observer) -> None:
        """Wrap the runner's methods on the instance and start the idle thread."""
        if "execute_model" in vars(self.runner):
            raise UnsupportedEngine("this model runner is wrapped already; detach what wraps it, then attach")
        self.compile()
        if self._drafts is not None:
            self._drafts.compile()
        idle = IdleThread(self._lock, observer.idle, self._surroundings, self._device_busy)
        self._idle = idle
        self.wrap_forward(self._seams, observer)
        self._seams.wrap(self.runner, "execute_model", self._around_step(observer, idle))
        if self._drafts is not None:
            around = self._drafts.around_sampling(self._lock, observer, idle)
            self._seams.wrap(self.runner, "sample_tokens", around)
        idle.start()

    def detach(self) -> None:
        """Remove the wrappers and end the idle thread; idempotent."""
        if self._idle is not None:
            self._idle.stop()
            self._idle = None
        self._seams.restore()
        self._aside.join()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """While entered, no step runs and the idle thread leaves the canary alone."""
        with self._lock:
            self._aside.join()
            yield

    def close(self, report: Callable[[StepView], None]) -> None:
        """Tell how the forward under way ended, if there is one."""
        view, self.open = self.open, None
        if view is not None:
            report(view)

    def begin_forward(self, observer: Observer, build: Callable[[], StepView]) -> None:
        """The target is about to run; `build` makes its view, draft groups among the others."""
        self.open = self._guarded_view(observer, build)
        if self.open is not None:
            observer.before_forward(self.open)

    def compile(self) -> None:
        """Run once what the views launch on the device: a first launch while serving takes 0.3 s."""
        raise NotImplementedError

    def wrap_forward(self, seams: Seams, observer: Observer) -> None:
        """Wrap what surrounds the model forward."""
        raise NotImplementedError

    def request_blocks(self, number: int) -> Iterator[tuple[str, Sequence[int]]]:
        """Running requests with their block lists in one of vLLM's groups."""
        raise NotImplementedError

    def requests_changed(self, output: Any) -> None:
        """Before a step: requests named in its output began, ended or changed their tokens."""
        raise NotImplementedError

    def _around_step(self, observer: Observer, idle: IdleThread) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def execute_model(scheduler_output: Any, *given: Any, **named: Any) -> Any:
                if idle.raised is not None:
                    raise idle.raised
                with self._lock:
                    self.output = scheduler_output
                    self._aside.join()
                    if self._drafts is not None:
                        self._drafts.fail(observer)  # nobody asked for its samples
                    try:
                        started = time.perf_counter()
                        self._announce(scheduler_output, observer)
                        self._spent += time.perf_counter() - started
                        result = original(scheduler_output, *given, **named)
                    except BaseException:
                        self.close(observer.forward_failed)
                        if self._drafts is not None:
                            self._drafts.fail(observer)
                        raise
                    finally:
                        self.output = None
                        idle.last_step = time.monotonic()
                    if scheduler_output.total_num_scheduled_tokens:
                        self._served = scheduler_output
                        observer.overhead["adapter"] += self._spent
                        self._spent = 0.0
                        with self._aside.behind_all:
                            self.close(observer.after_forward)
                            if self._drafts is None or not self._drafts.pending:
                                observer.after_step()
                    return result

            return execute_model

        return make

    def _announce(self, output: Any, observer: Observer) -> None:
        """What the scheduler says happened to blocks, before the runner acts on it."""
        try:
            events = getattr(output, CARRIED, None)
            self.blocks.apply(events)
            self.requests_changed(output)
            zeroed = output.new_block_ids_to_zero
            copies = output.kv_cache_block_copies
            taken = self._taken(output) if len(self.found) > 1 else {}
            loads = [event for event in events or () if isinstance(event, Loaded)]
            if not (zeroed or copies or taken or loads):
                return
            for group in self.found:
                name = group.view.name
                # Groups overlay the same bytes: a block handed to one group ends its records in the others.
                lost = set(
                    chain(zeroed or (), *(ids for other, ids in taken.items() if other != group.number))
                )
                lost.discard(NULL_BLOCK)
                if lost:
                    observer.invalidated(name, self._device_slots(sorted(lost), group))
                if loaded := [event for event in loads if event.group == group.number]:
                    observer.received(name, _loaded_slots(loaded, group.block_size).to(self.runner.device))
                if copies:
                    source, destination = zip(*copies, strict=True)
                    observer.copied(
                        name, self._device_slots(source, group), self._device_slots(destination, group)
                    )
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("announce", error)

    def _taken(self, output: Any) -> dict[int, set[int]]:
        """Blocks that this output hands to requests, by vLLM's group number."""
        cached = output.scheduled_cached_reqs
        handed = [request.block_ids for request in output.scheduled_new_reqs]
        handed += [blocks for blocks in cached.new_block_ids if blocks is not None]
        return {
            group.number: set(chain.from_iterable(blocks[group.number] for blocks in handed))
            for group in self.found
        }

    def _device_slots(self, blocks: Sequence[int], group: FoundGroup) -> Tensor:
        return _slots_of(blocks, group.block_size).to(self.runner.device, non_blocking=True)

    def _blocks_of_requests(self, group: str) -> set[int]:
        lists = self.request_blocks(self._by_name[group].number)
        return set(chain.from_iterable(blocks for _, blocks in lists)) - {NULL_BLOCK}

    def remember_stream(self) -> None:
        """The idle thread must queue its work behind the forward's."""
        if self._stream is None and self.runner.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.runner.device)

    def _device_busy(self) -> bool:
        if self._drafts is not None and self._drafts.pending:
            return True
        return self._stream is not None and not self._stream.query()

    def _surroundings(self) -> AbstractContextManager[object]:
        return nullcontext() if self.runner.device.type == "cpu" else self._on_device()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        # A new thread's kernels go to the first GPU; before the first forward there is no stream to follow.
        with torch.cuda.device(self.runner.device), torch.cuda.stream(self._stream):
            self._aside.join()
            yield

    def _guarded_view(self, observer: Observer, build: Callable[[], StepView]) -> StepView | None:
        """The view without draft groups, or None when building it failed, which is reported."""
        started = time.perf_counter()
        try:
            self.remember_stream()
            view = build()
            return view if self._drafts is None else self._drafts.begin(view, observer)
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("step_view", error)
            return None
        finally:
            self._spent += time.perf_counter() - started


def _loaded_slots(events: Sequence[Loaded], block_size: int) -> Tensor:
    """int64 [n]: the slots that loads fill."""
    runs = [torch.arange(event.first, event.stop) + event.block * block_size for event in events]
    return torch.cat(runs)


def _slots_of(blocks: Sequence[int], block_size: int) -> Tensor:
    """int64 [len(blocks) * block_size]: all slots of some blocks."""
    starts = torch.tensor(blocks, dtype=torch.int64) * block_size
    return (starts[:, None] + torch.arange(block_size)).flatten()
