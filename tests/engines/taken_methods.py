"""Finds methods that an engine took before the canary wrapped them, and so goes on calling unseen."""

from __future__ import annotations

import gc
from types import CellType, FrameType, MethodType

from canary_obs.engines.toolkit.method_patches import MethodPatches


def taken_before(patches: MethodPatches) -> set[tuple[str, str]]:
    """Class and name of each wrapped method that something holds as it was, other than its wrapper.

    A wrapper holds it in a cell of its closure. What an engine's own closure holds is not seen.
    """
    gc.collect()
    wrapped = {(id(owner), name): type(owner).__name__ for owner, name, _ in patches._replaced}
    methods = [
        each for each in gc.get_objects()
        if type(each) is MethodType and (id(each.__self__), each.__func__.__name__) in wrapped
    ]  # fmt: skip
    found = set()
    for method in methods:
        holders = [each for each in gc.get_referrers(method) if each is not methods]
        if any(not isinstance(each, CellType | FrameType) for each in holders):
            name = method.__func__.__name__
            found.add((wrapped[id(method.__self__), name], name))
    return found
