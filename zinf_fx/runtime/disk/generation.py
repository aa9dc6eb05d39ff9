"""A generation: what of a store is kept as it is at one moment, under names that its data files get for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.store import Extent, Store


class Generation:
    """Bytes of one store that are kept for as long as data files of the store have the links of this."""

    def __init__(self, store: Store) -> None:
        self.key = object()  # by which the bytes know it: no circle keeps the store
        self._store = store
        self._frozen: list[CopyOnWrite] = []
        self._links: dict[int, Path] = {}  # by the number of the data file

    def freeze(self, spaces: Mapping[CopyOnWrite, bool], replaced: Sequence[Generation]) -> None:
        """Keep these bytes as they are, with room for those that will be rewritten. `replaced`: generations that are
        released before that. Raises: StoreError where there is no room; nothing is kept then."""
        try:
            for space, reserve in spaces.items():
                space.freeze(self.key, [generation.key for generation in replaced], reserve=reserve)
                self._frozen.append(space)
        except BaseException:
            self.release()
            raise

    def adopt(self, space: CopyOnWrite, extent: Extent, *, reserve: bool) -> None:
        """Have bytes of adopted files, and keep them as they are: see `CopyOnWrite.adopt`."""
        space.adopt(self.key, extent, reserve=reserve)
        self._frozen.append(space)

    def has_link(self, number: int, path: Path) -> None:
        """A data file has another name for bytes of it already."""
        self._links[number] = path

    def link(self, number: int, path: Path, content: Iterable[range], link: Callable[[Path, Path], None]) -> None:
        """Give a data file another name, for some bytes of it. Raises: OSError."""
        linked = self._store.files[number]
        link(linked.path, path)
        self._links[number] = path
        linked.links.add(path, linked.descriptor, content)

    def is_in(self, directories: Iterable[Path]) -> bool:
        """Whether it has a link in one of these."""
        return not {path.parent for path in self._links.values()}.isdisjoint(directories)

    @property
    def is_gone(self) -> bool:
        """Whether none of its links is there any more."""
        return all(path in self._store.files[number].gone_links() for number, path in self._links.items())

    def release(self) -> None:
        """Its bytes are the store's again, but for those that others keep, too."""
        for number, path in self._links.items():
            self._store.files[number].links.forget(path)
        self._links.clear()
        while self._frozen:
            self._frozen.pop().release(self.key)

    def settle(self) -> None:
        """Take the room of the generations that this one replaced. Raises: StoreError where they were not released, and
        there is no other room."""
        for space in self._frozen:
            space.settle()
