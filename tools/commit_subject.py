"""A git commit-msg hook: `python tools/commit_subject.py FILE` refuses a subject that is too long."""

from __future__ import annotations

import sys
from pathlib import Path

MOST_CHARACTERS = 72


def refusal(message: str) -> str | None:
    """Why a commit message is refused; None = it is fine."""
    lines = message.splitlines()
    subject = lines[0].strip() if lines else ""
    if not subject:
        return "the commit subject is empty"
    if len(subject) > MOST_CHARACTERS:
        return f"the commit subject has {len(subject)} characters; {MOST_CHARACTERS} are allowed"
    if len(lines) > 1 and lines[1].strip() and not lines[1].startswith("#"):
        return "the line after the commit subject must be empty"
    return None


if __name__ == "__main__":
    sys.exit(refusal(Path(sys.argv[1]).read_text("utf-8")))
