"""Training without a compiler equals plain PyTorch bitwise, and values are in memory one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from gate import slow
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.errors import StoredTensorError


class Transformer(nn.Module):
    """Computes from token to loss, with tied embeddings and a frozen layer."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].linear1.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def mlp(layers: int = 6) -> nn.Module:
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())))


def twins(build: Callable[[], nn.Module], store, placement: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = build()
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=store, placement=placement)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(step))


def check_equal(plain: nn.Module, stored: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), stored.parameters(), strict=True):
        assert q.equal(p), name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert isinstance(q.grad, StoredTensor) != q.stored.has_plain_gradient
            assert q.grad.equal(p.grad), name


@pytest.mark.parametrize(("micro_batches", "set_to_none"), [(1, True), (2, False), slow(1, False), slow(2, True)])
def test_training_is_bitwise_equal(tmp_path, tier: str, micro_batches: int, set_to_none: bool):
    plain, stored = twins(Transformer, tmp_path, tier)
    losses: list[list[torch.Tensor]] = []
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), zinf_fx.optim.AdamW(stored.parameters())
    for model, optimizer in zip((plain, stored), optimizers, strict=True):
        torch.manual_seed(5)  # dropout draws the same numbers
        losses.append([])
        for step in range(3):
            for micro in range(micro_batches):
                losses[-1].append(model(tokens(step * 2 + micro)))
                losses[-1][-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if step < 2:
                model.zero_grad(set_to_none)
    assert all(a.equal(b) for a, b in zip(*losses, strict=True))
    check_equal(plain, stored)


@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
def test_gradients_go_to_their_own_tier(tmp_path, gradients: str):
    _, stored = twins(mlp, tmp_path, {"parameters": "nvme", "gradients": gradients})
    stored(torch.randn(2, 8)).sum().backward()
    assert {p.grad.base.tier for p in stored.parameters()} == {gradients}


def test_a_step_holds_few_values_at_a_time(tmp_path, values_at_once: list[int]):
    _, stored = twins(lambda: mlp(12), tmp_path, "nvme")
    stored(torch.randn(2, 8)).sum().backward()
    assert len(values_at_once) >= 12 * 4 and max(values_at_once) <= 3


def saved_by_autograd(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    saved = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call().sum().backward()
    return saved


@pytest.mark.parametrize("autocast", [False, True])
def test_autograd_saves_no_values_of_parameters(tmp_path, autocast: bool):
    plain, stored = twins(mlp, tmp_path, "nvme")
    x = torch.randn(2, 8)

    def call(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x)

    of_plain, of_stored = saved_by_autograd(lambda: call(plain)), saved_by_autograd(lambda: call(stored))
    # In the plain model, what has no row per sample is a parameter, or a cast of one.
    kinds = [isinstance(t, StoredTensor) for t in of_stored]
    assert kinds == [t.shape[0] == 8 for t in of_plain] and sum(kinds) >= 6 + 5
    check_equal(plain, stored)


def test_autocast_without_gradients_writes_nothing(tmp_path):
    plain, stored = twins(mlp, tmp_path, "nvme")
    tiers = next(stored.parameters()).stored.tiers
    tiers.drain()
    before = tiers.store.counters().bytes_written, tiers.store.in_use
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert stored(torch.ones(2, 8)).equal(plain(torch.ones(2, 8)))
    tiers.drain()
    assert (tiers.store.counters().bytes_written, tiers.store.in_use) == before


def test_a_cast_under_autocast_cannot_be_written(tmp_path):
    _, stored = twins(mlp, tmp_path, "nvme")
    with torch.autocast("cpu", torch.bfloat16):
        cast = stored[0].weight.to(torch.bfloat16)
        with pytest.raises(zinf_fx.errors.StoredTensorError, match="converted under autocast"):
            cast.zero_()
        assert cast.equal(stored[0].weight.full_tensor().bfloat16())


CHANGES = {
    "whole": lambda weight: weight.mul_(2),
    "row": lambda weight: weight[0].zero_(),
    "optimizer": lambda weight: step_over(weight),
}


def step_over(weight: torch.Tensor) -> None:
    weight.grad = torch.ones(8, 8)
    optimizer = zinf_fx.optim.SGD if isinstance(weight, StoredTensor) else torch.optim.SGD
    optimizer([weight], lr=0.1).step()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_changes_between_forward_and_backward_is_noticed(tmp_path, tier: str, change: Callable):
    for model in twins(mlp, tmp_path, tier):
        loss = model(torch.ones(2, 8)).sum()
        with torch.no_grad():
            change(model[3].weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inference_mode(tmp_path, tier: str):
    plain, stored = twins(Transformer, tmp_path, tier)
    for model in (plain.eval(), stored.eval()):
        with torch.inference_mode():
            model.head.weight.mul_(2)
    with torch.inference_mode():
        assert stored(tokens(0)).equal(plain(tokens(0)))
    for model in (plain, stored):
        model(tokens(0)).backward()
    check_equal(plain, stored)


VIEWS = {
    "view": lambda weight: weight.view(4, -1),
    "chunk": lambda weight: weight.chunk(2)[1],
    "transposed": lambda weight: weight.t(),
    "row": lambda weight: weight[1],
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view of a view": lambda weight: weight.detach().view(-1)[2:5],
}


@pytest.mark.parametrize("how", VIEWS)
def test_views_in_inference_mode_are_as_those_of_any_tensor(tmp_path, tier: str, how):
    for model in twins(lambda: nn.Linear(8, 8), tmp_path, tier):
        with torch.inference_mode():
            seen = VIEWS[how](model.weight)
            assert not seen.is_inference()
        assert seen.sum() == VIEWS[how](model.weight).sum()


def test_gradients_of_gradients(tmp_path, tier: str):
    for model in (models := twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), tmp_path, tier)):
        loss = model(torch.ones(2, 8)).square().sum()
        (gradient,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
        gradient.square().sum().backward()
    check_equal(*models)


def test_a_penalty_on_the_gradients_in_grad(tmp_path, tier: str):
    """The gradients stay with their graphs, on the device, until they are cleared; later ones are added to them."""
    penalties = []
    for model in (models := twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), tmp_path, tier)):
        for _ in range(2):
            model(torch.ones(2, 8)).square().sum().backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in model.parameters())
        penalties.append(penalty.detach())
        model.zero_grad()
        (model(torch.zeros(2, 8)).sum() + penalty).backward()
    assert torch.equal(*penalties)
    check_equal(*models)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, zinf_fx.optim.AdamW])
def test_a_step_with_gradients_that_have_graphs(tmp_path, tier: str, kind: type[torch.optim.Optimizer]):
    for model in (models := twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), tmp_path, tier)):
        optimizer = (kind if model is models[1] else torch.optim.AdamW)(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            model(torch.ones(2, 8)).square().sum().backward(create_graph=True)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    check_equal(*models)


def test_gradients_with_graphs_are_refused_where_they_are_consumed(tmp_path, tier: str):
    _, model = twins(lambda: nn.Linear(8, 8), tmp_path, tier)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), step_in_backward=True)
    with pytest.raises(StoredTensorError, match=r"create_graph=True.*an optimizer steps in backward"):
        model(torch.ones(2, 8)).square().sum().backward(create_graph=True)
    assert not optimizer.state


def test_backward_twice_over_one_graph(tmp_path, tier: str):
    for model in (models := twins(mlp, tmp_path, tier)):
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    check_equal(*models)


def test_checkpointed_segments(tmp_path, tier: str):
    for model in (models := twins(mlp, tmp_path, tier)):
        checkpoint(model, torch.ones(2, 8), use_reentrant=False).square().sum().backward()
    check_equal(*models)


def test_a_parameter_thaws_and_its_gradient_is_stored(tmp_path, tier: str):
    for model in (models := twins(lambda: mlp().requires_grad_(False), tmp_path, tier)):
        assert not model(torch.ones(2, 8)).requires_grad
        model.requires_grad_(True)
        model(torch.ones(2, 8)).sum().backward()
    check_equal(*models)


def test_a_graph_from_before_the_offload_brings_its_gradients(tmp_path, tier: str):
    torch.manual_seed(0)
    plain = mlp()
    model = copy.deepcopy(plain)
    loss = model(torch.ones(2, 8)).square().sum()
    zinf_fx.offload(model, store=tmp_path, placement=tier)
    loss.backward()
    model(torch.ones(2, 8)).sum().backward()
    plain(torch.ones(2, 8)).square().sum().backward()
    plain(torch.ones(2, 8)).sum().backward()
    check_equal(plain, model)


# -- hooks -----------------------------------------------------------------------------------------------------------

BETWEEN = {
    "offload": lambda model, **fields: zinf_fx.offload(model, **fields),
    "offload and to(cpu)": lambda model, **fields: zinf_fx.offload(model, **fields).to("cpu"),
    "nothing": lambda model, **fields: model,
}


@pytest.mark.parametrize("before", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("after", BETWEEN.values(), ids=BETWEEN)
def test_hooks_run_with_the_gradient(tmp_path, before: Callable, after: Callable):
    """They run whether they were registered before the parameter was stored or after."""
    torch.manual_seed(0)
    models = mlp(2), mlp(2)
    models[1].load_state_dict(models[0].state_dict())
    seen: list[list[torch.Tensor]] = [[], []]
    for model, notes in zip(models, seen, strict=True):
        if model is models[1]:
            before(model, store=tmp_path, placement="nvme")
        weight = model[0].weight
        weight.register_hook(lambda gradient, notes=notes: (notes.append(gradient.clone()), gradient * 2)[1])
        removed = weight.register_hook(lambda gradient: gradient * 100)
        weight.register_post_accumulate_grad_hook(lambda p, notes=notes: notes.append(torch.clone(p.grad)))
        if model is models[1]:
            after(model, store=tmp_path, placement="nvme")
        removed.remove()
        for _ in range(2):
            model(torch.ones(2, 8)).square().sum().backward()
    assert len(seen[0]) == 4 and all(a.equal(b) for a, b in zip(*seen, strict=True))
    assert models[1][0].weight.grad.equal(models[0][0].weight.grad)


# -- modules that treat their parameters in their own way ------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "LSTM": (lambda: nn.LSTM(8, 5, num_layers=2), lambda m: m(torch.ones(3, 2, 8))[0]),
    "bidirectional GRU": (lambda: nn.GRU(8, 5, bidirectional=True), lambda m: m(torch.ones(3, 2, 8))[0]),
    "RNNCell": (lambda: nn.RNNCell(8, 5), lambda m: m(torch.ones(3, 8))),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True),
        lambda m: m(*[torch.linspace(0, 1, 48).view(2, 3, 8)] * 3)[0],
    ),
    "padding": (lambda: nn.Embedding(6, 8, padding_idx=1), lambda m: m(torch.tensor([0, 1, 1, 5]))),
    "Embedding renormalised": (lambda: nn.Embedding(6, 8, max_norm=0.5), lambda m: m(torch.tensor([0, 1, 1]))),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(6, 8), lambda m: m(torch.tensor([[0, 1], [1, 5]]))),
    "Conv2d": (lambda: nn.Conv2d(3, 8, 3, groups=1), lambda m: m(image())),
    "Conv2d channels last": (
        lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        lambda m: m(image().to(memory_format=torch.channels_last)),
    ),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 8, 3), lambda m: m(image()[:, :, 0])),
    "BatchNorm": (lambda: nn.BatchNorm2d(3), lambda m: m(image())),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), lambda m: m(torch.linspace(0, 1, 32).view(2, 8, 2))),
    "PReLU": (lambda: nn.PReLU(8), lambda m: m(torch.linspace(-1, 1, 16).view(2, 8))),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), lambda m: m(torch.ones(2, 8), torch.ones(2, 8))),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), lambda m: m(torch.ones(2, 8))),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), lambda m: m(torch.ones(2, 8))),
    "parametrize": (
        lambda: parametrize.register_parametrization(nn.Linear(8, 8), "weight", Symmetric()),
        lambda m: m(torch.ones(2, 8)),
    ),
    "ParameterDict": (
        lambda: nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)}),
        lambda m: m["a"] * m["b"],
    ),
}


def image() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("build", "call"), MODULES.values(), ids=MODULES)
def test_modules_train_and_infer_equally(tmp_path, build: Callable, call: Callable):
    plain, stored = twins(build, tmp_path, "nvme")
    results = []
    for model in (plain, stored):
        loss = call(model.train())
        loss.square().sum().backward()
        with torch.no_grad():
            results.append((loss, call(model.eval())))
            for p in model.parameters():
                p.sub_(p.grad)
            results[-1] += (call(model),)
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    check_equal(plain, stored)
    assert all(type(b) is torch.Tensor and b.equal(a) for a, b in zip(plain.buffers(), stored.buffers(), strict=True))


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    ],
    ids=["weight_norm", "parametrize"],
)
def test_a_stored_module_is_parametrized(tmp_path, wrap: Callable):
    plain, stored = twins(lambda: nn.Linear(8, 8), tmp_path, "nvme")
    for model in (plain, stored):
        wrap(model)(torch.ones(2, 8)).square().sum().backward()
    for p, q in zip(plain.parameters(), stored.parameters(), strict=True):
        assert q.equal(p) and q.grad.equal(p.grad)
