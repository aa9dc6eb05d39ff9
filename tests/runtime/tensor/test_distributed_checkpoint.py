"""Stored tensors in torch.distributed.checkpoint, in one process; tests/ranks/ has them on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import run
from torch import nn

import zinf_fx
from zinf_fx.errors import StoredTensorError
from zinf_fx.integrations.distributed_checkpoint import Stager
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.runtime.tensor.distributed_checkpoint import StoredBox
from zinf_fx.runtime.tensor.storage import TensorStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CHUNK = 64 << 10  # bytes: the least that is accepted
SHAPES = {"rows": (300, 99), "wide": (3, 40_000), "boxes": (5, 7, 1201), "few": (17,), "scalar": (), "empty": (4, 0)}


def parameters(seed: int, dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    random = torch.Generator().manual_seed(seed)
    return nn.ParameterDict({n: nn.Parameter(torch.randn(s, generator=random).to(dtype)) for n, s in SHAPES.items()})


def stored(seed: int, store: Path, placement: str, **options: object) -> nn.ParameterDict:
    store.mkdir(exist_ok=True)
    return zinf_fx.offload(parameters(seed), store=store, placement=placement, chunk=CHUNK, **options)


@pytest.fixture
def _nothing_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is gathered but by tests."""
    gather = TensorStorage.value

    def value(storage: TensorStorage) -> torch.Tensor:
        return gather(storage) if storage.in_place or storage.numel < 2 else pytest.fail("gathered")

    monkeypatch.setattr(TensorStorage, "value", value)


def save(module: nn.Module, folder: Path) -> None:
    dcp.save(module.state_dict(), checkpoint_id=folder, no_dist=True)


def load(module: nn.Module, folder: Path) -> None:
    dcp.load(module.state_dict(), checkpoint_id=folder, no_dist=True)


def assert_equal(found: nn.ParameterDict, expected: nn.ParameterDict) -> None:
    for name in SHAPES:
        value = found[name].full_tensor() if isinstance(found[name], zinf_fx.StoredTensor) else found[name]
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
def test_stored_and_ordinary_tensors_load_what_either_saved(tmp_path: Path, placement: str):
    plain = parameters(1)
    save(stored(1, tmp_path / "store", placement), tmp_path / "of stored")
    save(plain, tmp_path / "of plain")
    for folder in (tmp_path / "of stored", tmp_path / "of plain"):
        for target in (parameters(2), stored(3, tmp_path / "store", placement)):
            load(target, folder)
            assert_equal(target, plain)


def test_nothing_is_gathered(tmp_path: Path, _nothing_whole: None):
    save(stored(1, tmp_path / "store", "nvme"), tmp_path / "saved")
    load(stored(2, tmp_path / "store", "nvme"), tmp_path / "saved")


def test_no_box_is_larger_than_a_chunk(tmp_path: Path):
    save(stored(1, tmp_path / "store", "nvme"), tmp_path / "saved")
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    for name, shape in SHAPES.items():
        chunks = metadata[name].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == torch.Size(shape).numel()
        assert all(4 * chunk.sizes.numel() <= CHUNK for chunk in chunks)
    assert len(metadata["wide"].chunks) > 3 * 2 and len(metadata["rows"].chunks) > 1


def test_dtypes_are_converted_as_those_of_ordinary_tensors(tmp_path: Path):
    save(parameters(1, torch.float64), tmp_path / "saved")
    module = stored(2, tmp_path / "store", "nvme")
    load(module, tmp_path / "saved")
    assert_equal(module, parameters(1))


PROGRAM = """
import re, sys, torch, zinf_fx
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from zinf_fx.integrations.distributed_checkpoint import Stager

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

folder = sys.argv[1]
with zinf_fx.offloading(store=folder, placement="nvme"):
    model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(4)))
optimizer = zinf_fx.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.full(parameter.shape, 0.1)
    optimizer.step()
    parameter.grad = None
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
found = [peak()]
dcp.save(states, checkpoint_id=folder + "/saved", no_dist=True)
found.append(peak())
dcp.async_save(states, checkpoint_id=folder + "/later", no_dist=True, async_stager=Stager()).result()
found.append(peak())
dcp.load(states, checkpoint_id=folder + "/saved", no_dist=True)
print(*found, peak())
"""


@pytest.mark.slow
def test_peaks(tmp_path: Path):
    """Of 384 MiB of states."""
    ended = run(PROGRAM, tmp_path)
    assert ended.returncode == 0, ended.stderr
    before, *peaks = map(int, ended.stdout.split())
    assert sum(path.stat().st_size for path in (tmp_path / "later").iterdir()) > 380 << 20
    assert all(peak - before <= 80 for peak in peaks), (before, peaks)


@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
def test_what_is_saved_in_the_background_is_staged_in_the_store(tmp_path: Path, placement: str, _nothing_whole: None):
    module = stored(1, tmp_path / "store", placement)
    module["tied"] = module["rows"]
    states = {"module": module.state_dict(), "ordinary": torch.ones(3), "steps": 7}
    saving = dcp.async_save(states, checkpoint_id=tmp_path / "saved", async_stager=Stager())
    for tensor in (states["ordinary"], *module.parameters()):
        with torch.no_grad():
            tensor.copy_(torch.zeros(tensor.shape))
    saving.result()
    plain = parameters(2)
    plain["tied"] = nn.Parameter(torch.zeros(SHAPES["rows"]))
    loaded = {"module": plain.state_dict(), "ordinary": torch.zeros(3), "steps": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    expected = parameters(1)
    assert_equal(plain, expected)
    assert torch.equal(plain["tied"], expected["rows"])
    assert loaded["steps"] == 7 and torch.equal(loaded["ordinary"], torch.ones(3))


class TestStoredBox:
    @pytest.fixture
    def box(self, tmp_path: Path) -> StoredBox:
        """Rows 1 to 3 of a matrix of 5 by 6, columns 2 to 5."""
        tmp_path.joinpath("store").mkdir()
        matrix = nn.ParameterList([nn.Parameter(torch.arange(30.0).view(5, 6))])
        self.matrix = zinf_fx.offload(matrix, store=tmp_path / "store", placement="nvme")[0]
        return StoredBox(self.matrix.stored, Box.whole((5, 6)), Box((1, 2), (3, 4)))

    def test_it_has_the_values(self, box: StoredBox):
        expected = torch.arange(30.0).view(5, 6)[1:4, 2:6]
        assert torch.equal(box.value(), expected) and torch.equal(box + 0, expected)
        assert torch.equal(box.detach().narrow(1, 1, 2) * 1, expected[:, 1:3])
        assert box.shape == (3, 4) and box.is_cpu and type(box.detach()) is StoredBox

    def test_what_is_copied_to_a_part_reaches_the_store(self, box: StoredBox):
        box.narrow(0, 1, 2).narrow(1, 0, 3).copy_(torch.full((2, 3), -1.0))
        expected = torch.arange(30.0).view(5, 6)
        expected[2:4, 2:5] = -1
        assert torch.equal(self.matrix.full_tensor(), expected)

    def test_other_writes_are_refused(self, box: StoredBox):
        with pytest.raises(StoredTensorError, match="would be lost"):
            box.zero_()
        assert torch.equal(self.matrix.full_tensor(), torch.arange(30.0).view(5, 6))
