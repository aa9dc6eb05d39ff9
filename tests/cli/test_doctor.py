"""`zinf-fx doctor`: every problem comes with the line that fixes it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from forked import run

from zinf_fx.cli import main
from zinf_fx.machine import diagnose as module
from zinf_fx.machine.diagnose import Finding, diagnose
from zinf_fx.optim import threads
from zinf_fx.processors import Processors, Quota
from zinf_fx.runtime.disk.filesystem import FileSystem
from zinf_fx.runtime.disk.measure import Profile, store_profile

SUBJECTS = (
    "torch checksums,processors,NUMA nodes,huge pages,memlock,kernel AIO,file size,file system,free space,alignment,"
    "provider,orphans"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZINF_IO_PROVIDER", raising=False)
    monkeypatch.delenv("ZINF_STORE", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


def find(store: Path, subject: str) -> Finding:
    (finding,) = [candidate for candidate in diagnose(store) if candidate.subject == subject]
    return finding


def test_every_subject_is_reported_and_nothing_is_left_behind(store: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", str(store)]) == 0
    text = capsys.readouterr().out
    assert all(subject in text for subject in SUBJECTS.replace("torch ", "torch,").split(","))
    assert not list(store.iterdir())


def test_json_and_the_default_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    findings = report[str(tmp_path / "cache" / "zinf_fx")]
    assert {"subject", "status", "found", "fix"} == set(findings[0])


def test_a_missing_directory_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    absent = tmp_path / "not there"
    assert main(["doctor", str(absent)]) == 1
    assert f"fix: mkdir -p '{absent}'" in capsys.readouterr().out


def test_a_default_store_that_can_not_be_made_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Root, as whom tests run, may make any but one in a file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["doctor", "--json"]) == 1
    *_, finding = json.loads(capsys.readouterr().out)[str(tmp_path / "file" / "zinf_fx")]
    assert (finding["subject"], finding["status"], finding["fix"]) == ("store", "problem", module.OTHER_STORE)
    assert "store create failed" in finding["found"] and "name a directory with `store`" in finding["found"]
    assert main(["estimate", "--layers", "2", "--hidden", "64", "--heads", "4", "--hardware", "this-machine"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("zinf-fx: error: store create failed")


def test_what_is_no_directory_is_a_problem(store: Path):
    (store / "file").touch()
    assert any(finding.status == "problem" and finding.fix for finding in diagnose(store / "file"))


@pytest.mark.parametrize(
    ("kind", "said"), [("tmpfs", "host memory"), ("nfs4", "network"), ("fuse.sshfs", "network"), ("ext4", None)]
)
def test_kinds_of_file_systems(store: Path, kind: str, said: str | None, monkeypatch: pytest.MonkeyPatch):
    system = FileSystem(kind, "source", "key", 1 << 40, 1 << 41)
    monkeypatch.setattr(module, "file_system_of", lambda directory: system)
    finding = find(store, "file system")
    assert (finding.status, said is None or said in finding.found) == ("ok" if said is None else "warning", True)
    assert (finding.fix is None) == (said is None)


def test_little_space(store: Path, monkeypatch: pytest.MonkeyPatch):
    system = FileSystem("ext4", "source", "key", 1 << 30, 1 << 41)
    monkeypatch.setattr(module, "file_system_of", lambda directory: system)
    assert "ZINF_STORE" in (find(store, "free space").fix or "")


def test_limits_of_the_kernel(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, content in (("nr", "65000"), ("max", "65536"), ("thp", "always madvise [never]")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(module, "AIO_NR", tmp_path / "nr")
    monkeypatch.setattr(module, "AIO_MAX", tmp_path / "max")
    monkeypatch.setattr(module, "HUGE_PAGES", tmp_path / "thp")
    assert find(store, "kernel AIO").fix == "sudo sysctl -w fs.aio-max-nr=131072"
    assert (find(store, "huge pages").fix or "").startswith("echo madvise | sudo tee ")
    monkeypatch.setattr(module, "AIO_NR", tmp_path / "absent")
    monkeypatch.setattr(module, "HUGE_PAGES", tmp_path / "absent")
    assert {find(store, subject).status for subject in ("kernel AIO", "huge pages")} == {"warning"}


MACHINES = {
    "enough": (Processors(16, 8, (0,)), "ok", "16, of 8 cores; PyTorch has 8 threads, and updates of parameters 8"),
    "hyperthreads": (Processors(8, 4, (0,)), "ok", "8, of 4 cores; PyTorch has 8 threads, and updates of parameters 4"),
    "a container": (
        Processors(16, 8, (0,), Quota(2.5, "/sys/fs/cgroup/cpu.max")),
        "OMP_NUM_THREADS=2 ",
        "with the time of 2.5 (/sys/fs/cgroup/cpu.max); PyTorch has 8 threads, and updates of parameters 2: ",
    ),
    "one processor": (Processors(1, 1, (0,)), "OMP_NUM_THREADS=1 ", "1, of 1 core; PyTorch has 8 threads"),
}


@pytest.mark.parametrize(("machine", "fix", "said"), MACHINES.values(), ids=MACHINES)
def test_more_threads_than_the_process_may_keep_busy(
    store: Path, monkeypatch: pytest.MonkeyPatch, machine: Processors, fix: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for module_of in (module, threads):
        monkeypatch.setattr(module_of, "processors", lambda: machine)
    finding = find(store, "processors")
    assert said in finding.found
    assert (finding.status, finding.fix) == ("ok", None) if fix == "ok" else fix in (finding.fix or "")


def test_memory_of_several_nodes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processors", lambda: Processors(16, 8, (1,)))
    assert find(store, "NUMA nodes") == Finding("NUMA nodes", "ok", "1 (node 1)")
    monkeypatch.setattr(module, "processors", lambda: Processors(16, 8, (0, 1)))
    finding = find(store, "NUMA nodes")
    assert finding.status == "warning" and finding.found.startswith("2 (nodes 0, 1): ")
    assert "--interleave=all" in (finding.fix or "") and "--cpunodebind" in (finding.fix or "")


def test_the_limit_on_file_sizes(store: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        finding = find(store, "file size")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert finding.status == "warning" and "1.0 GiB" in finding.found and finding.fix


def test_a_store_that_is_too_small_even_to_probe(store: Path):
    program = (
        "import resource, sys\nfrom zinf_fx.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\nsys.exit(main(['doctor', sys.argv[1]]))"
    )
    done = run(program, store)
    assert done.returncode == 1 and "FAIL  provider" in done.stdout, done.stderr
    assert not list(store.iterdir())


def test_a_downgrade_is_explained(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZINF_IO_PROVIDER", "buffered")
    assert find(store, "provider").status == "warning"
    monkeypatch.setenv("ZINF_IO_PROVIDER", "threads")
    assert find(store, "provider").fix


def test_orphans(store: Path):
    program = (
        "import os, sys, signal\nfrom zinf_fx.runtime.disk.scratch import Scratch\nfrom pathlib import Path\n"
        "kept = Scratch(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run(program, store)
    assert len(list(store.iterdir())) == 1
    assert find(store, "orphans").fix == f"zinf-fx clean {store}"
    assert len(list(store.iterdir())) == 1, "doctor removes nothing"


def test_the_measured_profile(store: Path):
    assert find(store, "measured").fix == f"zinf-fx bench-io {store}"
    store_profile(store, Profile(3 << 30, 6 << 30, 4 << 30, "aio", 8, 4 << 20, 1.0))
    assert "read 3.00 GiB/s" in find(store, "measured").found


def test_a_named_store_that_is_missing_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ZINF_STORE", str(tmp_path / "unmounted"))
    assert main(["doctor"]) == 1
    assert "mkdir -p" in capsys.readouterr().out and not (tmp_path / "unmounted").exists()
