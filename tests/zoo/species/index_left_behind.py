"""Index keys left behind."""

from __future__ import annotations

from tests.zoo.mover import copying
from tests.zoo.specimen import Specimen
from tests.zoo.stage import Stage


def plant(stage: Stage) -> None:
    """Every copy moves the latent rows only."""
    stage.spoil(stage.mover, "copy_index", lambda *_: None)


SPECIMEN = Specimen(
    title="index keys left behind",
    place="copy",
    story="KV moves without the keys that sparse attention chooses by: it then reads the wrong tokens",
    reports=("https://github.com/ROCm/ATOM/pull/1368",),
    plant=plant,
    finds=("tail kv_data",),
    furnish=copying,
    engine={"model": "mla_sparse"},
)
