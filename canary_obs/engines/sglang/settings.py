"""SGLang's settings as it runs with them."""

from __future__ import annotations

from typing import Any


def settings_of(scheduler: Any) -> Any:
    """What SGLang has made of a scheduler's arguments; else what it was given.

    0.5.23 leaves the arguments as they were given, and keeps what it makes of defaults, of models and of
    names that are out of use apart from them. 0.5.16 changes the arguments.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return scheduler.server_args
    return resolving_view(scheduler.server_args)
