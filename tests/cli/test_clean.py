"""`zinf-fx clean` removes what dead jobs left, keeps everything else, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import run

from zinf_fx.cli import main
from zinf_fx.runtime.disk.store import Store


def abandon(directory: Path) -> Path:
    """Make the scratch directory of a job that died."""
    program = (
        "import os, sys; from zinf_fx.runtime.disk.store import Store; s = Store(sys.argv[1]); print(s.path.parent)"
    )
    program += "; sys.stdout.flush(); os._exit(1)"
    path = Path(run(program, directory).stdout.strip())
    assert path.parent == directory and path.is_dir()
    return path


def test_dead_jobs_go_and_running_ones_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    dead = abandon(tmp_path)
    (tmp_path / "mine").write_text("not a scratch directory")
    with Store(tmp_path) as running:
        said = f"jobs that were killed left scratch directories (1): `zinf-fx clean {tmp_path}` frees their space"
        assert said in caplog.messages
        assert main(["clean", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"removed  {dead}\nin use   {running.path.parent}\n"
        assert not dead.exists() and running.path.exists()
    assert main(["clean", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no scratch directories\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_default_is_the_default_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("ZINF_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["clean"]) == 0
    assert "never used" in capsys.readouterr().out and not (tmp_path / "cache").exists()
    store = tmp_path / "store"
    monkeypatch.setenv("ZINF_STORE", str(store))  # who names a store means one that is there
    assert main(["clean"]) == 2
    assert "clean failed" in capsys.readouterr().err and not store.exists()
    store.mkdir()
    dead = abandon(store)
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"removed  {dead}\n"


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["clean", str(tmp_path / "missing")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("zinf-fx: error: store clean failed") and err.count("\n") == 1


def test_what_stays_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    starting = tmp_path / f"zinf-scratch-1-{'0' * 16}"
    starting.mkdir(mode=0o700)
    foreign = abandon(tmp_path)
    (foreign / "mine").write_text("keep")
    assert main(["clean", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"stays    {starting}: it has no lock" in out
    assert f"stays    {foreign}: it holds something that the store didn't make" in out
    assert (foreign / "mine").exists() and starting.exists()


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


def test_what_checkpoints_of_dead_jobs_have_besides_is_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, saved = tmp_path / "store", tmp_path / "saved"
    store.mkdir()
    run(KILLED, store, saved)
    (link,) = saved.glob("*.extents")
    before = link.stat().st_blocks
    assert main(["clean", str(saved), str(store)]) == 0  # whatever their order
    removed, freed = capsys.readouterr().out.splitlines()
    assert removed.startswith(f"removed  {store}/zinf-scratch-")
    assert re.fullmatch(rf"freed    \d+\.\d MiB of {link}, which are in no checkpoint", freed)
    assert link.stat().st_blocks < before / 1.5
    assert main(["checkpoint", "verify", str(saved)]) == 0
    capsys.readouterr()
    assert main(["clean", str(saved)]) == 0 and capsys.readouterr().out == f"{saved}: no scratch directories\n"
