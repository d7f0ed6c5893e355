"""Reports to the workers which key lies in which chunk of an offload tier; in the scheduler's process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import repeat
from typing import Any, NamedTuple

from canary_obs.engines.toolkit.method_patches import MethodPatches
from canary_obs.engines.vllm.scheduler_reports import log_fault
from canary_obs.engines.vllm.sent_blocks import instrument_sends
from canary_obs.engines.vllm.token_chains import chains_of

KEYS_ATTRIBUTE = "kv_canary_offload_keys"  # of SchedulerOutput: by connector, of this step's jobs, by chunk
_KEYS = "_kv_canary_keys"  # of an OffloadingManager: since the last output
_LIMIT = 1 << 18  # bounds the memory of a manager whose scheduler is not instrumented


class StoredKey(NamedTuple):
    """What names a stored copy, and its file, if it gets one."""

    key: bytes  # the hash of its tokens, and vLLM's group number
    path: str


def offloading_connectors(connector: Any) -> Iterator[Any]:
    """The OffloadingConnectors that a connector is made of, in the same order in every process."""
    return connectors_named(connector, ("OffloadingConnector",))


def connectors_named(connector: Any, names: Collection[str]) -> Iterator[Any]:
    """The connectors of these classes that a connector is made of, in the same order in every process."""
    if connector is None:
        return
    children = getattr(connector, "sub_connectors", None)
    if children:
        for child in children:
            yield from connectors_named(child, names)
    elif type(connector).__name__ in names:
        yield connector


def class_names(connector: Any) -> Iterator[str]:
    """Of the connectors that a connector is made of."""
    children = getattr(connector, "sub_connectors", None)
    if children:
        for child in children:
            yield from class_names(child)
    else:
        yield type(connector).__name__


def instrument_managers(patches: MethodPatches, connector: Any) -> None:
    """Follow what the offload managers of a scheduler's connector store and load."""
    for found in offloading_connectors(connector):
        manager = found.connector_scheduler.manager
        setattr(manager, _KEYS, {})
        patches.wrap(manager, "prepare_store", _around_store(manager))
        patches.wrap(manager, "prepare_load", _around_load(manager))


def instrument_connector(patches: MethodPatches, scheduler: Any) -> None:
    """Follow what a scheduler's connector stores, sends and loads."""
    instrument_managers(patches, scheduler.connector)
    if scheduler.connector is not None:
        instrument_sends(patches, scheduler)


def follow_new_schedulers(patches: MethodPatches, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Scheduler.__init__`: the connector is made in it. What its steps need is prepared."""

    def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces it
        original(scheduler, *args, **kwargs)
        try:
            chains_of(scheduler)  # loads what is compiled, which takes too long in a step
            instrument_connector(patches, scheduler)
        except Exception as error:  # noqa: BLE001 - what is loaded is unverified
            log_fault(scheduler, "instrument_connector", error)

    return __init__


def send_keys(scheduler: Any, output: Any) -> None:
    """Let the keys of this step's jobs travel with them."""
    if scheduler.connector is None:
        return
    found = []
    for connector in offloading_connectors(scheduler.connector):
        manager = connector.connector_scheduler.manager
        keys = vars(manager).get(_KEYS)
        if keys is not None:
            setattr(manager, _KEYS, {})
        found.append(keys or {})
    if found:
        setattr(output, KEYS_ATTRIBUTE, tuple(found))


_Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def _around_store(manager: Any) -> _Make:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_store(keys: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(keys, *args, **kwargs)
            if output is not None:
                _note(manager, output.keys_to_store, output.store_spec)
            return output

        return prepare_store

    return make


def _around_load(manager: Any) -> _Make:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_load(keys: Any, *args: Any, **kwargs: Any) -> Any:
            keys = list(keys)
            spec = original(keys, *args, **kwargs)
            _note(manager, keys, spec)
            return spec

        return prepare_load

    return make


def _note(manager: Any, keys: Any, spec: Any) -> None:
    try:
        noted = vars(manager).setdefault(_KEYS, {})
        if len(noted) > _LIMIT:
            noted.clear()
        tiers = getattr(manager, "secondary_tiers", ())
        if not _only_files(tiers):
            return
        chunks, keys = spec.block_ids.tolist(), list(keys)
        if len(chunks) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(chunks)} chunks")
        # vLLM's keys are bytes.
        paths = [str(tiers[0].file_mapper.get_file_name(key)) for key in keys] if tiers else repeat("")
        noted.update(zip(chunks, zip(keys, paths, strict=False), strict=False))
    except Exception as error:  # noqa: BLE001 - what is loaded under these keys is unverified
        log_fault(manager, "offload_keys", error)


def _only_files(tiers: Any) -> bool:
    """Whether whatever comes from lower tiers has a file next to which its records lie.

    Of what another host has stored, or another kind of tier, our own records say nothing.
    """
    return len(tiers) <= 1 and all(type(tier).__name__ == "FileSystemTierManager" for tier in tiers)
