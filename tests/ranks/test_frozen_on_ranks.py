"""A quantised base that two ranks share: each has, and reads, its part of the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.launching import on_ranks
from safetensors.torch import save_file
from test_base import meta, saved
from test_frozen_formats import base_of, built, in_memory
from test_published import attached, loaded, published, written
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zinf_fx
from zinf_fx.errors import ZinfError
from zinf_fx.runtime.tensor.local_parameter import local_part


def share_published(rank: int, folder: Path) -> None:
    """Weights that are published as codes and scales have their values, in the store and from another one."""
    torch.manual_seed(rank)  # what is loaded is not what is there already
    values = torch.load(folder / "values.pt")
    for make in (attached, loaded):
        model = make(folder, placement="nvme")
        assert 2 * model.experts.stored.shard.held >= model.experts.stored.numel
        assert all(torch.equal(parameter.full_tensor(), values[name]) for name, parameter in model.named_parameters())


def own_published(rank: int, folder: Path) -> None:
    """Each rank has all of one of two published weights."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(192, 192, bias=False), nn.Linear(192, 192, bias=False)).to(torch.bfloat16)
    zinf_fx.attach_base(model, folder / "pair", partition="owner", tile=None)
    assert [parameter.stored.shard.shards.segments[0].owner for parameter in model.parameters()] == [0, 1]


def share_base(rank: int, base: Path, codes: Path) -> None:
    share_published(rank, codes)
    own_published(rank, codes)
    tensors = base_of(zinf_fx.offload(built(), placement="nvme", frozen_dtype="nf4")).values()
    held, whole = sum(tensor.stored.bytes.nbytes for tensor in tensors), sum(tensor.stored.numel for tensor in tensors)
    assert whole // 2 <= held <= whole // 2 + 4 * 4096
    model = zinf_fx.attach_base(meta(), base)
    with torch.no_grad():
        loss = torch.compile(model, backend="zinf")(torch.arange(16).view(2, 8))
        assert torch.equal(loss, in_memory(built(), model)(torch.arange(16).view(2, 8)))


def refused(rank: int, base: str) -> list[str]:
    """Return what is said of a base that the second rank doesn't have, that the ranks' mesh divides already, and of
    which one rank would have whole parameters."""
    said = []
    model = meta()
    divided = built().requires_grad_(False)
    whole = divided.head.weight.detach()
    shard = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    divided.head.weight = torch.nn.Parameter(shard, requires_grad=False)
    cases = [(model, base + "-not-here" * rank, {}), (divided, base, {}), (model, base, {"partition": "owner"})]
    for net, path, options in cases:
        try:
            zinf_fx.attach_base(net, path, placement="nvme", **options)
        except ZinfError as error:
            said.append(str(error))
        assert not any(isinstance(local_part(p), zinf_fx.StoredTensor) for p in net.parameters())
    return said


def test_a_base_that_one_rank_can_not_read_is_no_rank_s(tmp_path: Path):
    for missing, divided, owned in on_ranks(2, refused, str(saved(tmp_path, "nf4"))):
        assert "has no weights" in missing
        assert "'head.weight' of the model is a DTensor" in divided
        assert "partition='shards'" in owned


@pytest.mark.slow
def test_each_rank_has_its_part_of_the_bytes(tmp_path: Path):
    codes = tmp_path / "codes"
    codes.mkdir()
    torch.save(written(codes), codes / "values.pt")
    (codes / "pair").mkdir()
    weights = {f"{n}.weight": torch.randn(192, 192) for n in range(2)}
    files, _ = published(weights, dict.fromkeys(weights, "rows"))
    save_file(files, codes / "pair" / "model.safetensors")
    on_ranks(2, share_base, saved(tmp_path, "nf4"), codes)
