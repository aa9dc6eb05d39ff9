"""A stored tensor behaves as the tensor that it stands for, or refuses: every case runs on a plain twin too."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from injecting import Fault, inject
from safetensors.torch import load_file, save_file, storage_ptr
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.errors import StoredTensorError, StoreError
from zinf_fx.runtime.tensor.storage import TensorStorage

Make = Callable[..., nn.Parameter]


@pytest.fixture
def make(tier: str, tmp_path) -> Make:
    """Store a copy of a tensor, as a parameter, on one tier."""

    def stored(value: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        holder = nn.Module()
        holder.p = nn.Parameter(value.clone(), requires_grad=requires_grad)
        return zinf_fx.offload(holder, store=tmp_path, placement=tier).p

    return stored


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 6)), generator=torch.Generator().manual_seed(3))


def outcome(function: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> object:
    torch.manual_seed(0)
    with torch.no_grad():
        return function(tensor)


# -- writes ----------------------------------------------------------------------------------------------------------

WRITES = {
    "fill_": lambda p: p.fill_(3),
    "fill_ with a tensor": lambda p: p.fill_(torch.tensor(2.5)),
    "zero_": lambda p: p.zero_(),
    "mul_": lambda p: p.mul_(2),
    "add_ a scaled tensor": lambda p: p.add_(torch.ones(4, 6), alpha=0.1),
    "add_ a broadcast row": lambda p: p.add_(torch.arange(6.0)),
    "add_ itself": lambda p: p.add_(p),
    "addcdiv_": lambda p: p.addcdiv_(torch.ones(4, 6), torch.full((4, 6), 3.0)),
    "clamp_": lambda p: p.clamp_(-0.1, 0.5),
    "copy_": lambda p: p.copy_(torch.arange(24.0).view(4, 6)),
    "copy_ a row": lambda p: p.copy_(torch.arange(6.0)),
    "copy_ integers": lambda p: p.copy_(torch.arange(24).view(4, 6)),
    "copy_ half precision": lambda p: p.copy_(matrix().bfloat16()),
    "copy_ itself": lambda p: p.copy_(p),
    "copy_ its own data": lambda p: p.copy_(p.data),
    "copy_ its own transpose": lambda p: p[:, :4].copy_(p[:, :4].clone().t()),
    "in-place operator": lambda p: p.__imul__(3),
    "data normal_": lambda p: p.data.normal_(),
    "data uniform_": lambda p: p.data.uniform_(-1, 1),
    "data mul_": lambda p: p.data.mul_(2),
    "data row zero_": lambda p: p.data[2].zero_(),
    "detach add_": lambda p: p.detach().add_(1),
    "normal_": lambda p: p.normal_(),
    "normal_ from a generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(9)),
    "random_": lambda p: p.random_(0, 10),
    "bernoulli_": lambda p: p.bernoulli_(0.3),
    "exponential_": lambda p: p.exponential_(),
    "cauchy_": lambda p: p.cauchy_(),
    "row fill_": lambda p: p[0].fill_(7),
    "element fill_": lambda p: p[1, 2].fill_(7),
    "strided slice": lambda p: p[1:3, ::2].mul_(2),
    "t": lambda p: p.t()[1].add_(1),
    "T copy_": lambda p: p.T.copy_(torch.arange(24.0).view(6, 4)),
    "split": lambda p: p.split(3, dim=1)[1].zero_(),
    "chunk": lambda p: p.chunk(2)[1].fill_(7),
    "unbind": lambda p: p.unbind()[2].neg_(),
    "iteration": lambda p: [row.add_(1) for row in p][-1],
    "narrow": lambda p: p.narrow(0, 1, 2).zero_(),
    "view flat": lambda p: p.view(-1)[5:9].uniform_(),
    "flatten": lambda p: p.flatten().sub_(1),
    "diagonal": lambda p: p.diagonal().fill_(0),
    "expand": lambda p: p.unsqueeze(0).expand(1, 4, 6).add_(1),
    "unfold": lambda p: p.unfold(1, 2, 2).mul_(2),
    "movedim": lambda p: p.movedim(0, 1)[0].zero_(),
    "as_strided": lambda p: p.as_strided((2, 2), (1, 6), 3).fill_(3),
    "as_strided of a view": lambda p: p[1:].as_strided((2, 2), (1, 6), 3).fill_(3),
    "view as integers": lambda p: p.view(torch.int32).zero_(),
    "views of views": lambda p: p.view(2, 2, 6).transpose(0, 2)[1].select(0, 1).exp_(),
    "one row from another": lambda p: p[0].add_(p[1]),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([1, 3]), 2),
    "index_copy_": lambda p: p.index_copy_(0, torch.tensor([1]), torch.ones(1, 6)),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 6)),
    "index_put_": lambda p: p.index_put_((torch.tensor([1]),), torch.tensor(4.0)),
    "scatter_": lambda p: p.scatter_(0, torch.zeros(1, 6, dtype=torch.long), torch.ones(4, 6)),
    "masked_fill_": lambda p: p.masked_fill_(torch.eye(4, 6).bool(), 3),
    "masked_scatter_": lambda p: p.masked_scatter_(torch.eye(4, 6).bool(), torch.arange(4.0)),
    "item assignment": lambda p: p.__setitem__((slice(None), 1), 9),
    "item assignment by mask": lambda p: p.__setitem__(p > 0, 9),
    "item assignment by index": lambda p: p.__setitem__(torch.tensor([0, 2]), torch.ones(2, 6)),
    "tril_": lambda p: p.tril_(),
    "addmm_": lambda p: p.addmm_(torch.ones(4, 2), torch.ones(2, 6)),
    "out=": lambda p: torch.add(torch.ones(4, 6), 2, out=p),
    "out= of a product": lambda p: torch.mm(torch.ones(4, 4), torch.ones(4, 6), out=p),
    "out= among several": lambda p: torch.sort(torch.rand(4, 6), out=(p, torch.empty(4, 6, dtype=torch.long)))[0],
    "out= list": lambda p: torch.split_copy(torch.ones(4, 6), 4, out=[p]),
    "out= view": lambda p: torch.add(torch.ones(6), 2, out=p[1]),
    "data assignment": lambda p: setattr(p, "data", torch.arange(24.0).view(4, 6)),
    "data assignment of itself": lambda p: setattr(p, "data", p.data.contiguous()),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.arange(24.0), [p]),
    "foreach add": lambda p: torch._foreach_add_([p], 1.5),
    "foreach mul by a tensor": lambda p: torch._foreach_mul_([p], torch.tensor(2.0)),
    "foreach mul by tensors": lambda p: torch._foreach_mul_([p, torch.ones(2)], [matrix(), torch.ones(2)]),
    "foreach addcmul, scalar list": lambda p: torch._foreach_addcmul_([p], [matrix()], [matrix()], [3.0]),
    "foreach addcmul, scalar tensor": lambda p: torch._foreach_addcmul_(
        [p, torch.ones(2)], [matrix(), torch.ones(2)], [matrix(), torch.ones(2)], torch.tensor([3.0, 4.0])
    ),
    "foreach copy": lambda p: torch._foreach_copy_([p], [matrix().double()]),
    "foreach lerp": lambda p: torch._foreach_lerp_([p], [torch.ones(4, 6)], 0.25),
    "foreach zero": lambda p: torch._foreach_zero_([p]),
    "foreach of views": lambda p: torch._foreach_add_(list(p.unbind()), 1.5),
    "unscale": lambda p: torch._amp_foreach_non_finite_check_and_unscale_([p], torch.zeros(1), torch.tensor(0.5)),
    "clip_grad_value_": lambda p: (setattr(p, "grad", p.detach()), nn.utils.clip_grad_value_([p], 0.1))[1],
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_reach_the_store(make: Make, write: Callable):
    plain, stored = nn.Parameter(matrix()), make(matrix())
    expected, result = outcome(write, plain), outcome(write, stored)
    assert stored.full_tensor().equal(plain)
    assert (result is stored) == (expected is plain)
    if isinstance(expected, torch.Tensor):
        assert isinstance(result, StoredTensor) and result.full_tensor().equal(expected)


INITS = {
    "uniform_": ((4, 6), lambda p: nn.init.uniform_(p, -2, 2)),
    "normal_": ((40, 60), nn.init.normal_),
    "trunc_normal_": ((4, 6), nn.init.trunc_normal_),
    "constant_": ((4, 6), lambda p: nn.init.constant_(p, 2)),
    "ones_": ((4, 6), nn.init.ones_),
    "zeros_": ((4, 6), nn.init.zeros_),
    "eye_": ((4, 6), nn.init.eye_),
    "dirac_": ((4, 2, 3), nn.init.dirac_),
    "xavier_uniform_": ((4, 6), nn.init.xavier_uniform_),
    "xavier_normal_": ((4, 6), nn.init.xavier_normal_),
    "kaiming_uniform_": ((4, 2, 3, 3), nn.init.kaiming_uniform_),
    "kaiming_normal_": ((4, 6), nn.init.kaiming_normal_),
    "orthogonal_": ((4, 6), nn.init.orthogonal_),
    "sparse_": ((4, 6), lambda p: nn.init.sparse_(p, 0.3)),
}


@pytest.mark.parametrize(("shape", "init"), INITS.values(), ids=INITS)
def test_initialisation_draws_the_same_numbers(make: Make, shape: tuple[int, ...], init: Callable):
    plain, stored = nn.Parameter(torch.empty(shape)), make(torch.empty(shape))
    outcome(init, plain)
    after = torch.rand(3)
    outcome(init, stored)
    assert stored.full_tensor().equal(plain)
    assert torch.rand(3).equal(after), "the generator is in another state"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5, 7), (129, 65)], ids=str)
def test_any_shape_and_dtype(make: Make, shape: tuple[int, ...], dtype: torch.dtype):
    value = matrix(*shape).mul(3).to(dtype) if shape else matrix(1)[0].mul(3).to(dtype)
    stored = make(value, requires_grad=False)
    assert stored.full_tensor().equal(value) and stored.full_tensor().shape == stored.shape == value.shape
    stored.copy_(torch.zeros_like(stored))
    assert not stored.full_tensor().any()


REFUSED = {
    "t_": lambda p: p.t_(),
    "transpose_": lambda p: p.transpose_(0, 1),
    "unsqueeze_": lambda p: p.unsqueeze_(0),
    "squeeze_": lambda p: p.squeeze_(),
    "as_strided_": lambda p: p.as_strided_((2, 2), (1, 1)),
    "resize_": lambda p: p.resize_(2, 2),
    "resize_as_": lambda p: p.resize_as_(torch.ones(2, 2)),
    "set_": lambda p: p.set_(torch.ones(2, 2)),
    "set_ to nothing": lambda p: p.set_(),
    "out= of another shape": lambda p: torch.add(torch.ones(2, 2), 2, out=p),
    "out= view of another shape": lambda p: torch.add(torch.ones(2, 2), 2, out=p[1:]),
    "data of another shape, of a view": lambda p: setattr(p[1:], "data", torch.ones(2, 2)),
    "data on another device": lambda p: setattr(p, "data", torch.ones(2, 2, device="meta")),
    "apply_": lambda p: p.apply_(lambda x: x + 1),
    "share_memory_": lambda p: p.share_memory_(),
    "DLPack": lambda p: torch.from_dlpack(p),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_raises_and_changes_nothing(make: Make, change: Callable):
    stored = make(matrix(), requires_grad=False)
    with pytest.raises(StoredTensorError, match=r"stored tensor of shape \(|share its bytes"):
        outcome(change, stored)
    assert stored.full_tensor().equal(matrix()) and stored.shape == (4, 6) and stored.stride() == (6, 1)


@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.detach(), lambda p: p[1:]], ids=["whole", "detached", "view"])
def test_a_capsule_of_dlpack_with_a_null_address_is_refused(make: Make, of: Callable):
    stored = make(matrix(), requires_grad=False)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(of(stored))
    assert stored.full_tensor().equal(matrix())


def test_an_operation_that_fails_changes_nothing(make: Make):
    stored = make(matrix())
    for wrong in (lambda p: p.copy_(torch.ones(5)), lambda p: p.add_(torch.ones(5)), lambda p: p[0].copy_(p)):
        with pytest.raises(RuntimeError):
            outcome(wrong, stored)
    assert stored.full_tensor().equal(matrix())


def test_lists_pass_through_memory_one_tensor_at_a_time(tmp_path, values_at_once: list[int]):
    model = zinf_fx.offload(nn.ParameterList(matrix() for _ in range(6)), store=tmp_path, placement="nvme")
    tensors = list(model)
    with torch.no_grad():
        torch._foreach_add_(tensors, 2.0)
        norms = torch._foreach_norm(tensors)
        torch._foreach_neg_(tensors)
    assert len(values_at_once) == 18 and max(values_at_once) <= 2
    assert all(norm.equal(matrix().add(2).norm()) for norm in norms)
    assert all(t.full_tensor().equal(matrix().add(2).neg()) for t in tensors)


@pytest.mark.parametrize("norm", [2.0, 1.0, torch.inf])
def test_clipping_gradients_is_bitwise_equal_and_gathers_one_at_a_time(tmp_path, values_at_once, norm: float):
    plain = [nn.Parameter(matrix(i + 1, 50)) for i in range(6)]
    stored = list(zinf_fx.offload(nn.ParameterList(copy.deepcopy(plain)), store=tmp_path, placement="nvme"))
    for parameters in (plain, stored):
        sum((p * p).sum() * i for i, p in enumerate(parameters)).backward()
    del values_at_once[:]
    totals = [nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=norm) for parameters in (plain, stored)]
    assert totals[0].equal(totals[1]) and totals[0] > 0.1
    assert max(values_at_once) <= 2
    assert all(isinstance(p.grad, StoredTensor) and p.grad.equal(q.grad) for p, q in zip(stored, plain, strict=True))
    assert torch.linalg.vector_norm(stored[2].grad).equal(torch.linalg.vector_norm(plain[2].grad))


# -- state dicts, copies, files, conversions -------------------------------------------------------------------------


class Tied(nn.Module):
    """Has tied weights, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=1)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.hidden.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.norm(self.embedding(tokens)))).square().mean()


TOKENS = torch.tensor([0, 1, 2, 2, 5])


@pytest.fixture
def models(make_model) -> tuple[Tied, Tied]:
    torch.manual_seed(1)
    plain = Tied()
    return plain, make_model(copy.deepcopy(plain))


@pytest.fixture
def make_model(tier: str, tmp_path) -> Callable[[nn.Module], nn.Module]:
    return lambda model: zinf_fx.offload(model, store=tmp_path, placement=tier)


def check_same(plain: nn.Module, stored: nn.Module) -> None:
    """Same names, values, dtypes, gradients and flags; every parameter of `stored` is stored."""
    pairs = list(zip(plain.named_parameters(), stored.named_parameters(), strict=True))
    for (name, p), (other, q) in pairs:
        assert name == other and isinstance(q, StoredTensor) and isinstance(q, nn.Parameter)
        assert q.requires_grad == p.requires_grad and q.dtype == p.dtype and q.equal(p), name
        assert (q.grad is None) == (p.grad is None)
        if p.grad is not None:
            assert isinstance(q.grad, StoredTensor) != q.stored.has_plain_gradient
            assert q.grad.dtype == p.grad.dtype and q.grad.equal(p.grad), name
    for (name, p), (_, q) in zip(plain.named_buffers(), stored.named_buffers(), strict=True):
        assert type(q) is torch.Tensor and q.equal(p), name


@pytest.mark.parametrize("source", ["plain", "stored", "half precision", "itself"])
def test_load_state_dict(models, make_model, source: str):
    _, stored = models
    torch.manual_seed(2)
    other = Tied()
    if source == "stored":
        make_model(other)
    state = stored.state_dict() if source == "itself" else other.state_dict()
    if source == "half precision":
        state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    expected = {name: torch.clone(value) for name, value in state.items()}
    assert not stored.load_state_dict(state).missing_keys
    assert all(stored.get_parameter(n).equal(expected[n].float()) for n, _ in stored.named_parameters())
    with pytest.raises(RuntimeError, match="Missing key"):
        stored.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch"):
        stored.load_state_dict({**state, "hidden.bias": torch.ones(3)})


def test_state_dict_shows_the_present_values(models):
    plain, stored = models
    state = stored.state_dict()
    assert state.keys() == plain.state_dict().keys() and not any(v.requires_grad for v in state.values())
    with torch.no_grad():
        stored.hidden.bias.fill_(5)
    assert state["hidden.bias"].eq(5).all()


def test_deepcopy_is_independent(models):
    plain, stored = models
    for model in models:
        model(TOKENS).backward()
    twin = copy.deepcopy(stored)
    check_same(plain, twin)
    assert twin.head.weight is twin.embedding.weight and twin.head.weight is not stored.head.weight
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.weight.grad.zero_()
    check_same(plain, stored)
    with pytest.raises(StoredTensorError, match="only leaves"):
        copy.deepcopy(stored.hidden.bias[:2])


def test_files_hold_ordinary_tensors(models):
    plain, stored = models
    file = io.BytesIO()
    torch.save(stored.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(value) is torch.Tensor and value.equal(plain.state_dict()[n]) for n, value in loaded.items())
    plain.load_state_dict(loaded)

    file = io.BytesIO()
    torch.save(stored, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert all(type(p) is nn.Parameter for p in model.parameters()) and model.head.weight is model.embedding.weight
    assert not model.hidden.weight.requires_grad and model(TOKENS).equal(plain(TOKENS))

    parameter = pickle.loads(pickle.dumps(stored.hidden.weight))
    assert type(parameter) is nn.Parameter and parameter.equal(plain.hidden.weight) and not parameter.requires_grad


CONVERSIONS = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "double and back": lambda m: m.double().float(),
    "to(cpu)": lambda m: m.to("cpu"),
    "to(cpu, float64)": lambda m: m.to("cpu", torch.float64),
    "to(channels_last)": lambda m: m.to(memory_format=torch.channels_last),
    "float": lambda m: m.float(),
    "requires_grad_(False)": lambda m: m.requires_grad_(False),
    "requires_grad_(True)": lambda m: m.requires_grad_(True),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_module_conversions_keep_parameters_stored(models, convert: Callable):
    objects = list(models[1].parameters())
    for model in models:
        model(TOKENS).backward()
        convert(model)
    plain, stored = models
    check_same(plain, stored)
    assert all(a is b for a, b in zip(objects, stored.parameters(), strict=True))
    assert stored.head.weight is stored.embedding.weight
    if plain.head.weight.requires_grad:
        for model in models:
            model(TOKENS).backward()
        check_same(plain, stored)


def test_to_empty_keeps_the_parameter_stored(make: Make):
    holder = nn.Module()
    holder.p = make(matrix())
    holder.to_empty(device="cpu")
    assert isinstance(holder.p, StoredTensor) and holder.p.shape == (4, 6)


def test_a_device_that_tiles_cannot_reach_is_refused(models):
    plain, stored = models
    with pytest.raises(StoredTensorError, match="device 'lazy'"):
        stored.to("lazy")
    check_same(plain, stored)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_metadata_is_known_without_reading(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model = nn.Module()
    model.p = nn.Parameter(matrix())
    stored = zinf_fx.offload(model, store=tmp_path, placement="nvme").p

    def refuse(storage: TensorStorage) -> None:
        raise AssertionError("a value was read")

    monkeypatch.setattr(TensorStorage, "value", refuse)
    monkeypatch.setattr(TensorStorage, "settled", refuse)
    assert (stored.shape, stored.dtype, stored.numel(), len(stored)) == ((4, 6), torch.float32, 24, 4)
    assert (stored.stride(), stored.t().stride(), stored[1:].storage_offset()) == ((6, 1), (1, 6), 6)
    assert stored.is_contiguous() and not stored.t().is_contiguous() and stored.is_leaf and stored.requires_grad
    assert repr(stored) == "StoredParameter(shape=(4, 6), dtype=torch.float32, device='cpu', tier='nvme')"
    assert repr(stored.detach()[0]) == "StoredTensor(shape=(6,), dtype=torch.float32, device='cpu', tier='nvme')"
    assert "StoredParameter" in f"{stored}"
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == ["p"]
    for like in (torch.ones_like, torch.rand_like, lambda t: torch.zeros_like(t[1]), lambda t: t.new_zeros(3)):
        assert type(like(stored)) is torch.Tensor
    assert type(torch.zeros_like(stored, dtype=torch.int8)) is torch.Tensor
    for copied in (stored.to("meta"), stored.detach()[1:].to("meta", torch.float64), nn.Parameter(stored.to("meta"))):
        assert copied.is_meta and type(copied) is not StoredTensor
    assert stored.detach()[1:].to("meta").shape == (3, 6)


LIKES = {
    "new_zeros": lambda p: p.new_zeros(3),
    "new_empty": lambda p: p.new_empty(0),
    "another dtype": lambda p: torch.zeros_like(p, dtype=torch.int8),
    "another device": lambda p: torch.empty_like(p, device="meta"),
    "its own layout": lambda p: torch.rand_like(p.t()),
}


@pytest.mark.parametrize("like", LIKES.values(), ids=LIKES)
def test_what_is_made_like_a_stored_tensor_takes_no_memory_besides(make: Make, like: Callable):
    stored = make(matrix(128, 128), requires_grad=False)
    like(stored)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        made = like(stored)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in seen.events())
    assert allocated <= (made.nbytes if made.device.type == "cpu" else 0) + 1024


READS = {
    "equal": lambda p: torch.equal(p, p) and not torch.equal(p, p + 1),
    "allclose": lambda p: torch.allclose(p, p.detach()),
    "item": lambda p: p[1, 2].item(),
    "tolist": lambda p: (p.tolist(), p[1, 2].tolist()),
    "format": lambda p: f"{p[1, 2]:.3f} {p.detach()[1, 2]}",
    "numpy": lambda p: p.detach().t().cpu().numpy().tolist(),
    "numpy's own functions": lambda p: np.asarray(p.detach(), dtype=np.float64).tolist(),
    "numpy by force": lambda p: p.numpy(force=True).tolist(),
    "sum": lambda p: p.sum(),
    "operators": lambda p: (p * 2 - p.t().t()) / 3 > 0,
    "matmul": lambda p: p @ p.t(),
    "batched matmul": lambda p: torch.ones(2, 3, 4) @ p,
    "reshape": lambda p: p.t().reshape(-1),
    "to": lambda p: p.to(torch.float64),
    "type": lambda p: p.double(),
    "clone": lambda p: p.clone(),
    "cat": lambda p: torch.cat([p, p[:1], torch.ones(1, 6)]),
    "where": lambda p: torch.where(p > 0, p, 0.0),
    "indexing": lambda p: p[torch.tensor([2, 0]), 1:],
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "softmax": lambda p: p.softmax(-1),
    "topk": lambda p: p.topk(2)[1],
    "likes": lambda p: torch.rand_like(p) + torch.zeros_like(p.t()).t() + torch.full_like(p, 2) + p.new_ones(6),
    "random in a view's layout": lambda p: torch.rand_like(p.t()),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p, p]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_agree_with_the_plain_tensor(make: Make, read: Callable):
    expected, result = outcome(read, nn.Parameter(matrix())), outcome(read, make(matrix()))
    if isinstance(expected, torch.Tensor):
        assert result.dtype == expected.dtype and torch.equal(result, expected)
    else:
        assert result == expected


def test_numpy_refuses_what_requires_a_gradient(make: Make):
    for tensor in (make(matrix()), make(matrix()) * 2):
        with pytest.raises(RuntimeError, match=r"Use tensor\.detach\(\)\.numpy\(\)"):
            tensor.numpy()


@pytest.mark.parametrize("of", [lambda p: p, lambda p: p[1:3], lambda p: p.t()], ids=["whole", "rows", "transpose"])
def test_full_tensor_belongs_to_the_caller(make: Make, of: Callable):
    stored = make(matrix())
    for value in (of(stored).full_tensor(), of(stored).to_local()):
        assert type(value) is torch.Tensor and not value.requires_grad and value.equal(of(matrix()))
        value.zero_()
    assert stored.full_tensor().equal(matrix())


def test_gathered_writes_back_only_on_request_and_success(make: Make):
    stored, plain = make(matrix()), torch.ones(3)
    with zinf_fx.gathered(stored) as value:
        value.zero_()
    assert stored.full_tensor().equal(matrix())
    with pytest.raises(ZeroDivisionError), zinf_fx.gathered(stored, modify=True) as value:
        value.zero_()
        raise ZeroDivisionError
    assert stored.full_tensor().equal(matrix())
    with zinf_fx.gathered([stored, plain], modify=True) as (value, same):
        assert same is plain and type(value) is torch.Tensor
        value.mul_(2)
        same.mul_(2)
    assert stored.full_tensor().equal(matrix() * 2) and plain.eq(2).all()


def test_gathered_takes_a_module(models):
    plain, stored = models
    with zinf_fx.gathered(stored, modify=True) as values:
        assert len(values) == len(list(stored.parameters()))
        for value in values:
            value.add_(1)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1)
    check_same(plain, stored)


def test_memory_for_readers_from_outside(make: Make, tmp_path):
    model = nn.ParameterDict({"a": make(matrix()), "b": make(matrix() + 1)})
    model["tied"] = model["a"]
    states = model.state_dict()
    (a, b, tied), view = (states[name] for name in ("a", "b", "tied")), model["a"].detach()[1:]
    assert storage_ptr(a) == storage_ptr(tied) == storage_ptr(view) != storage_ptr(b)
    assert a.data_ptr() == tied.data_ptr() != b.data_ptr()
    assert view.data_ptr() == a.data_ptr() + a.stride(0) * a.itemsize
    assert make(torch.empty(0)).data_ptr() == 0
    with torch.no_grad():
        model["a"].add_(1)  # what was in memory is out of date
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(states, tmp_path / "model.safetensors")
    del states["tied"]
    save_file(states, tmp_path / "model.safetensors")
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, states[name].full_tensor())


def test_an_asynchronous_checkpoint_has_what_it_was_asked_to_save(make: Make, tmp_path):
    model = nn.ParameterDict({"a": make(matrix()), "b": make(matrix() + 1), "empty": make(torch.empty(0))})
    model["tied"] = model["a"]
    wanted = {name: value.full_tensor() for name, value in model.items()}
    states = {"model": model.state_dict(), "view": model["a"].detach()[1:]}
    saving = dcp.async_save(states, checkpoint_id=tmp_path)
    with torch.no_grad():
        model["a"].zero_()
    saving.result()
    dcp.load(states, checkpoint_id=tmp_path)
    assert torch.equal(states["view"].full_tensor(), wanted["a"][1:])
    for name, value in wanted.items():
        assert torch.equal(model[name].full_tensor(), value)


def test_an_interrupt_while_a_value_is_read_harms_no_memory(tmp_path):
    module = nn.ParameterList([nn.Parameter(torch.full((1 << 14,), 3.0))])
    zinf_fx.offload(module, store=tmp_path, placement="nvme")
    storage = module[0].stored
    storage.bytes.flush()
    storage.tiers.drain()
    store = storage.tiers.store
    for read in (module[0].full_tensor, lambda: storage.settled().window().close()):
        inject(store, Fault("completion", operation="read", delay=0.5))
        threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            read()
        others = [torch.full((1 << 14,), 7.0) for _ in range(50)]  # in the memory of the reader, if it was freed
        time.sleep(0.6)
        assert all((other == 7).all() for other in others)
    assert module[0].full_tensor().eq(3).all()
    assert storage.tiers.host.in_use == 0


def test_a_forked_child_is_refused_on_every_tier(make: Make):
    stored = make(matrix())
    pid = os.fork()
    if pid == 0:
        try:
            stored.full_tensor()
        except StoreError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_gathered_gives_one_value_for_a_tensor_that_comes_twice(make: Make):
    stored = make(matrix())
    with zinf_fx.gathered([stored, stored], modify=True) as (value, other):
        assert value is other
        value.fill_(5)
    assert stored.full_tensor().eq(5).all()
    with (
        pytest.raises(StoredTensorError, match="several views"),
        zinf_fx.gathered([stored, stored.data.t()], modify=True),
    ):
        pass
    with zinf_fx.gathered([stored, stored.data.t()]) as (whole, view):
        assert torch.equal(whole.t(), view)
