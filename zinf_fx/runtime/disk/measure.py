"""What a directory's device can move: measured with the engine, kept per file system, read by whoever plans."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from zinf_fx.environment import cache_directory
from zinf_fx.errors import StoreError
from zinf_fx.native.engine import BLOCK, DEPTH, READ, WRITE, FileTicket, PageSums
from zinf_fx.regular_files import read_regular
from zinf_fx.runtime.disk.filesystem import file_system_of
from zinf_fx.runtime.disk.probe import candidates
from zinf_fx.runtime.disk.volume import Volumes
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.sizes import PAGE, round_up

log = logging.getLogger(__name__)

Operation = Literal["read", "write", "mixed"]
OPERATIONS: tuple[Operation, ...] = ("read", "write", "mixed")

QUICK_BYTES = 64 << 20
FORMAT = 1

# Bytes: a profile has some hundred.
_LARGEST_FILE = 1 << 24


@dataclass(frozen=True)
class Rate:
    """One measurement: `nbytes` moved in `seconds`, of which the I/O thread computed checksums for `check_seconds`."""

    operation: Operation
    nbytes: int
    seconds: float
    check_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth."""
        return self.nbytes / self.seconds


class Trial:
    """A file in a scratch directory below `directory`, written once, for measurements of one provider and shape.

    Args:
        directory: where to measure.
        provider: one of the engine's, or "auto".
        depth, block: full blocks under way at a time, and their bytes.
        nbytes: bytes of the file, and of one measurement; rounded up to two blocks.
        checksum: compute them as the store does.

    Raises:
        StoreError: the directory can't be used, or the provider doesn't work there. Nothing is left behind.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        provider: str = "auto",
        depth: int = DEPTH,
        block: int = BLOCK,
        nbytes: int = 1 << 30,
        checksum: bool = False,
    ) -> None:
        self.nbytes = round_up(nbytes, 2 * block)
        self.block = block
        self._volumes = Volumes((Path(directory).absolute(),), candidates(provider, False), depth, block)
        (self._volume,) = self._volumes.all
        self.path, self.engine = self._volume.path, self._volume.engine
        self.provider = self.engine.provider
        try:
            self._start = self._volume.take(self.nbytes)
            self._sums = PageSums(self.nbytes // PAGE, 1) if checksum else None
            # Little more memory than is under way, as other tools have it, because what a cache does is part of the
            # result; and enough requests in the queue that this thread may come late.
            memory = aligned_empty(2 * depth * block).random_(0, 256)
            self._memory = memory.split(block)
            self.run("write")
        except BaseException:
            self.close()
            raise

    def run(self, operation: Operation) -> Rate:
        """Moves the whole file's bytes in sequence; mixed: writes the first half while it reads the second."""
        before = self.engine.counters().check_seconds
        under_way: deque[tuple[FileTicket, torch.Tensor]] = deque()
        free = list(self._memory)
        started = time.perf_counter()
        for kind, offset in self._requests(operation):
            if not free:
                ticket, memory = under_way.popleft()
                ticket.wait()
                free.append(memory)
            memory = free.pop()
            under_way.append((self._submit(kind, memory, offset), memory))
        for ticket, _ in under_way:
            ticket.wait()
        seconds = time.perf_counter() - started
        return Rate(operation, self.nbytes, seconds, self.engine.counters().check_seconds - before)

    def start_seconds(self, before: Callable[[], object], times: int) -> float:
        """Seconds that this thread takes to start the read of a block: the mean of so many, one at a time, with
        `before` called before each."""
        seconds = 0.0
        for _ in range(times):
            before()
            started = time.perf_counter()
            ticket = self._submit(READ, self._memory[0], 0)
            seconds += time.perf_counter() - started
            ticket.wait()
        return seconds / times

    def block_seconds(
        self,
        together: int,
        times: int,
        before: Callable[[], object] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> float:
        """Seconds that a block takes of so many that are read together, up to twice the trial's depth: the mean of so
        many times, from all over the file. This thread calls `before` before each time, and then `meanwhile` until they
        are there, or else waits."""
        blocks, seconds, number = self.nbytes // self.block, 0.0, 0
        for _ in range(times):
            if before is not None:
                before()
            started = time.perf_counter()
            tickets = []
            for memory in self._memory[:together]:
                tickets.append(self._submit(READ, memory, number % blocks * self.block))
                number += 1
            for ticket in tickets:
                while meanwhile is not None and not ticket.done():
                    meanwhile()
                ticket.wait()
            seconds += time.perf_counter() - started
        return seconds / times / together

    def _submit(self, kind: int, memory: torch.Tensor, offset: int) -> FileTicket:
        """Start to move a block at so many bytes from the file's beginning."""
        where, page = self._start + offset, offset // PAGE
        return self._volume.file.submit(kind, memory.data_ptr(), where, self.block, sums=self._sums, first_page=page)

    def _requests(self, operation: Operation) -> Iterator[tuple[int, int]]:
        if operation != "mixed":
            for offset in range(0, self.nbytes, self.block):
                yield (READ if operation == "read" else WRITE), offset
        else:
            for offset in range(0, self.nbytes // 2, self.block):
                yield WRITE, offset
                yield READ, self.nbytes // 2 + offset

    def close(self) -> None:
        """Removes the file."""
        self._volumes.close()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Profile:
    """The best that was measured on a file system, in bytes per second, and with which provider and shape.

    `read` and `write` are for one direction alone, `mixed` for both together, half of the bytes each.
    """

    read: float
    write: float
    mixed: float
    provider: str
    depth: int
    block: int
    measured_at: float
    """Seconds since 1970."""

    @property
    def weight(self) -> float:
        """Bytes per second when as much is read as written: the harmonic mean."""
        return 2 / (1 / self.read + 1 / self.write)


def profiles_path() -> Path:
    """The file of the profiles, in the user's cache directory."""
    return cache_directory() / "io-profiles.json"


def load_profile(directory: Path | str) -> Profile | None:
    """The profile of the file system that holds `directory`, if one was stored and can be read."""
    entry = _profiles().get(file_system_of(directory).key)
    try:
        profile = Profile(**entry) if entry is not None else None
        if profile is None or profile.weight > 0:
            return profile
        raise ValueError("it has no rate")
    except (TypeError, ValueError, ArithmeticError):
        log.warning("%s has an entry that can't be read; measure again with `zinf-fx bench-io`", profiles_path())
        return None


def store_profile(directory: Path | str, profile: Profile) -> Path:
    """Stores the profile of the file system that holds `directory`; returns the file. Raises: StoreError."""
    path, key = profiles_path(), file_system_of(directory).key
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=path.parent) as made:
            profiles = _profiles() | {key: asdict(profile)}
            file = Path(made) / path.name
            file.write_text(json.dumps({"format": FORMAT, "profiles": profiles}, indent=1))
            os.replace(file, path)
    except OSError as error:
        raise StoreError("write", path, "the profile can't be stored", errno=error.errno) from error
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A block that one process is in at a time; on a file system without locks, any number."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _profiles() -> dict[str, dict]:
    path = profiles_path()
    try:
        content = json.loads(read_regular(path, _LARGEST_FILE))
        profiles = content["profiles"] if content["format"] == FORMAT else {}
        if not isinstance(profiles, dict):
            raise TypeError(f"its profiles are a {type(profiles).__name__}")
        return profiles
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s can't be read (%s); measure again with `zinf-fx bench-io`", path, error)
        return {}


def weights_of(volumes: Sequence[tuple[Path, int]]) -> list[float]:
    """What to weight each (directory, device number) with: bytes per second, shared by directories on one device.

    From the stored profiles if there is one for every device, else from a quick measurement. One directory needs none.
    """
    if len(volumes) == 1:
        return [1.0]
    devices = [device for _, device in volumes]
    known = {device: load_profile(directory) for directory, device in volumes}
    rates: dict[int, float] = {}
    for directory, device in volumes:
        profile = known[device]
        if device in rates:
            log.warning("%s is on the same device as another store directory: nothing is gained by both", directory)
        elif len(known) == 1:
            rates[device] = 1.0
        elif profile is not None and all(known.values()):
            rates[device] = profile.weight
        else:
            with Trial(directory, nbytes=QUICK_BYTES) as trial:
                rates[device] = 2 / sum(1 / trial.run(direction).bytes_per_second for direction in ("write", "read"))
    return [rates[device] / devices.count(device) for device in devices]
