"""What of this machine helps or hinders a store, each finding with the line that fixes it."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zinf_fx import cuda
from zinf_fx.adam import AdamStates
from zinf_fx.errors import StoreError
from zinf_fx.native.engine import checksums_in_hardware, direct_alignment, is_direct
from zinf_fx.optim.threads import update_threads
from zinf_fx.processors import Processors, processors
from zinf_fx.runtime.disk.filesystem import FileSystem, file_system_of
from zinf_fx.runtime.disk.measure import load_profile
from zinf_fx.runtime.disk.probe import listed
from zinf_fx.runtime.disk.scratch import Scratch, orphans
from zinf_fx.runtime.disk.store import Store
from zinf_fx.sizes import PAGE, in_words

Status = Literal["ok", "warning", "problem"]

AIO_NR, AIO_MAX = Path("/proc/sys/fs/aio-nr"), Path("/proc/sys/fs/aio-max-nr")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
AIO_EVENTS_WANTED = 1024
LITTLE_SPACE = 10 << 30
OTHER_STORE = 'export ZINF_STORE=/path/on/a/local/disk   # or store="..." in the program'


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what.
        status: "ok", "warning" (slower or riskier than need be) or "problem" (a store can't work like this).
        found: what was found, and why it matters if it isn't ok.
        fix: the line to run or to write; None where there is nothing to fix.
    """

    subject: str
    status: Status
    found: str
    fix: str | None = None


def diagnose(directory: Path, unmade: StoreError | None = None) -> list[Finding]:
    """Looks at the machine and at a store directory. Writes a small file there, and removes it. `unmade`: why the
    directory, which was to be made, can't be."""
    cpus = processors()
    findings = [_torch(), _processors(cpus), _numa(cpus), _checksums()]
    findings += [_huge_pages(), _memlock(), _aio(), _file_size()]
    try:
        if unmade is not None:
            raise unmade
        file_system, left = file_system_of(directory), orphans(directory)
    except StoreError as error:
        is_missing = unmade is None and error.errno == errno.ENOENT
        fix = f"mkdir -p {_quoted(directory)}" if is_missing else OTHER_STORE
        return [*findings, Finding("store", "problem", str(error), fix)]
    findings += [_kind(directory, file_system), _space(directory, file_system, left)]
    return [*findings, _alignment(directory), _provider(directory), _orphans(directory, left), _profile(directory)]


def _torch() -> Finding:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if not cuda.is_available():
        return Finding("torch", "ok", f"{versions}, no CUDA: models run on the CPU")
    names = set(map(cuda.name, cuda.devices()))
    return Finding("torch", "ok", f"{versions}, CUDA {cuda.version()}: {', '.join(sorted(names))}")


def _processors(cpus: Processors) -> Finding:
    subject = "processors"
    of_pytorch = torch.get_num_threads()
    updating = update_threads(None, of_pytorch, beside_gpu=cuda.is_available())
    text = f"{cpus.count}, of {_counted(cpus.cores, 'core')}"
    if cpus.quota is not None:
        text += f", with the time of {cpus.quota.processors:g} ({cpus.quota.source})"
    text += f"; PyTorch has {_counted(of_pytorch, 'thread')}, and updates of parameters {updating}"
    if of_pytorch > cpus.runnable_threads:
        fix = f"export OMP_NUM_THREADS={cpus.busy_threads}   # and no more for update_threads"
        return Finding(subject, "warning", f"{text}: threads wait for each other's turn", fix)
    return Finding(subject, "ok", text)


def _numa(cpus: Processors) -> Finding:
    names = ", ".join(map(str, cpus.nodes))
    if len(cpus.nodes) == 1:
        return Finding("NUMA nodes", "ok", f"1 (node {names})")
    text = (
        f"{len(cpus.nodes)} (nodes {names}): what a thread writes first is in the memory of its node, which the "
        "threads of the others reach through the link between them"
    )
    fix = "numactl --interleave=all python ...   # torchrun: each rank by numactl --cpunodebind=NODE --membind=NODE"
    return Finding("NUMA nodes", "warning", text, fix)


def _checksums() -> Finding:
    if checksums_in_hardware():
        return Finding("checksums", "ok", "crc32c by the processor's instruction")
    state = "crc32c by tables, as this processor has no instruction that is known here: about 2 GiB/s"
    return Finding("checksums", "warning", state, "zinf_fx.Config(checksum=False)")


def _huge_pages() -> Finding:
    subject = "huge pages"
    try:
        setting = HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return Finding(subject, "warning", "the kernel has no transparent huge pages: direct I/O is up to 2 x slower")
    if setting == "never":
        state = "transparent huge pages are off: direct I/O is up to 2 x slower"
        return Finding(subject, "warning", state, f"echo madvise | sudo tee {HUGE_PAGES}")
    return Finding(subject, "ok", f"transparent huge pages: {setting}")


def _memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limits = f"locked memory: {_size(soft)} (hard limit {_size(hard)})"
    if soft != resource.RLIM_INFINITY and cuda.is_available():
        fix = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else _limits_line("memlock")
        return Finding("memlock", "warning", f"{limits}: pinning host memory for the GPU may be refused", fix)
    return Finding("memlock", "ok", f"{limits}; nothing is locked without a GPU" if soft != -1 else limits)


def _aio() -> Finding:
    try:
        used, most = int(AIO_NR.read_text()), int(AIO_MAX.read_text())
    except (OSError, ValueError):
        return Finding("kernel AIO", "warning", "the kernel doesn't tell its limits: threads may have to do the I/O")
    in_use = f"{used} of {most} events in use"
    if most - used < AIO_EVENTS_WANTED:
        fix = f"sudo sysctl -w fs.aio-max-nr={most + 65536}"
        return Finding("kernel AIO", "warning", f"{in_use}: a store may not get a queue, and use threads", fix)
    return Finding("kernel AIO", "ok", in_use)


def _file_size() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return Finding("file size", "ok", "unlimited")
    fix = "ulimit -f unlimited" if hard == resource.RLIM_INFINITY else _limits_line("fsize")
    return Finding("file size", "warning", f"files may have {_size(soft)} at most, and a store is one file", fix)


def _kind(directory: Path, file_system: FileSystem) -> Finding:
    text = f"{directory}: {file_system.kind} on {file_system.source}"
    if file_system.in_memory:
        return Finding("file system", "warning", f"{text}: its bytes take host memory, nothing is gained", OTHER_STORE)
    if file_system.over_network:
        return Finding("file system", "warning", f"{text}: the network is slower than a local disk", OTHER_STORE)
    return Finding("file system", "ok", text)


def _space(directory: Path, file_system: FileSystem, left: list[Path]) -> Finding:
    text = f"{_size(file_system.free)} of {_size(file_system.total)} free"
    nbytes = 2 + AdamStates(2).nbytes
    room = f"{file_system.free / nbytes / 1e9:.1f} G parameters"
    if file_system.free < LITTLE_SPACE:
        fix = f"zinf-fx clean {_quoted(directory)}" if left else OTHER_STORE
        return Finding("free space", "warning", f"{text}: enough for {room}", fix)
    return Finding("free space", "ok", f"{text}: room for {room} ({nbytes:g} bytes each)")


def _alignment(directory: Path) -> Finding:
    subject = "alignment"
    try:
        scratch = Scratch(directory)
    except StoreError as error:
        return Finding(subject, "problem", str(error), f"chmod u+rwx {_quoted(directory)}   # or: {OTHER_STORE}")
    try:
        with os.fdopen(scratch.create("probe")) as probe:
            alignment = direct_alignment(probe.fileno())
    except StoreError as error:
        return Finding(subject, "problem", str(error), OTHER_STORE)
    finally:
        scratch.remove()
    if alignment is None:
        return Finding(subject, "warning", "the file system has no direct I/O: the page cache is used", OTHER_STORE)
    if alignment > PAGE:
        return Finding(subject, "warning", f"direct I/O needs {alignment} bytes, more than a page", OTHER_STORE)
    return Finding(subject, "ok", f"direct I/O at multiples of {alignment} bytes")


def _provider(directory: Path) -> Finding:
    subject = "provider"
    try:
        with Store(directory) as store:
            provider, refused = store.provider, store.refused
    except StoreError as error:
        return Finding(subject, "problem", str(error), OTHER_STORE)
    reasons = listed(refused)
    if not is_direct(provider):
        return Finding(subject, "warning", f"{provider}: through the page cache, slower{reasons}", OTHER_STORE)
    if provider == "threads":
        fix = "sudo sysctl -w fs.aio-max-nr=1048576"
        return Finding(subject, "warning", f"{provider}: more processor time than kernel AIO{reasons}", fix)
    return Finding(subject, "ok", f"{provider}{reasons}")


def _orphans(directory: Path, left: list[Path]) -> Finding:
    if left:
        text = f"scratch directories of dead jobs ({len(left)}) take space"
        return Finding("orphans", "warning", text, f"zinf-fx clean {_quoted(directory)}")
    return Finding("orphans", "ok", "no scratch directories of dead jobs")


def _profile(directory: Path) -> Finding:
    profile = load_profile(directory)
    if profile is None:
        text = "the device was never measured: plans assume a speed"
        return Finding("measured", "warning", text, f"zinf-fx bench-io {_quoted(directory)}")
    return Finding("measured", "ok", f"read {profile.read / 2**30:.2f} GiB/s, write {profile.write / 2**30:.2f} GiB/s")


def _limits_line(item: str) -> str:
    return f"echo '* hard {item} unlimited' | sudo tee -a /etc/security/limits.conf   # then log in again"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _size(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else in_words(nbytes)
