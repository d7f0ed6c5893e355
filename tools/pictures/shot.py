"""Screenshots as small PNG files. Needs chromium and pngquant."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs/images"
LARGEST = 160_000  # bytes


def take(page: Any, name: str, *, colours: int = 64, whole: bool = False) -> Path:
    """Write docs/images/NAME.png with a reduced palette and no metadata. Raises OSError without pngquant."""
    if shutil.which("pngquant") is None:
        raise OSError("pngquant is not installed; apt-get install pngquant")
    picture: bytes = page.screenshot(full_page=whole, animations="disabled")
    command = ["pngquant", "--speed", "1", "--nofs", "--strip", str(colours), "-"]
    path = IMAGES / f"{name}.png"
    path.write_bytes(subprocess.run(command, input=picture, stdout=subprocess.PIPE, check=True).stdout)
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(
            f"{path.name} has {size} bytes; at most {LARGEST}: take less of the page, or fewer colours"
        )
    print(f"{path.relative_to(ROOT)}: {size} bytes")
    return path
