"""The fingerprints of KV that was stored outside of the device, by the key of the copy."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from canary_obs.copy_records.record_files import RecordFile, RecordFiles

Fold = tuple[int, int]  # of K and V of a block
Place = tuple[str, int]  # group, and the block's place in the copy
KEYS = 1 << 18
MOST = 4  # copies of one key that differ; tiers that go by content keep whichever came first


@dataclass(slots=True)
class _Known:
    """What is known of one key. A place with more than MOST copies is known no more: it stays empty."""

    folds: dict[Place, list[Fold] | None] = field(default_factory=dict)
    filed: bool = False  # what a file next to the copy says is among them, or will be

    def add(self, place: Place, fold: Fold) -> None:
        """One more copy may be the one that is stored."""
        known = self.folds.setdefault(place, [])
        if known is not None and fold not in known:
            known.append(fold)
            if len(known) > MOST:
                self.folds[place] = None


class StoredCopies:
    """Keeps the latest KEYS keys; with record files, also those of other engines and lives.

    A load must equal one of its key's copies: two engines that compute the same tokens may differ in bytes.
    """

    def __init__(
        self,
        formats: Callable[[], dict[str, int]],
        record_files: RecordFiles | None,
        *,
        rewritten: bool = False,
    ) -> None:
        """`formats`: a number by group; equal ones = made of the same heads and layers, and comparable.

        rewritten: who stores a key again replaces its file. Then its record file is read each time.
        """
        self._formats, self._files, self._rewritten = formats, record_files, rewritten
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def add(self, key: bytes, folds: dict[Place, Fold | None], path: str, *, existed: bool = False) -> None:
        """A copy is being stored; None for a fold that is not known. path: of its file; empty = it has none.

        A file that exists already stays as it is: what is said here does not describe it. existed: whether it
        did before this copy was stored.
        """
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known()
        else:
            self._known.move_to_end(key)
        if len(self._known) > KEYS:
            self._known.popitem(last=False)
        for place, fold in folds.items():
            if fold is None:
                known.folds[place] = None
            else:
                known.add(place, fold)
        if path and self._files is not None and not existed:
            known.filed = self._files.write(self.record_file_of(path), self._record_file(key, folds))

    def find(self, key: bytes, place: Place, path: str) -> tuple[Fold, ...]:
        """The copies that may be stored under a key; empty = not known."""
        return tuple(self.copies(key, path).get(place) or ())

    def find_all(
        self, group: str, named: Sequence[tuple[bytes, str]], places: Sequence[int]
    ) -> list[Sequence[Fold]]:
        """The same of several keys with their paths, and a place in each; a job has hundreds."""
        copies = {each: self.copies(*each) for each in named}
        return [copies[each].get((group, place)) or () for each, place in zip(named, places, strict=True)]

    def copies(self, key: bytes, path: str) -> Mapping[Place, Sequence[Fold] | None]:
        """The same of all places in a copy."""
        known = self._known.get(key)
        filed = known is not None and known.filed
        if path and self._files is not None and (self._rewritten or not filed):
            if known is None:
                known = self._known[key] = _Known()
            record_file = self._files.read(self.record_file_of(path), key)
            if record_file is None or record_file.formats != self._formats():
                # Stored by somebody who left no record: any load may be of that.
                if not filed and os.path.exists(path):
                    return {}
            else:
                known.filed = True
                for name, places in record_file.folds.items():
                    for number, copies in places.items():
                        for fold in copies:
                            known.add((name, number), fold)
        return {} if known is None else known.folds

    def described(self, key: bytes, path: str) -> bool:
        """Whether a file has a record file, or will have one."""
        known = self._known.get(key)
        return (known is not None and known.filed) or os.path.exists(self.record_file_of(path))

    def record_file_of(self, path: str) -> str:
        """Where what is known of a file's copy lies: ranks that hold other heads have files of their own."""
        shape = blake2b(repr(sorted(self._formats().items())).encode(), digest_size=4).hexdigest()
        return f"{path}.{shape}.kvcanary"

    def _record_file(self, key: bytes, folds: dict[Place, Fold | None]) -> RecordFile:
        by_group: dict[str, dict[int, list[Fold]]] = {}
        for (name, number), fold in folds.items():
            if fold is not None:
                by_group.setdefault(name, {})[number] = [fold]
        return RecordFile(key=key, formats=self._formats(), folds=by_group)
