"""What is known of stored copies: by key, in memory and in files beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from canary_obs.copy_records.record_files import MAGIC, RecordFiles, read_key
from canary_obs.copy_records.stored_copies import MOST, StoredCopies
from canary_obs.errors import ConfigurationError

PLACE = ("full", 0)
FORMATS = {"full": 7}
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def record_files() -> Iterator[RecordFiles]:
    made = RecordFiles(None)
    yield made
    made.close()


def copies(record_files: RecordFiles | None = None, formats: dict[str, int] | None = None) -> StoredCopies:
    return StoredCopies(lambda: formats or FORMATS, record_files)


def record_path(path: str) -> str:
    return copies().record_file_of(path)


def test_a_load_may_be_any_of_the_copies_of_its_key() -> None:
    stored = copies()
    assert stored.find(KEY, PLACE, "") == ()
    stored.add(KEY, {PLACE: (1, 2)}, "")
    stored.add(KEY, {PLACE: (3, 4)}, "")
    stored.add(KEY, {PLACE: (1, 2)}, "")
    assert stored.find(KEY, PLACE, "") == ((1, 2), (3, 4))
    assert stored.find(KEY, ("full", 1), "") == ()
    assert stored.find(OTHER, PLACE, "") == ()


def test_a_copy_of_which_nothing_is_known_makes_its_key_unknown() -> None:
    stored = copies()
    stored.add(KEY, {PLACE: (1, 2)}, "")
    stored.add(KEY, {PLACE: None}, "")
    stored.add(KEY, {PLACE: (1, 2)}, "")
    assert stored.find(KEY, PLACE, "") == ()


def test_more_copies_than_are_kept_are_none() -> None:
    """Any of those that were dropped could be the one that is stored."""
    stored = copies()
    for number in range(MOST + 1):
        stored.add(KEY, {PLACE: (number, 0)}, "")
    assert stored.find(KEY, PLACE, "") == ()


def test_old_keys_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canary_obs.copy_records.stored_copies.KEYS", 2)
    stored = copies()
    for key in (KEY, OTHER, KEY, b"new"):
        stored.add(key, {PLACE: (1, 2)}, "")
    assert [bool(stored.find(key, PLACE, "")) for key in (KEY, OTHER, b"new")] == [True, False, True]


def test_another_life_reads_what_lies_beside_the_file(record_files: RecordFiles, tmp_path: Path) -> None:
    path = tmp_path / "x" / "copy.bin"
    copies(record_files).add(KEY, {PLACE: (-(2**63), 2**63 - 1), ("full", 1): None}, str(path))
    record_files.settle()
    path.write_bytes(b"kv")
    later = copies(record_files)
    assert later.find(KEY, PLACE, str(path)) == ((-(2**63), 2**63 - 1),)
    assert later.find(KEY, ("full", 1), str(path)) == ()
    beside = Path(record_path(str(path)))
    assert beside.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, beside.name]
    beside.unlink()
    assert later.find(KEY, PLACE, str(path)) != (), "read once"


def test_records_of_two_writers_are_joined(record_files: RecordFiles, tmp_path: Path) -> None:
    path = str(tmp_path / "copy.bin")
    for fold in ((1, 2), (3, 4), (1, 2)):
        copies(record_files).add(KEY, {PLACE: fold}, path)
        record_files.settle()
    assert copies(record_files).find(KEY, PLACE, path) == ((1, 2), (3, 4))


def test_where_files_are_replaced_what_others_say_is_read_each_time(
    record_files: RecordFiles, tmp_path: Path
) -> None:
    path = tmp_path / "copy.data"
    ours = StoredCopies(lambda: FORMATS, record_files, rewritten=True)
    ours.add(KEY, {PLACE: (1, 2)}, str(path), existed=False)
    record_files.settle()
    path.write_bytes(b"kv")
    others = StoredCopies(lambda: FORMATS, record_files, rewritten=True)
    others.add(KEY, {PLACE: (3, 4)}, str(path), existed=False)
    record_files.settle()
    assert ours.find(KEY, PLACE, str(path)) == ((1, 2), (3, 4))
    Path(record_path(str(path))).unlink()
    assert ours.find(KEY, PLACE, str(path)) == ((1, 2), (3, 4)), "it was read before it was lost"
    later = StoredCopies(lambda: FORMATS, record_files, rewritten=True)
    assert later.find(KEY, PLACE, str(path)) == ()


def test_a_file_is_described_once_its_record_waits_to_be_written(tmp_path: Path) -> None:
    record_files = RecordFiles(None)
    record_files.close()  # nothing is written any more
    path, stored = str(tmp_path / "copy.data"), copies(record_files)
    assert not stored.described(KEY, path)
    stored.add(KEY, {PLACE: (1, 2)}, path)
    assert stored.described(KEY, path)
    Path(record_path(path)).write_bytes(b"")
    assert copies(record_files).described(OTHER, path)


def test_a_file_that_is_there_already_is_somebody_elses(record_files: RecordFiles, tmp_path: Path) -> None:
    path = tmp_path / "copy.bin"
    path.write_bytes(b"kv")
    stored = copies(record_files)
    stored.add(KEY, {PLACE: (1, 2)}, str(path), existed=True)
    record_files.settle()
    assert not Path(record_path(str(path))).exists()
    assert stored.find(KEY, PLACE, str(path)) == (), "a load may be of that file"


def test_records_of_another_format_are_not_compared(record_files: RecordFiles, tmp_path: Path) -> None:
    path = tmp_path / "copy.bin"
    ours, others = copies(record_files), copies(record_files, {"full": 8})
    ours.add(KEY, {PLACE: (1, 2)}, str(path))
    record_files.settle()
    path.write_bytes(b"kv")
    assert others.find(KEY, PLACE, str(path)) == ()
    Path(ours.record_file_of(str(path))).rename(others.record_file_of(str(path)))
    assert others.find(KEY, PLACE, str(path)) == (), "whatever its name is"


def written(record_files: RecordFiles, folder: Path) -> Path:
    path = folder / "copy.bin"
    copies(record_files).add(KEY, {PLACE: (1, 2)}, str(path))
    record_files.settle()
    path.write_bytes(b"kv")
    return Path(record_path(str(path)))


@pytest.mark.parametrize("damage", ["body", "seal", "magic", "short", "long", "key", "mode"])
def test_what_cannot_be_believed_is_refused(record_files: RecordFiles, tmp_path: Path, damage: str) -> None:
    beside = written(record_files, tmp_path)
    data = bytearray(beside.read_bytes())
    if damage in ("body", "seal", "magic"):
        data[{"body": -1, "seal": len(MAGIC), "magic": 0}[damage]] ^= 1
    elif damage == "short":
        del data[-3:]
    elif damage == "long":
        data += bytes(1 << 20)
    beside.write_bytes(data)
    if damage == "mode":
        beside.chmod(0o620)
    assert record_files.read(str(beside), OTHER if damage == "key" else KEY) is None
    assert record_files.refused == 1


def test_a_missing_record_file_is_not_refused(record_files: RecordFiles, tmp_path: Path) -> None:
    assert record_files.read(str(tmp_path / "none"), KEY) is None
    assert record_files.refused == 0


def test_with_a_key_only_its_holders_are_believed(tmp_path: Path) -> None:
    made = [RecordFiles(key) for key in (b"a" * 32, b"b" * 32, None)]
    beside = written(made[0], tmp_path)
    beside.chmod(0o666)  # who may write it does not matter: the seal does
    assert [each.read(str(beside), KEY) is not None for each in made] == [True, False, False]
    for each in made:
        each.close()


def test_keys_are_read_from_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    assert read_key("") is None
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    assert read_key(str(path)) == b"k" * 32
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="only its owner"):
        read_key(str(path))
    path.chmod(0o600)
    path.write_bytes(b"k" * 31)
    with pytest.raises(ConfigurationError, match="31 bytes"):
        read_key(str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_key(str(tmp_path / "none"))


def test_a_folder_that_cannot_be_written_costs_the_records_only(tmp_path: Path) -> None:
    made = RecordFiles(None)
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    stored = copies(made)
    stored.add(KEY, {PLACE: (1, 2)}, str(blocked / "copy.bin"))
    made.settle()
    assert made.unwritten == 1
    assert stored.find(KEY, PLACE, "") == ((1, 2),)
    made.close()
    made.close()


def test_a_full_queue_leaves_copies_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("canary_obs.copy_records.record_files._QUEUED", 1)
    held = threading.Event()
    monkeypatch.setattr(RecordFiles, "_write", lambda *_: held.wait(10))
    made = RecordFiles(None)
    stored = copies(made)
    for number in range(4):
        stored.add(bytes([number]) * 32, {PLACE: (1, 2)}, str(tmp_path / f"{number}.bin"))
    # One is being written at most, one waits.
    assert made.unwritten >= 2
    assert stored.find(bytes(32), PLACE, "") == ((1, 2),), "in memory all are kept"
    held.set()
    made.close()
