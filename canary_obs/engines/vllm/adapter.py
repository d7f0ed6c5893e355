"""Shows one vLLM worker to the canary: what both model runners have in common."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from canary_obs.engine_api.adapter import EngineAdapter
from canary_obs.engine_api.observer import Observer
from canary_obs.engine_api.views import GroupView, StepTypes, StepView, WindowTokens
from canary_obs.engines.toolkit.idle_thread import IdleThread
from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.toolkit.side_stream import SideStream
from canary_obs.engines.vllm.block_changes import BlockChanges, slots_of
from canary_obs.engines.vllm.block_events import EVENTS_ATTRIBUTE
from canary_obs.engines.vllm.cached_blocks import CachedBlocks
from canary_obs.engines.vllm.draft import DraftGroups
from canary_obs.engines.vllm.groups import find_groups
from canary_obs.engines.vllm.versions import V1_VERSIONS, check_version
from canary_obs.engines.vllm.window_tables import NULL_BLOCK, WindowTables, served_by
from canary_obs.errors import UnsupportedEngine


class VllmAdapter(EngineAdapter):
    """EngineAdapter of a model runner whose KV cache is initialised. Subclasses build the StepView."""

    name = "vllm"
    supported: tuple[str, ...] = V1_VERSIONS  # of vLLM, with this model runner

    def __init__(
        self,
        runner: Any,
        *,
        wrap_engine: Callable[[MethodPatches], None] | None = None,
        fresh: bool = False,
    ) -> None:
        """`wrap_engine` is called at attach, to wrap more than the runner; detach restores that too.

        `fresh`: nothing is in the prefix cache yet. Else every slot counts as in use until it is reset.
        """
        import vllm

        self.version = str(vllm.__version__)
        check_version(self.version, self.supported)
        _check_not_wrapped(runner)
        self._wrap_engine = wrap_engine
        self.runner = runner
        # What the runner's methods create under inference mode could not be changed outside of it.
        with torch.inference_mode():
            self.found = find_groups(runner)
        shapes = {group.view.name: (group.number, group.num_blocks, group.block_size) for group in self.found}
        self.blocks = CachedBlocks(shapes, self._blocks_of_requests, empty=fresh)
        self._by_name = {group.view.name: group for group in self.found}
        self._changes = BlockChanges(self.found, runner.device)
        self._windows = WindowTables(self.found)
        self._patches = MethodPatches()
        self.lock = threading.Lock()  # held during a step
        self._idle: IdleThread | None = None
        self._stream: Any = None
        # Drafts are made between two steps, and with them the inputs of a forward change.
        self.lasting = runner.speculative_config is None
        self.side_stream = SideStream(runner.device, wanted=self.lasting)
        self.output: Any = None  # the scheduler output of the step under way
        self._served: Any = None  # the last output that had tokens to compute
        self.open: StepView | None = None  # the forward under way in it
        self._incomplete = False  # that view, until `_launch_behind`
        self.sampled_apart = False  # by calls after `execute_model`, which then leaves `end_step` to them
        self._unended = False  # a step, until `end_step`
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
        return slots_of(used, self._by_name[group].block_size)

    def holders(self, group: str, slot: int) -> tuple[str, ...]:
        """Requests whose block list names the slot's block."""
        found = self._by_name[group]
        block = slot // found.block_size
        return tuple(request for request, blocks in self.request_blocks(found.number) if block in blocks)

    def reserve_scratch_slot(self) -> tuple[str, int]:
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
        _check_not_wrapped(self.runner)
        self.compile()
        if self._drafts is not None:
            self._drafts.compile()
        idle = IdleThread(self.lock, observer.idle, self._surroundings, self._device_busy)
        self._idle = idle
        self.wrap_forward(self._patches, observer)
        self._patches.wrap(self.runner, "execute_model", self._around_step(observer, idle))
        if self._drafts is not None:
            around = self._drafts.around_sampling(self.lock, observer, idle)
            self._patches.wrap(self.runner, "sample_tokens", around)
        if self._wrap_engine is not None:
            self._wrap_engine(self._patches)
        keep_modules_readable()
        idle.start()

    def detach(self) -> None:
        """Remove the wrappers and end the idle thread; idempotent."""
        if self._idle is not None:
            self._idle.stop()
            self._idle = None
        self._patches.restore()
        self.side_stream.join()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """While entered, no step runs and the idle thread leaves the canary alone."""
        with self.lock:
            self.side_stream.join()
            yield

    def close(self, report: Callable[[StepView], None]) -> None:
        """Tell how the forward under way ended, if there is one."""
        view, self.open, self._incomplete = self.open, None, False
        if view is not None:
            report(view)

    def begin_forward(self, observer: Observer, build: Callable[[], StepView]) -> None:
        """The target is about to run; `build` makes its view for `complete`, draft groups among the others.

        Only what must precede the forward is launched here, unless its inputs won't last as long.
        """
        self.close(observer.forward_failed)  # a second one in a step: what the first wrote is unknown
        self.open = self._guarded_view(observer, build)
        if self.open is None:
            return
        if self.lasting:
            self._incomplete = True
            observer.before_write(self.open)
            self.side_stream.mark()
            return
        self.open = self._guarded_view(observer, partial(self._with_drafts, self.open, observer))
        if self.open is not None:
            observer.before_forward(self.open)

    def complete(self, view: StepView) -> StepView:
        """The view of the forward under way with what `build` left out: ids, digests and expected ids."""
        return view

    def _launch_behind(self, observer: Observer) -> None:
        """The forward was launched: checks that run beside it."""
        plain, self._incomplete = self.open, False
        if plain is None:
            return
        with self.side_stream.after_mark:
            self.open = self._guarded_view(observer, partial(self.complete, plain))
            if self.open is not None:
                observer.forward_launched(self.open)
            else:
                observer.forward_failed(plain)

    def _with_drafts(self, plain: StepView, observer: Observer) -> StepView:
        """The target's part of a complete view."""
        view = self.complete(plain)
        return view if self._drafts is None else self._drafts.begin(view, observer)

    def end_step(self, observer: Observer) -> None:
        """What follows a step's forward, behind all that its stream was given by now; idempotent."""
        if not self._unended:
            return
        self._unended = False
        observer.overhead["adapter"] += self._spent
        self._spent = 0.0
        with self.side_stream.after_all:
            self.close(observer.after_forward)
            if self._drafts is None or not self._drafts.pending:
                observer.after_step()

    def compile(self) -> None:
        """Run once what the views launch on the device: a first launch while serving takes 0.3 s."""
        raise NotImplementedError

    def wrap_forward(self, patches: MethodPatches, observer: Observer) -> None:
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
                with self.lock:
                    self.end_step(observer)  # nobody asked for its samples
                    self.output = scheduler_output
                    self.side_stream.join()
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
                        if self._incomplete:
                            self._launch_behind(observer)
                        self._unended = True
                        if not self.sampled_apart:
                            self.end_step(observer)
                    return result

            return execute_model

        return make

    def _announce(self, output: Any, observer: Observer) -> None:
        """What the scheduler says happened to blocks, before the runner acts on it."""
        try:
            events = getattr(output, EVENTS_ATTRIBUTE, None)
            self.blocks.apply(events)
            self.requests_changed(output)
            self._changes.tell(output, events, observer)
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("announce", error)

    def _blocks_of_requests(self, group: str) -> set[int]:
        lists = self.request_blocks(self._by_name[group].number)
        return set(chain.from_iterable(blocks for _, blocks in lists)) - {NULL_BLOCK}

    def remember_stream(self) -> None:
        """The idle thread must queue its work behind the forward's."""
        if self._stream is None and self.runner.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.runner.device)

    def _device_busy(self) -> bool:
        if self._unended or (self._drafts is not None and self._drafts.pending):
            return True
        return self._stream is not None and not self._stream.query()

    def _surroundings(self) -> AbstractContextManager[object]:
        return nullcontext() if self.runner.device.type == "cpu" else self._on_device()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        # A new thread's kernels go to the first GPU; before the first forward there is no stream to follow.
        with torch.cuda.device(self.runner.device), torch.cuda.stream(self._stream):
            self.side_stream.join()
            yield

    def _guarded_view(self, observer: Observer, build: Callable[[], StepView]) -> StepView | None:
        """The view, or None when building it failed, which is reported."""
        started = time.perf_counter()
        try:
            self.remember_stream()
            return build()
        except Exception as error:  # noqa: BLE001 - a fault of the observer's side must not reach the engine
            observer.fault("step_view", error)
            return None
        finally:
            self._spent += time.perf_counter() - started


def _check_not_wrapped(runner: Any) -> None:
    # First of all: detecting the layout writes into the KV, which a canary that is attached would report.
    if "execute_model" in vars(runner):
        raise UnsupportedEngine(
            "this model runner is wrapped already, by another canary (KV_CANARY_MODE makes the vLLM plugin "
            "attach one) or another tool; detach that first"
        )


def keep_modules_readable() -> None:
    """Let another vLLM engine start in this process after numba was loaded here; idempotent.

    vLLM's CPU platform reads `__dict__` of every attribute of every module. llvmlite's library object
    resolves any name to a function of the library, and that answer makes the engine's start fail.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None and hasattr(ffi.lib, "_fntab"):
        ffi.lib._fntab.setdefault("__dict__", {})
