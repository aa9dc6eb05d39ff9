"""What is damaged, or doesn't fit, is refused by name, before anything is changed where that can be known."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Job, assert_equal
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.errors import CheckpointError, OptimizerError


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """One whose checkpoint is in `tmp_path / "saved"`, as copies: damage in the store's own file would be the job's."""
    job = Job(tmp_path / "store", seed=1, fields={"checksum": False})
    job.train(3)
    job.save(tmp_path / "saved")
    return job


def data_of(directory: Path) -> Path:
    (path,) = directory.glob("data-*")
    return path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def remove_data(directory: Path) -> None:
    data_of(directory).unlink()


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def foreign(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"name": "a web page"}')


def newer(directory: Path) -> None:
    from zinf_fx.checkpoint.manifest import _SUM
    from zinf_fx.native.engine import crc32c

    path = directory / "manifest.json"
    text = path.read_bytes()[: -len(_SUM.format(0))].replace(b'"schema":1', b'"schema":2')
    path.write_bytes(text + _SUM.format(crc32c(text)).encode())


def naming(path: str) -> Callable[[Path], None]:
    """Return a manifest whose data file has another path."""

    def change(directory: Path) -> None:
        from zinf_fx.checkpoint.manifest import _SUM
        from zinf_fx.native.engine import crc32c

        manifest = directory / "manifest.json"
        text = manifest.read_bytes()[: -len(_SUM.format(0))].replace(data_of(directory).name.encode(), path.encode())
        manifest.write_bytes(text + _SUM.format(crc32c(text)).encode())

    return change


def pipe(directory: Path) -> None:
    data = data_of(directory)
    data.unlink()
    os.mkfifo(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: truncate(data_of(d)), r"its file data-\w+-0-0.safetensors has \d+ bytes, and \d+ when it was saved"),
        (remove_data, r"its file data-\w+-0-0.safetensors is missing"),
        (lambda d: flip(d / "manifest.json", 300), "manifest.json is damaged, or no manifest of a checkpoint"),
        (foreign, "manifest.json is damaged, or no manifest of a checkpoint"),
        (naming("/etc/passwd"), "names the file '/etc/passwd', which is not in its directory"),
        (naming("../other"), "names the file '../other', which is not in its directory"),
        (pipe, r"data-\w+-0-0.safetensors is no file"),
        (newer, "has schema 2, and this version of zinf_fx reads 1"),
        (remove_manifest, "a save was cut off before it wrote manifest.json"),
        (lambda d: (remove_data(d), remove_manifest(d)), "there is no manifest.json in it"),
    ],
)
def test_damage_that_shows_before_anything_is_changed(
    job: Job, tmp_path: Path, damage: Callable[[Path], object], says: str
):
    expected = job.values()
    damage(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=says):
        job.load(tmp_path / "saved")
    assert_equal(job.values(), expected)
    job.train(5)


def test_a_directory_that_is_not_there(job: Job, tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no such directory"):
        job.load(tmp_path / "nowhere")


def test_flipped_bits_are_found(job: Job, tmp_path: Path):
    data = data_of(tmp_path / "saved")
    size = data.stat().st_size
    header = int.from_bytes(data.read_bytes()[:8], "little") + 8
    count = 0
    for offset in range(header, size, 3 * 4096):
        flip(data, offset)
        with pytest.raises(CheckpointError, match=r"is damaged: the \d+ bytes at offset \d+, of '") as caught:
            job.load(tmp_path / "saved")
        assert "some of the model is loaded" in caught.value.__notes__[0]
        with pytest.raises(OptimizerError, match="a checkpoint was loaded in part"):
            job.adam.step()
        flip(data, offset)
        count += 1
    job.load(tmp_path / "saved")
    job.train(5)
    assert count > 3


def test_another_file_of_the_same_size(job: Job, tmp_path: Path):
    job.train(5)
    job.save(tmp_path / "other")
    data_of(tmp_path / "saved").write_bytes(data_of(tmp_path / "other").read_bytes())
    with pytest.raises(CheckpointError, match="have another checksum than when they were saved"):
        job.load(tmp_path / "saved")


def test_a_manifest_of_another_program_is_not_replaced(job: Job, tmp_path: Path):
    other = tmp_path / "page"
    other.mkdir()
    foreign(other)
    with pytest.raises(CheckpointError, match=r"its manifest.json is another program's"):
        job.save(other)
    assert (other / "manifest.json").read_text() == '{"name": "a web page"}'


def test_one_that_was_written_beside_our_data_is_not_replaced(job: Job, tmp_path: Path):
    foreign(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    with pytest.raises(CheckpointError, match=r"its manifest.json is another program's"):
        job.save(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


@pytest.mark.parametrize("offset", [0, 300])
def test_a_damaged_checkpoint_is_replaced(job: Job, tmp_path: Path, offset: int):
    flip(tmp_path / "saved" / "manifest.json", offset)
    job.save(tmp_path / "saved")
    job.load(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("data-*"))) == 1


def other(**how: Any) -> Callable[[None], Job]:
    return partial(Job, seed=2, **how)


def with_wider_head(store: None) -> Job:
    job = Job(store, seed=2)
    job.model.last.weight.data = torch.zeros(7, 48, dtype=torch.bfloat16)
    return job


def with_other_names(store: None) -> Job:
    job = Job(store, seed=2)
    job.model.last, job.model.head = nn.Identity(), job.model.last
    return job


def untied(store: Path) -> Job:
    job = Job(store, seed=2)
    job.model.tied.weight = nn.Parameter(torch.zeros(48, 48, dtype=torch.bfloat16))
    return job


def in_two_groups(store: None) -> Job:
    job = Job(store, seed=2)
    first, *others = job.model.parameters()
    job.adam = zinf_fx.optim.AdamW([{"params": [first]}, {"params": others}])
    return job


# What loads another job's checkpoint, and what it is told.
UNFIT = {
    "dtype": (
        other(dtype=torch.float32),
        r"'model/first.weight' has dtype torch.float32, and torch.bfloat16 in the checkpoint",
    ),
    "shape": (with_wider_head, r"'model/last.weight' has shape \(7, 48\), and \(131, 48\) in the checkpoint"),
    "names": (
        with_other_names,
        r"'model/head.weight' is not in the checkpoint; 'model/head.bias' is not in the checkpoint; "
        r".*'model/last.weight' is in the checkpoint alone",
    ),
    "optimizer": (
        other(optimizer=zinf_fx.optim.Adam),
        "optimizer is a zinf_fx.optim.Adam, and zinf_fx.optim.AdamW in the checkpoint",
    ),
    "groups": (in_two_groups, "optimizer has 2 groups, and 1 in the checkpoint"),
}


def load_unfit(rank: int, directory: Path, name: str) -> None:
    """Load a checkpoint into a job that it doesn't fit."""
    job = Job(None, seed=1)
    job.train(3)
    job.save(directory)
    make, says = UNFIT[name]
    unfit = make(None)
    expected = unfit.values()
    with pytest.raises(CheckpointError, match=f"{says}.*nothing was changed"):
        unfit.load(directory)
    assert_equal(unfit.values(), expected)


@pytest.mark.parametrize(("ranks", "name"), [*((1, name) for name in UNFIT), (2, "names")])
def test_what_does_not_fit(tmp_path: Path, ranks: int, name: str):
    on_ranks(ranks, load_unfit, tmp_path, name)


def test_an_untied_model_gets_both_and_a_tied_one_is_refused(job: Job, tmp_path: Path):
    second = untied(tmp_path / "second")
    zinf_fx.load_checkpoint(tmp_path / "saved", second.model, schedule=None, scaler=None)
    assert torch.equal(second.model.tied.weight.full_tensor(), job.model.first.weight.full_tensor())
    zinf_fx.save_checkpoint(tmp_path / "untied", second.model)
    with pytest.raises(
        CheckpointError, match=r"'model/tied.weight' and 'model/first.weight' are one tensor, and two in"
    ):
        zinf_fx.load_checkpoint(tmp_path / "untied", job.model)


def test_what_is_left_out_has_to_be_said(job: Job, tmp_path: Path):
    with pytest.raises(CheckpointError, match="'scaler' is in the checkpoint alone: give it, or scaler=None to leave"):
        zinf_fx.load_checkpoint(tmp_path / "saved", job.model, job.adam, schedule=job.schedule)
    assert zinf_fx.load_checkpoint(tmp_path / "saved", job.model, scaler=None, schedule=None) == {"done": 3}
    with pytest.raises(CheckpointError, match="'more' is not in the checkpoint"):
        zinf_fx.load_checkpoint(tmp_path / "saved", job.model, job.adam, **job.extra, more=job.schedule)
    with pytest.raises(CheckpointError, match="'done' is a state, and a value in the checkpoint"):
        zinf_fx.load_checkpoint(tmp_path / "saved", job.model, job.adam, **job.extra, done=job.schedule)


class Strange:
    def state_dict(self) -> dict[str, Any]:
        return {"inner": [1, {"callback": print}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"thing": object()}, "thing is a builtins.object, which can't be saved without pickling"),
        ({"sampler": Strange()}, r"sampler.inner\[1\].callback is a builtins.builtin_function_or_method"),
        ({"gradients": 1}, "'gradients' is no name for what else is saved"),
        ({"value": torch.zeros(2, device="meta")}, "value is on the meta device"),
        ({"value": torch.quantize_per_tensor(torch.zeros(2), 0.5, 0, torch.qint8)}, "value is of torch.qint8"),
        ({"value": torch.quantize_per_tensor(torch.zeros(2000), 0.5, 0, torch.qint8)}, "value is of torch.qint8"),
    ],
)
def test_what_can_not_be_saved(job: Job, tmp_path: Path, extra: dict[str, Any], says: str):
    with pytest.raises(CheckpointError, match=says):
        zinf_fx.save_checkpoint(tmp_path / "more", job.model, job.adam, **extra)
    assert not (tmp_path / "more").exists()


def test_what_is_no_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"the model is a dict: give a torch.nn.Module"):
        zinf_fx.save_checkpoint(tmp_path, {})
    with pytest.raises(CheckpointError, match="the optimizer is a list"):
        zinf_fx.save_checkpoint(tmp_path, nn.Linear(1, 1), [])


def test_a_torn_step_is_not_saved(job: Job, tmp_path: Path):
    (job.model.first.weight.grad, *_), job.adam.torn = [torch.zeros(48, 48, dtype=torch.bfloat16)], "a torn step"
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    with pytest.raises(OptimizerError, match="a torn step"):
        job.save(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {"order": [1, 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("another order")


def test_no_step_follows_where_the_last_of_a_load_failed(job: Job, tmp_path: Path):
    more = {**job.extra, "sampler": Refusing()}
    zinf_fx.save_checkpoint(tmp_path / "more", job.model, job.adam, **more)
    with pytest.raises(ValueError, match="another order"):
        zinf_fx.load_checkpoint(tmp_path / "more", job.model, job.adam, **more)
    with pytest.raises(OptimizerError, match="a checkpoint was loaded in part"):
        job.adam.step()
    job.load(tmp_path / "saved")
    job.adam.step()
