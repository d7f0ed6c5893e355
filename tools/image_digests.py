"""Pins foreign images by digest: `make image-digests`. Needs docker and a registry."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (*sorted((ROOT / "docker").glob("*/Dockerfile")), ROOT / "docker/compose.yml")
# With a tag, as ours have none: they are built here.
_IMAGE = re.compile(r"^(?P<before>FROM |\s+image: )(?P<name>[\w./-]+:[\w.-]+)(@\S+)?", re.MULTILINE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def pinned(text: str, digest_of: Callable[[str], str]) -> str:
    """The text with the present digest of each foreign image. Raises ValueError for what is no digest."""

    def with_digest(found: re.Match[str]) -> str:
        digest = digest_of(found["name"])
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{found['name']}: {digest!r} is no digest")
        return f"{found['before']}{found['name']}@{digest}"

    return _IMAGE.sub(with_digest, text)


def ask_registry(name: str) -> str:
    """The digest of a tag's manifest list, so that it holds on every kind of machine."""
    command = ["docker", "buildx", "imagetools", "inspect", name, "--format", "{{.Manifest.Digest}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    # All are resolved before any is written.
    new = {path: pinned(path.read_text("utf-8"), ask_registry) for path in FILES}
    for path, text in new.items():
        path.write_text(text, "utf-8")
