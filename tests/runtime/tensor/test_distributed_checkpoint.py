"""torch.distributed.checkpoint saves and loads stored tensors, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import run
from gate import slow
from ranks.launching import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zinf_fx
from zinf_fx.errors import StoredTensorError
from zinf_fx.integrations.distributed_checkpoint import Stager
from zinf_fx.optim import reserve_states
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


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Run a block in which no value of several elements is gathered from a store."""
    gather = TensorStorage.value

    def value(storage: TensorStorage) -> torch.Tensor:
        return gather(storage) if storage.in_place or storage.numel < 2 else pytest.fail("a whole tensor was gathered")

    with mock.patch.object(TensorStorage, "value", value):
        yield


def save(module: nn.Module, folder: Path) -> None:
    dcp.save(module.state_dict(), checkpoint_id=folder, no_dist=True)


def load(module: nn.Module, folder: Path) -> None:
    dcp.load(module.state_dict(), checkpoint_id=folder, no_dist=True)


def assert_equal(actual: nn.ParameterDict, expected: nn.ParameterDict) -> None:
    for name in SHAPES:
        value = actual[name].full_tensor() if isinstance(actual[name], zinf_fx.StoredTensor) else actual[name]
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
def test_stored_and_ordinary_tensors_load_what_either_saved(tmp_path: Path, placement: str):
    plain = parameters(1)
    with nothing_gathered():
        save(stored(1, tmp_path / "store", placement), tmp_path / "of stored")
    save(plain, tmp_path / "of plain")
    for folder in (tmp_path / "of stored", tmp_path / "of plain"):
        for target in (parameters(2), stored(3, tmp_path / "store", placement)):
            with nothing_gathered():
                load(target, folder)
            assert_equal(target, plain)


def made(placement: object, optimizer: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return a model with a shape that no number of ranks divides into rows, itself and compiled, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 301), nn.GELU(), nn.LayerNorm(301), nn.Linear(301, 67, bias=False))
    dtype = torch.bfloat16 if optimizer == "bf16" else torch.float32
    zinf_fx.offload(model.to(dtype), placement=placement, collective_timeout=60)
    kind = torch.optim.AdamW if optimizer == "torch" else zinf_fx.optim.AdamW
    return model, torch.compile(model, backend="zinf"), kind(model.parameters(), lr=1e-2, fused=True)


def step(run: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    dtype = next(run.parameters()).dtype
    batch = torch.randn(8, 67, generator=torch.Generator().manual_seed(2 * number + rank)).to(dtype)
    loss = (run(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return parameters and states."""
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value).clone()
        for name, value in tensors.items()
    }


Trained = tuple[dict[str, torch.Tensor], list[float]]


def train(rank: int, folder: Path, placement: object, optimizer: str, how: str) -> Trained:
    """Three steps and a save, at once or in the background, or a load; the values then, and the losses of two more
    steps."""
    torch._dynamo.reset()
    model, run, steps = made(placement, optimizer)
    for number in range(0 if how == "load" else 3):
        step(run, steps, number, rank)
    if how == "load" and optimizer == "bf16":
        reserve_states(steps)
    states = dict(zip(("model", "optimizer"), get_state_dict(run, steps), strict=True))
    with nothing_gathered():
        if how == "background":
            group = dist.new_group() if dist.is_initialized() else None
            dcp.async_save(states, checkpoint_id=folder, async_stager=Stager(), process_group=group).result()
        elif how == "save":
            dcp.save(states, checkpoint_id=folder)
        else:
            dcp.load(states, checkpoint_id=folder)
            set_state_dict(run, steps, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return values(model, steps), [step(run, steps, number, rank) for number in (3, 4)]


# Who saves, who loads that, and the optimizer: its class, or "bf16", which has masters.
TRAININGS = [
    slow("save", (1, "nvme"), [(1, "nvme"), (2, "infinity-nvme")], "zinf"),
    slow("background", (2, "infinity-cpu"), [(2, "zero-3")], "zinf"),
    *(
        slow("save", (2, placement), [(2, placement), (1, "nvme")], optimizer)
        for placement in ("infinity-nvme", "zero-1")
        for optimizer in ("zinf", "bf16", "torch")
    ),
]


@pytest.mark.parametrize(("how", "saving", "loading", "optimizer"), TRAININGS, ids=str)
def test_what_is_loaded_is_what_was_saved(
    tmp_path: Path, how: str, saving: tuple[int, str], loading: list[tuple[int, str]], optimizer: str
):
    """The optimizer is saved too, on any number of ranks. On as many as saved it, the training goes on bit for bit."""
    size, placement = saving
    saved = on_ranks(size, train, tmp_path, placement, optimizer, how)
    for other_size, other_placement in loading:
        for rank, (actual, losses) in enumerate(
            on_ranks(other_size, train, tmp_path, other_placement, optimizer, "load")
        ):
            expected, expected_losses = saved[min(rank, size - 1)]
            assert actual.keys() == expected.keys() and len(actual) > 10
            assert [name for name, value in actual.items() if not torch.equal(value, expected[name])] == []
            assert losses == expected_losses or other_size != size


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
from zinf_fx.optim import reserve_states

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
peaks = [peak()]
dcp.save(states, checkpoint_id=folder + "/saved", no_dist=True)
peaks.append(peak())
dcp.async_save(states, checkpoint_id=folder + "/later", no_dist=True, async_stager=Stager()).result()
peaks.append(peak())
dcp.load(states, checkpoint_id=folder + "/saved", no_dist=True)
print(*peaks, peak())
"""


@pytest.mark.slow
def test_peaks(tmp_path: Path):
    """The model has 384 MiB of states."""
    ended = run(PROGRAM, tmp_path)
    assert ended.returncode == 0, ended.stderr
    before, *peaks = map(int, ended.stdout.split())
    assert sum(path.stat().st_size for path in (tmp_path / "later").iterdir()) > 380 << 20
    assert all(peak - before <= 80 for peak in peaks), (before, peaks)


def save_and_change(rank: int, folder: Path, placement: str, staged: bool) -> None:
    """Save in the background, and change what is saved meanwhile."""
    group = dist.new_group() if dist.is_initialized() else None
    module = zinf_fx.offload(parameters(1), placement=placement, chunk=CHUNK)
    module["tied"] = module["rows"]
    states = {"module": module.state_dict(), "ordinary": torch.ones(3), "steps": 7}
    with nothing_gathered() if staged else nullcontext():
        stager = Stager() if staged else None
        saving = dcp.async_save(states, checkpoint_id=folder, async_stager=stager, process_group=group)
        for tensor in (states["ordinary"], *module.parameters()):
            with torch.no_grad():
                tensor.copy_(torch.zeros(tensor.shape))
        saving.result()
    plain = parameters(2)
    plain["tied"] = nn.Parameter(torch.zeros(SHAPES["rows"]))
    loaded = {"module": plain.state_dict(), "ordinary": torch.zeros(3), "steps": 0}
    dcp.load(loaded, checkpoint_id=folder)
    expected = parameters(1)
    assert_equal(plain, expected)
    assert torch.equal(plain["tied"], expected["rows"])
    assert loaded["steps"] == 7 and torch.equal(loaded["ordinary"], torch.ones(3))


@pytest.mark.parametrize(
    ("ranks", "placement", "staged"),
    [*((1, placement, True) for placement in ("nvme", "host", "device")), (2, "zero-3", False)],
)
def test_what_is_saved_in_the_background_is_what_there_was(tmp_path: Path, ranks: int, placement: str, staged: bool):
    """It is also where it is staged in the store."""
    on_ranks(ranks, save_and_change, tmp_path, placement, staged)


class TestStoredBox:
    @pytest.fixture
    def box(self, tmp_path: Path) -> StoredBox:
        """Return rows 1 to 3 of a matrix of 5 by 6, columns 2 to 5."""
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
