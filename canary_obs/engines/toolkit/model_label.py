"""How a rank names the model that its engine serves."""

from __future__ import annotations

_LONGEST = 200


def model_label(name: object, revision: object) -> str | None:
    """`name` or `name@revision`; of a name that is too long for a label the end. None = no name."""
    if not name:
        return None
    text = f"{name}@{revision}" if revision else str(name)
    return text[-_LONGEST:]
