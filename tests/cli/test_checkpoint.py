"""`zinf-fx checkpoint` says what checkpoints hold, sound ones and others."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zinf_fx
from zinf_fx.checkpoint.manifest import Manifest, manifest_of
from zinf_fx.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Make a directory with three checkpoints; return it, and the weights in the last."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 80, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.tied = model[0]
    model.register_buffer("count", torch.arange(3))
    (folder / "store").mkdir()
    zinf_fx.offload(model, store=folder / "store", placement="nvme")
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    manager = zinf_fx.CheckpointManager(folder / "run", model, optimizer, every_steps=1, note="a trial", rates=[0.5, 1])
    for step in (1, 2):
        model[1](model[0](torch.randn(2, 80))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.after_step(step)
    manager.save(2, "best")
    weights = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    return folder / "run", weights


@pytest.fixture
def run(made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    """Return a copy that may be damaged."""
    return shutil.copytree(made[0], tmp_path / "run")


def damage(directory: Path) -> str:
    """Flip a bit in the last piece; return the name of its file."""
    manifest = manifest_of(directory)
    *_, (_, piece) = manifest.pieces()
    path = directory / manifest.files[piece.file].path
    content = bytearray(path.read_bytes())
    content[piece.offset] ^= 1
    path.write_bytes(content)
    return path.name


def test_list(run: Path, capsys: pytest.CaptureFixture[str]):
    for path in (run / "step-00000001").glob("data-*"):
        path.unlink()
    (run / "step-00000009").mkdir()
    (run / "another").mkdir()
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "saved", "size", "ranks", "form", "state"]
    rows = {line.split()[0]: line for line in lines[2:]}
    assert list(rows) == ["step-00000009", "step-00000001", "step-00000002", "best"]
    assert re.search(r"2  20\S+  +\d+\.\d KiB +1  generation  whole$", rows["best"])
    assert "is missing; use another one" in rows["step-00000001"]
    assert "there is no manifest.json in it" in rows["step-00000009"]


def test_list_of_one_as_json(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "list", str(run / "best"), "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert (
        described["path"] == str(run / "best")
        and described["step"] == 2
        and described["ranks"] == 1
        and described["damage"] is None
    )


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert f"{tmp_path} has no checkpoints: name a directory" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2
    assert "looking for checkpoints failed" in capsys.readouterr().err


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "inspect", str(run / "best"), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"KiB in 10 tensors, saved 20\S+ by 1 rank of zinf_fx", out)
    assert re.search(r"; 13\d\.\d KiB are in files of the store that they were in$", out, re.MULTILINE)
    assert re.search(r"^data-\w+-0-0\.extents +\S+ MiB +1\d\d\.\d KiB$", out, re.MULTILINE)
    assert re.search(r"^model +module +4 +4\d\.\d KiB$", out, re.MULTILINE)
    assert re.search(r"^optimizer +optimizer +6 ", out, re.MULTILINE)
    assert re.search(r'^note +"a trial"$', out, re.MULTILINE) and re.search(r"^rates +\[0.5, 1\]$", out, re.MULTILINE)
    assert re.search(r"^model/0\.weight +float32 +\[70, 80\] +21\.9 KiB$", out, re.MULTILINE)
    assert main(["checkpoint", "inspect", str(run / "best"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["values"] == {"note": "a trial", "rates": [0.5, 1], "step": 2}
    assert described["same"] == {"model/tied.weight": "model/0.weight", "model/tied.bias": "model/0.bias"}
    assert {"name": "model/count", "dtype": "int64", "shape": [3], "nbytes": 24} in described["tensors"]


def test_pieces_are_looked_at_once_for_all_files(run: Path, monkeypatch: pytest.MonkeyPatch):
    whole = manifest_of(run / "best")
    (of_store,) = (file for file in whole.files if file.of_store)
    extended = replace(whole, files=(*whole.files, *(replace(of_store, path=f"{of_store.path}{n}") for n in range(9))))
    looks, pieces = [], Manifest.pieces
    monkeypatch.setattr(Manifest, "pieces", lambda manifest: (looks.append(manifest), pieces(manifest))[1])
    assert [extended.taken_of(file) for file in extended.files] == [*map(whole.taken_of, whole.files), *[0] * 9]
    assert extended.content_of(of_store.path) and len(looks) == 2  # of each manifest


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert out == "".join(f"{run / name}: whole\n" for name in ("step-00000001", "step-00000002", "best"))
    name = damage(run / "best")
    (run / "step-00000001" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "verify", str(run), "--json"]) == 1
    damages = json.loads(capsys.readouterr().out)
    assert damages[str(run / "step-00000002")] == []
    (of_best,) = damages[str(run / "best")]
    assert f"{name} is damaged: the " in of_best and "have another checksum" in of_best
    assert "manifest.json is damaged" in damages[str(run / "step-00000001")][0]
    assert main(["checkpoint", "verify", str(run / "best")]) == 1
    assert capsys.readouterr().out.startswith(f"{run / 'best'}: DAMAGED\n  ")


def test_convert(made: tuple[Path, dict[str, torch.Tensor]], run: Path, capsys: pytest.CaptureFixture[str]):
    target = run / "weights"
    assert main(["checkpoint", "convert", str(run / "best"), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target / 'model.safetensors'}: 4")
    converted, expected = load_file(target / "model.safetensors"), made[1]
    assert converted.keys() == {"0.weight", "0.bias", "1.weight", "count"}
    assert all(torch.equal(value, expected[name]) for name, value in converted.items())
    model = nn.Sequential(nn.Linear(80, 70), nn.Linear(70, 80, bias=False))
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    zinf_fx.load_safetensors(model, target)
    assert torch.equal(model[1].weight, expected["1.weight"])
    options = ["--part", "optimizer", "--max-shard-size", "30KB", "--json"]
    assert main(["checkpoint", "convert", str(run / "best"), "-o", str(target), *options]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 1
    assert "0.weight.exp_avg" in json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]


def test_what_can_not_be_converted(run: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["checkpoint", "convert", str(run / "best"), "-o", str(run / "weights")]
    assert main([*arguments, "--part", "ema"]) == 2
    assert "has no tensors of 'ema': it has those of model, optimizer" in capsys.readouterr().err
    damage(run / "best")
    assert main([*arguments, "--part", "optimizer"]) == 2
    assert "have another checksum than when they were saved" in capsys.readouterr().err
    assert list((run / "weights").iterdir()) == []
