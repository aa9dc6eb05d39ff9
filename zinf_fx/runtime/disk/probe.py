"""Which I/O provider works in a directory: found out by writing a file there and reading it back."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.native.engine import READ, WRITE, Engine, direct_alignment, is_direct, provider_names
from zinf_fx.runtime.disk.scratch import PROBE, Scratch
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.sizes import PAGE

log = logging.getLogger(__name__)

PROVIDER_VARIABLE = "ZINF_IO_PROVIDER"
PROBE_BYTES = 16 * PAGE

FATAL_FOR_EVERY_PROVIDER = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE}


def candidates(provider: str, strict_direct: bool) -> tuple[str, ...]:
    """The providers to try, best first. Raises: ConfigError for an unknown one, or one that contradicts."""
    source = "provider"
    if provider == "auto":
        provider = os.environ.get(PROVIDER_VARIABLE, "auto")
        source = PROVIDER_VARIABLE
    names = provider_names()
    if provider not in ("auto", *names):
        raise ConfigError(f"unknown I/O provider {provider!r} in {source}; accepted: auto, {', '.join(names)}")
    chosen = names if provider == "auto" else (provider,)
    allowed = tuple(name for name in chosen if is_direct(name) or not strict_direct)
    if not allowed:
        raise ConfigError(f"strict_direct=True contradicts the I/O provider {provider!r}, which uses the page cache")
    return allowed


def working_engine(
    scratch: Scratch, names: tuple[str, ...], start: Callable[[str], Engine]
) -> tuple[Engine, dict[str, str]]:
    """The engine of the first of `names` that works in the scratch directory, made by `start`; why those before don't.

    Raises:
        StoreError: none works, or the file system is full, read-only or out of descriptors, which no provider can help.
    """
    refused: dict[str, str] = {}
    for name in names:
        try:
            check_provider(scratch, name)
            engine = start(name)
        except StoreError as error:
            if error.errno in FATAL_FOR_EVERY_PROVIDER:
                raise
            refused[name] = str(error)
            continue
        level = logging.INFO if is_direct(name) else logging.WARNING
        log.log(level, "store in %s: I/O by %s%s", scratch.path.parent, name, listed(refused))
        return engine, refused
    advice = "; strict_direct=False would allow the page cache" if all(map(is_direct, names)) else ""
    raise StoreError("open", scratch.path.parent, f"no I/O provider works here{listed(refused)}{advice}")


def listed(refused: dict[str, str]) -> str:
    """Which providers don't work, and why, as the end of a sentence; empty without any."""
    return "".join(f"; not {name}: {reason}" for name, reason in refused.items())


def check_provider(scratch: Scratch, provider: str) -> None:
    """Writes and reads back a file, because a file system may accept O_DIRECT at open and refuse it later.

    Raises: StoreError, which says what doesn't work.
    """
    path = scratch.path / PROBE
    engine = Engine(provider, depth=1)
    plain = direct = -1
    try:
        plain = scratch.create(PROBE)
        alignment = direct_alignment(plain) if is_direct(provider) else PAGE
        if alignment is None:
            raise StoreError("probe", path, "the file system says that it has no direct I/O")
        if alignment != PAGE:
            raise StoreError("probe", path, f"direct I/O needs an alignment of {alignment}, buffers have {PAGE}")
        direct = reopen(plain, provider)
        written, back = aligned_empty(PROBE_BYTES), aligned_empty(PROBE_BYTES)
        written.copy_((written.new_ones(PROBE_BYTES).cumsum(0) % 251).to(written.dtype))
        back.zero_()
        file = engine.attach(direct, path, alignment=PAGE)
        try:
            file.submit(WRITE, written.data_ptr(), 0, PROBE_BYTES, written).wait()
            file.submit(READ, back.data_ptr(), 0, PROBE_BYTES, back).wait()
        finally:
            file.detach()
        if not written.equal(back):
            raise StoreError("probe", path, "the bytes read are not the bytes written", length=PROBE_BYTES)
    finally:
        engine.close()
        for fd in (direct, plain):
            if fd >= 0:
                os.close(fd)
        scratch.unlink(PROBE)


def reopen(fd: int, provider: str) -> int:
    """A second descriptor of the same file, for the provider. The first stays plain: posix_fallocate may have to write,
    and can't do that with O_DIRECT.

    Raises: StoreError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if is_direct(provider) else 0)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    except OSError as error:
        path = os.readlink(f"/proc/self/fd/{fd}")
        raise StoreError("open", path, f"the file can't be opened for {provider}", errno=error.errno) from error
