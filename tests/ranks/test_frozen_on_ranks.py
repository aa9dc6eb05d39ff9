"""A quantised base that two ranks share: each has, and reads, its part of the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.launching import on_ranks
from safetensors.torch import save_file
from test_base import meta, saved
from test_frozen_formats import Model, base_of, built, in_memory
from test_published import attached, loaded, published, written
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zinf_fx
from zinf_fx.errors import ZinfError
from zinf_fx.runtime.tensor.local_parameter import local_part


def trained(rank: int, run: Any, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Losses of ten steps over this rank's batches, and what was trained then."""
    generator = torch.Generator().manual_seed(10 + rank)
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.05, fused=True), []
    for _ in range(10):
        loss = run(torch.randint(16, (4, 8), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    stored = (p.full_tensor() if isinstance(p, zinf_fx.StoredTensor) else p.detach() for p in parameters)
    return [*losses, *stored]


def of_published(rank: int, directory: str) -> bool:
    """Whether weights that are published as codes and scales have their values, in the store and from another one."""
    torch.manual_seed(rank)  # what is loaded is not what is there already
    values = torch.load(directory + "/values.pt")
    models = [make(Path(directory), placement="nvme") for make in (attached, loaded)]
    halves = all(2 * one.experts.stored.shard.held >= one.experts.stored.numel for one in models)
    same = (
        torch.equal(parameter.full_tensor(), values[name])
        for one in models
        for name, parameter in one.named_parameters()
    )
    return halves and all(same)


def owners_of(rank: int, directory: str) -> list[int]:
    """The rank that has all of each of two published weights."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(192, 192, bias=False), nn.Linear(192, 192, bias=False)).to(torch.bfloat16)
    zinf_fx.attach_base(model, directory + "/pair", partition="owner", tile=None)
    return [parameter.stored.shard.shards.segments[0].owner for parameter in model.parameters()]


def equals_ddp(rank: int, name: str | None, activations: str) -> bool:
    """Whether training over a base in this format has the bits of DistributedDataParallel over the same values."""
    model = zinf_fx.offload(built(), placement="nvme", frozen_dtype=name)
    plain = in_memory(built(), model)
    mine, theirs = ([p for p in one.parameters() if p.requires_grad] for one in (model, plain))
    ours = trained(rank, torch.compile(model, backend="zinf", options={"activations": activations}), mine)
    expected = trained(rank, torch.compile(DistributedDataParallel(plain), backend="aot_eager"), theirs)
    torch._dynamo.reset()
    return all(map(torch.equal, ours, expected))


def compared(rank: int, base: str, codes: str) -> dict[str, Any]:
    found: dict[str, Any] = {"published": of_published(rank, codes), "owners": owners_of(rank, codes)}
    cases = (("nf4", "recompute"), ("int8", "keep"), (None, "keep"))
    found["equal"] = [equals_ddp(rank, *case) for case in cases]
    model = zinf_fx.offload(built(), placement="nvme", frozen_dtype="nf4")
    held = sum(tensor.stored.bytes.nbytes for tensor in base_of(model).values())
    whole = sum(tensor.stored.numel for tensor in base_of(model).values())
    found["held"] = held, whole
    attached = zinf_fx.attach_base(meta(), base)
    with torch.no_grad():
        loss = torch.compile(attached, backend="zinf")(torch.arange(16).view(2, 8))
        found["attached"] = bool(torch.equal(loss, in_memory(built(), attached)(torch.arange(16).view(2, 8))))
    return found


def saved_by_ranks(rank: int, directory: str) -> None:
    model = zinf_fx.offload(built(), placement="nvme", frozen_dtype="nf4")
    zinf_fx.save_checkpoint(directory + "/checkpoint", model)
    zinf_fx.export_safetensors(model, directory + "/weights")


def loaded_by_ranks(rank: int, directory: str) -> list[list[float]]:
    """The bytes of what a checkpoint has, and then the values of what is exported."""
    torch.manual_seed(1)
    model = zinf_fx.offload(Model(), placement="nvme", frozen_dtype="nf4")
    zinf_fx.load_checkpoint(directory + "/checkpoint", model)
    found = [parameter.stored.value().tolist() for parameter in base_of(model).values()]
    zinf_fx.load_safetensors(model, directory + "/weights")
    return [*found, *(parameter.full_tensor().flatten().tolist() for parameter in base_of(model).values())]


def test_checkpoints_of_ranks_have_the_bytes(tmp_path: Path):
    """One rank loads what two saved, and two what one saved; weights are exported as values."""
    (tmp_path / "store").mkdir()
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir(), one.mkdir()
    on_ranks(2, saved_by_ranks, str(two))
    expected = base_of(zinf_fx.offload(built(), store=tmp_path / "store", placement="nvme", frozen_dtype="nf4"))
    torch.manual_seed(1)
    model = zinf_fx.offload(Model(), store=tmp_path / "store", placement="nvme", frozen_dtype="nf4")
    zinf_fx.load_checkpoint(two / "checkpoint", model)
    for mine, theirs in zip(base_of(model).values(), expected.values(), strict=True):
        assert torch.equal(mine.stored.value(), theirs.stored.value())
    zinf_fx.save_checkpoint(one / "checkpoint", model)
    plain = Model()
    zinf_fx.load_safetensors(plain, two / "weights")
    for name, mine in expected.items():
        assert torch.equal(plain.get_parameter(name), mine.full_tensor())
    zinf_fx.export_safetensors(model, one / "weights")
    values = [t.stored.value() for t in expected.values()] + [t.full_tensor().flatten() for t in expected.values()]
    for found in on_ranks(2, loaded_by_ranks, str(one)):
        assert found == [value.tolist() for value in values]


def refused(rank: int, base: str) -> list[str]:
    """What is said of a base that the second rank doesn't have, that the ranks' mesh divides already, and of which one
    rank would have whole parameters."""
    said = []
    model = meta()
    divided = built().requires_grad_(False)
    whole = divided.head.weight.detach()
    shard = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    divided.head.weight = torch.nn.Parameter(shard, requires_grad=False)
    cases = [(model, base + "-not-here" * rank, {}), (divided, base, {}), (model, base, {"partition": "owner"})]
    for one, path, options in cases:
        try:
            zinf_fx.attach_base(one, path, placement="nvme", **options)
        except ZinfError as error:
            said.append(str(error))
        assert not any(isinstance(local_part(p), zinf_fx.StoredTensor) for p in one.parameters())
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
    for found in on_ranks(2, compared, str(saved(tmp_path, "nf4")), str(codes)):
        held, whole = found["held"]
        assert whole // 2 <= held <= whole // 2 + 4 * 4096
        assert found["equal"] == [True] * 3
        assert found["attached"] and found["published"]
        assert found["owners"] == [0, 1]
