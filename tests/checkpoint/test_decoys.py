"""Files that are none of ours stay as they are, whatever manifests and names say of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run
from manifests import write

import zinf_fx
from zinf_fx.checkpoint.catalog import give_back_unnamed, look_at
from zinf_fx.cli import main
from zinf_fx.errors import ZinfError
from zinf_fx.native.engine import crc32c
from zinf_fx.runtime.disk import ownership
from zinf_fx.runtime.disk.store import Store

THESIS = b"years of work\n" * 100_000
NAME = "data-00000000-0-0.extents"


def manifest(*names: str, content: bytes = b"", nbytes: int = 4096) -> dict[str, Any]:
    """One that names files of a store; with a content, the first page is a tensor of it, with its checksum."""
    piece = {"start": 0, "count": 4096, "file": 0, "offset": 0, "crc32c": crc32c(content[:4096])}
    box = {"offsets": [0], "shape": [4096], "pieces": [piece]}
    tensors = [{"name": "model/x", "dtype": "uint8", "shape": [4096], "boxes": [box]}] if content else []
    return {
        **{"format": "zinf_fx checkpoint", "schema": 1, "made_by": "x", "time": "2020-01-01T00:00:00+00:00"},
        **{"ranks": 1, "files": [{"path": name, "nbytes": nbytes, "of_store": True} for name in names]},
        **{"tensors": tensors, "values": {"model": {"kind": "module", "extra": {}}}},
    }


def linked_directory(step: Path, thesis: Path) -> None:
    (step / "d").symlink_to(thesis.parent)
    write(step, manifest("d/thesis.tex"))


def link(step: Path, thesis: Path) -> None:
    (step / NAME).symlink_to(thesis)
    write(step, manifest(NAME, content=THESIS))


def hard_link(step: Path, thesis: Path) -> None:
    os.link(thesis, step / NAME)
    write(step, manifest(NAME, content=THESIS))


def hard_link_named_twice(step: Path, thesis: Path) -> None:
    """The file is counted as often as it has names."""
    hard_link(step, thesis)
    write(step, manifest(NAME, NAME, content=THESIS))


def all_names_of_it(step: Path, thesis: Path) -> None:
    os.link(thesis, step / NAME)
    os.link(thesis, step / NAME.replace("-0.", "-1."))
    thesis.unlink()
    write(step, manifest(NAME, NAME.replace("-0.", "-1."), content=THESIS))


def own_file(step: Path, thesis: Path) -> None:
    (step / NAME).write_bytes(THESIS)
    write(step, manifest(NAME, content=THESIS))


def own_file_in_pages(step: Path, thesis: Path) -> None:
    """A private one, as data files are, of which the manifest says something else."""
    (step / NAME).write_bytes(THESIS[: 4096 * 300])
    (step / NAME).chmod(0o600)
    write(step, manifest(NAME, content=b"x" * 4096))


def fifo(step: Path, thesis: Path) -> None:
    os.mkfifo(step / NAME)
    write(step, manifest(NAME, content=THESIS))


def directory(step: Path, thesis: Path) -> None:
    (step / NAME).mkdir()
    (step / NAME / "thesis.tex").write_bytes(THESIS)
    write(step, manifest(NAME, content=THESIS))


def of_another_user(step: Path, thesis: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    fd = os.open(step / NAME, os.O_CREAT | os.O_RDWR, 0o600)
    os.truncate(fd, 1 << 20)
    ownership.begin(fd, "zinf-scratch-1-0123456789abcdef")
    os.pwrite(fd, THESIS[: 4096 * 300], 4096)
    os.close(fd)
    os.chown(step / NAME, 12345, 12345)
    write(step, manifest(NAME))


def no_manifest(step: Path, thesis: Path) -> None:
    (step / "thesis.tex").write_bytes(THESIS)


def names_of_ours_and_no_manifest(step: Path, thesis: Path) -> None:
    for name in (NAME, "data-00000000-0-0.safetensors", "manifest.json.new", "lock"):
        (step / name).write_bytes(THESIS)


def links_with_names_of_ours(step: Path, thesis: Path) -> None:
    for name in (NAME, "data-00000000-0-0.safetensors", "manifest.json", "manifest.json.new", "lock"):
        (step / name).symlink_to(thesis)


def link_that_leads_nowhere(step: Path, thesis: Path) -> None:
    (step / "manifest.json").symlink_to(thesis.parent / "later")
    (step / "data-00000000-0-0.safetensors").write_bytes(THESIS)


def files_beside_a_checkpoint(step: Path, thesis: Path) -> None:
    """One that is whole, and older than all others, so that it is removed by the next."""
    model = torch.nn.Linear(8, 8)
    zinf_fx.save_checkpoint(step, model, step=1)
    for name in ("thesis.tex", "lock", "data-00000000-0-0.safetensors", NAME):
        (step / name).write_bytes(THESIS)
    (step / "data-00000000-7-0.safetensors").symlink_to(thesis)


def scratch_directory(step: Path, thesis: Path) -> None:
    """The scratch directory seems to be that of a dead job."""
    for number, (name, mode) in enumerate((("data-0", 0o644), ("lock", 0o600), ("lock.new", 0o600), ("data-1", 0o600))):
        scratch = step.parent / f"zinf-scratch-1-0123456789abcde{number}"
        scratch.mkdir(mode=0o700)
        (scratch / "lock").touch(mode=0o600)
        (scratch / name).write_bytes(THESIS)
        (scratch / name).chmod(mode)
    (step / "thesis.tex").write_bytes(THESIS)


DECOYS = [
    *(linked_directory, link, hard_link, hard_link_named_twice, all_names_of_it, own_file, own_file_in_pages, fifo),
    *(directory, of_another_user, no_manifest, names_of_ours_and_no_manifest, links_with_names_of_ours),
    *(link_that_leads_nowhere, files_beside_a_checkpoint, scratch_directory),
]


def seen(root: Path, *, but: tuple[str, ...] = ()) -> dict[str, tuple]:
    """Return everything below a directory: what it is, whose, how large on the disk, and its content."""
    entries = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else os.readlink(path) if path.is_symlink() else ""
        # A lock that wasn't there may stay.
        if path.name not in but and not (path.name == "lock" and content == b""):
            entries[str(path.relative_to(root))] = info.st_mode, info.st_uid, info.st_blocks, content
    return entries


def attempts(root: Path, step: Path) -> list[Callable[[], object]]:
    """Return all that look at checkpoints, and a training that saves beside them."""
    (root / "store").mkdir()
    model = zinf_fx.offload(torch.nn.Linear(64, 64), store=root / "store", placement="nvme")
    manager = zinf_fx.CheckpointManager(root / "run", model, keep=1)
    commands = [
        ["clean", str(step)],
        ["clean", str(step.parent), str(root / "store")],
        *(["checkpoint", action, str(step)] for action in ("list", "verify", "inspect")),
        *(
            ["checkpoint", "convert", str(step), "-o", str(root / "out"), "--format", format_name]
            for format_name in ("dcp", "safetensors")
        ),
    ]
    return [
        *(lambda command=command: main(command) for command in commands),
        lambda: zinf_fx.load_checkpoint(step, model),
        manager.resume,
        *(lambda number=number: manager.save(number) for number in (5, 6, 7)),
        lambda: zinf_fx.load_checkpoint(root / "run" / "step-00000007", model),
        *(lambda command=command: main(command) for command in commands),
    ]


@pytest.mark.parametrize("decoy", DECOYS, ids=lambda decoy: decoy.__name__)
def test_decoys_stay_as_they_are(
    tmp_path: Path, decoy: Callable[[Path, Path], None], capfd: pytest.CaptureFixture[str]
):
    thesis, step = tmp_path / "home" / "thesis.tex", tmp_path / "run" / "step-00000001"
    thesis.parent.mkdir()
    thesis.write_bytes(THESIS)
    step.mkdir(parents=True)
    decoy(step, thesis)
    # The checkpoint itself is removed, as one that was saved before, if all of its files are what they seem.
    of_ours = {"manifest.json"} if decoy is files_beside_a_checkpoint else set()
    of_ours |= {path.name for path in step.glob("data-*") if "00000000" not in path.name}
    before = {name: seen(tmp_path / name, but=tuple(of_ours)) for name in ("home", "run")}
    for attempt in attempts(tmp_path, step):
        try:
            attempt()
        except ZinfError:
            continue
    after = {name: seen(tmp_path / name, but=tuple(of_ours)) for name in ("home", "run")}
    assert after["home"] == before["home"]
    assert before["run"].items() <= after["run"].items()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("into", ["a name of a manifest to be", "a manifest", "a lock"])
def test_a_save_does_not_replace_what_is_somebody_elses(tmp_path: Path, into: str):
    name = {"a name of a manifest to be": "manifest.json.new", "a manifest": "manifest.json", "a lock": "lock"}[into]
    for number, make in enumerate(
        (lambda path: path.write_bytes(THESIS), os.mkfifo, lambda path: path.symlink_to("x"))
    ):
        saved = tmp_path / str(number)
        saved.mkdir()
        make(saved / name)
        before = seen(saved)
        if name == "lock" and not number:
            zinf_fx.save_checkpoint(saved, torch.nn.Linear(2, 2))
            assert (saved / name).read_bytes() == THESIS
            continue
        with pytest.raises(ZinfError, match=name):
            zinf_fx.save_checkpoint(saved, torch.nn.Linear(2, 2))
        assert seen(saved) == before


def test_an_export_does_not_empty_a_folder_that_no_export_made(tmp_path: Path):
    (tmp_path / ".zinf-unfinished").mkdir()
    (tmp_path / ".zinf-unfinished" / "thesis.tex").write_bytes(THESIS)
    with pytest.raises(ZinfError, match=r"thesis.tex is in a folder without a 'lock', which no export made; move it"):
        zinf_fx.export_safetensors(torch.nn.Linear(2, 2), tmp_path)
    assert (tmp_path / ".zinf-unfinished" / "thesis.tex").read_bytes() == THESIS


KILLED = """
import os, sys, torch, zinf_fx
model = zinf_fx.offload(torch.nn.Linear(512, 512), store=sys.argv[1], placement="nvme")
optimizer = zinf_fx.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    optimizer.finish()
    zinf_fx.save_checkpoint(sys.argv[2], model, optimizer)
os._exit(1)
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Return the data file in the checkpoint of a job that was killed, whose store is swept."""
    (tmp_path / "store").mkdir()
    run(KILLED, tmp_path / "store", tmp_path / "saved")
    assert main(["clean", str(tmp_path / "store")]) == 0
    (link,) = (tmp_path / "saved").glob("*.extents")
    assert link.stat().st_nlink == 1
    return link


def of_an_earlier_version(path: Path) -> None:
    """Its first page doesn't say what it is."""
    with path.open("r+b") as file:
        file.write(bytes(4096))


def test_what_earlier_versions_left_is_swept_where_its_checksums_prove_it(left: Path):
    of_an_earlier_version(left)
    before = left.stat().st_blocks
    (given,) = give_back_unnamed([look_at(left.parent)]).values()
    assert given > 0 and left.stat().st_blocks < before / 1.5
    assert main(["checkpoint", "verify", str(left.parent)]) == 0


def wrong_content(path: Path) -> None:
    of_an_earlier_version(path)
    checkpoint = look_at(path.parent)
    with path.open("r+b") as file:
        for _, piece in checkpoint.manifest.pieces():
            file.seek(piece.offset)
            file.write(b"\1" * 16)


def readable_by_all(path: Path) -> None:
    of_an_earlier_version(path)
    path.chmod(0o644)


def of_no_whole_pages(path: Path) -> None:
    of_an_earlier_version(path)
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [wrong_content, readable_by_all, of_no_whole_pages])
def test_nothing_else_is(left: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture):
    change(left)
    before = seen(left.parent)
    assert give_back_unnamed([look_at(left.parent)]) == {} and seen(left.parent) == before
    assert f"{left} has bytes that are in no checkpoint, and they stay" in caplog.text


def test_a_directory_that_is_found_twice_is_one(left: Path):
    """A file of two names, of which one is known."""
    os.link(left, left.parent.parent / "backup")
    before = seen(left.parent)
    checkpoint = look_at(left.parent)
    assert give_back_unnamed([checkpoint, checkpoint]) == {} and seen(left.parent) == before


def test_a_load_that_fails_frees_nothing_in_what_it_would_have_adopted(left: Path, tmp_path: Path):
    with left.open("r+b") as file:
        (_, piece), *_ = look_at(left.parent).manifest.pieces()
        file.seek(piece.offset)
        file.write(b"\1" * 16)
    before = seen(left.parent)
    (tmp_path / "second").mkdir()
    model = zinf_fx.offload(torch.nn.Linear(512, 512), store=tmp_path / "second", placement="nvme")
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    with pytest.raises(ZinfError, match="is damaged"):
        zinf_fx.load_checkpoint(left.parent, model, optimizer)
    assert seen(left.parent) == before


def test_every_data_file_says_whose_it_is(tmp_path: Path):
    with Store(tmp_path) as store:
        assert store.path.stat().st_size == 0
        extent = store.allocate(3 << 20)
        assert extent.offset == 4096
        assert store.path.read_bytes()[:4096].rstrip(b"\0").decode() == (
            f"zinf_fx data file of the store in {store.path.parent.name}\n"
        )
        assert ownership.is_proven(store.files[0].descriptor)


@pytest.mark.parametrize("becomes", ["gone", "a link", "another directory"])
def test_a_store_removes_what_it_made_and_nothing_else(tmp_path: Path, becomes: str):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data-0").write_bytes(THESIS)
    (tmp_path / "mine" / "lock").write_bytes(THESIS)
    (tmp_path / "store").mkdir()
    store = Store(tmp_path / "store")
    scratch = store.path.parent
    scratch.rename(tmp_path / "moved")
    if becomes == "a link":
        scratch.symlink_to(tmp_path / "mine")
    elif becomes == "another directory":
        (tmp_path / "mine").rename(scratch)
    store.close()
    assert list((tmp_path / "moved").iterdir()) == []
    kept = scratch if becomes == "another directory" else tmp_path / "mine"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {"data-0": THESIS, "lock": THESIS}
