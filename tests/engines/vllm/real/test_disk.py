"""ExampleConnector (files) and OffloadingConnector (memory) within a MultiConnector: loads are compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from canary_obs.vocabulary import State
from tests.engines.vllm.real.rig import Rig, prompts
from tests.engines.vllm.real.stored_prompts import DATA, LOST, StoredPrompts

BLOCKS = 7  # of a prompt; the connector keeps whole blocks, and never the last token


class Disk(StoredPrompts):
    """The engine, and the folders that the connector keeps."""

    def __init__(self, model: Path, folder: Path) -> None:
        from tests.engines.vllm.real.host_offload import transfer_config

        self.folder = folder
        disk = {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }  # fmt: skip
        config = {
            "kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [disk, transfer_config()]},
        }  # fmt: skip
        # It takes a prompt whose prefill is in chunks for a whole one.
        rig = Rig(
            model, num_gpu_blocks_override=120, kv_transfer_config=config, max_num_batched_tokens=4096,
            disable_hybrid_kv_cache_manager=True,
        )  # fmt: skip
        super().__init__(rig)

    @property
    def child(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().sub_connectors[0]

    def layers(self) -> list[Path]:
        return sorted(self.folder.rglob("*.safetensors"))

    def keep(self, first: Callable[[], None], tier: str) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        first()
        kept = sorted(path for path in self.folder.iterdir() if path.is_dir())
        self.forget()
        for path in set(self.folder.iterdir()) - set(kept):  # the other prompts'
            if not any(path.name.startswith(own.name) for own in kept):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def disk(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(models("llama"), tmp_path_factory.mktemp("disk"))
    yield made
    made.rig.close()


def nothing(disk: Disk) -> None:
    pass


def test_a_clean_storm_is_compared_and_answers_the_same(disk: Disk) -> None:
    asked = prompts(12)
    first = disk.rig.generate(asked, 8)
    for _ in range(2):
        disk.forget()
        assert disk.rig.generate(asked, 8) == first
    compared, left_out = disk.loads()
    assert compared > 1000
    assert left_out == 0
    assert disk.rig.settle() == []
    assert disk.rig.canary.verdict() == (State.OK, ())


@pytest.mark.parametrize("files", [True, False])
def test_what_was_stored_is_what_is_loaded(disk: Disk, files: bool) -> None:
    """Without the folder it comes from the memory of the other connector."""

    def lose(disk: Disk) -> None:
        if not files:
            for path in list(disk.folder.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    assert disk.served(lose) == set()
    assert (disk.compared, disk.left_out) == (BLOCKS * 32, 0)
    assert disk.again == disk.first


def flip(disk: Disk) -> None:
    """A byte of the last layer's file."""
    file = disk.layers()[-1]
    data = bytearray(file.read_bytes())
    data[-77] ^= 64
    file.write_bytes(data)


def test_a_byte_that_flips_in_the_file_of_one_layer_is_found(disk: Disk) -> None:
    assert disk.served(flip) == {DATA}
    assert disk.left_out == 0


def test_layers_that_change_places_are_found(disk: Disk) -> None:
    def exchange(disk: Disk) -> None:
        one, other = disk.layers()[:2]
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    assert disk.served(exchange) == {DATA}


@pytest.mark.parametrize("layers", [1, None])
def test_layers_of_another_prompt_are_found(disk: Disk, layers: int | None) -> None:
    """One of them, or all."""
    others = list[bytes]()

    def keep(disk: Disk) -> None:
        others.extend(file.read_bytes() for file in disk.layers())

    def replace(disk: Disk) -> None:
        for file, data in list(zip(disk.layers(), others, strict=True))[:layers]:
            file.write_bytes(data)

    assert disk.served(keep) == set()
    assert disk.served(replace) == {DATA}
    assert disk.left_out == 0


def test_a_load_that_copied_nothing_is_lost(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(disk: Disk) -> None:
        monkeypatch.setattr(disk.child, "start_load_kv", lambda *_, **__: None)

    assert disk.served(skip) == {LOST}


@pytest.mark.parametrize("way", ["another life", "lost", "forged", "stale"])
def test_only_records_that_can_be_believed_are_compared(disk: Disk, way: str) -> None:
    """Those of another engine, or of this one before it was restarted."""

    def change(disk: Disk) -> None:
        (records,) = disk.rig.adapter.connector.disks
        records._stored._known.clear()
        (path,) = disk.folder.glob("*.kvcanary")
        if way == "lost":
            path.unlink()
        elif way == "forged":
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif way == "stale":  # a file was replaced, and what was said of it was not
            flip(disk)

    assert disk.served(change) == ({DATA} if way == "stale" else set())
    believed = way in ("another life", "stale")
    assert (disk.compared, disk.left_out) == ((BLOCKS * 32, 0) if believed else (0, BLOCKS * 32))


def test_a_truncated_file_ends_the_engine_before_it_is_read(disk: Disk) -> None:
    """vLLM's doing. Nothing may follow this test: the engine is not usable any more."""

    def truncate(disk: Disk) -> None:
        file = disk.layers()[-1]
        file.write_bytes(file.read_bytes()[:-512])

    with pytest.raises(Exception, match=r"(?i)incomplete|safetensor|header"):
        disk.served(truncate)
    assert disk.rig.found == []
