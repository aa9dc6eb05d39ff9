"""Small models, each with one thing that a pass could get wrong, and inputs for them. All return a scalar."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from passes.capturing import Record, assert_trains_like_eager
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Case = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
CASES: dict[str, Case] = {}


def case(build: Case) -> Case:
    """Register a builder of (model, inputs) under its name."""
    CASES[build.__name__] = build
    return build


def case_since(version: str) -> Callable[[Case], Case]:
    """Define a case as `case`, for what PyTorch can capture with tensor subclasses from that version on."""
    return case if TorchVersion(torch.__version__) >= version else lambda build: build


class Expression(nn.Module):
    """Makes a model from parameters and a function of (model, *inputs)."""

    def __init__(self, function: Callable[..., Tensor], **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if isinstance(member, Tensor) else member)
        self.function = function

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


class Block(nn.Module):
    """Is a pre-norm residual MLP."""

    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (F.dropout(y, self.dropout) if self.dropout else y)


@case
def mlp() -> tuple[nn.Module, tuple]:
    return Expression(lambda m, x: m.layers(x).sum(), layers=nn.Sequential(Block(), Block(), Block())), (rows(),)


@case
def no_stored_parameter() -> tuple[nn.Module, tuple]:
    return Expression(lambda m, x: (x * 2).sum()), (rows().requires_grad_(),)


@case
def tied_far_apart() -> tuple[nn.Module, tuple]:
    def forward(m: Any, tokens: Tensor) -> Tensor:
        x = m.layers(F.embedding(tokens, m.table))
        return F.cross_entropy(F.linear(x, m.table), tokens)

    table = torch.randn(9, 4)
    return Expression(forward, table=table, layers=nn.Sequential(Block(), Block(), Block())), (torch.arange(6) % 9,)


@case
def split_and_unbind_of_a_weight() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k = m.qk.split(4)
        a, b, c = m.stack.unbind()
        return ((x @ q @ a) * (x @ k @ b) + x.relu() @ c).sum()

    return Expression(forward, qk=torch.randn(8, 4), stack=torch.randn(3, 4, 4)), (rows(),)


@case
def chunk_far_apart() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        first, second = m.both.chunk(2)
        return (torch.relu(m.between(torch.relu(x @ first))) @ second).sum()

    return Expression(forward, both=torch.randn(8, 4), between=nn.Linear(4, 4)), (rows(),)


@case
def views_of_views() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w.view(4, 2, 2).transpose(0, 1).flatten(1)[:, 1].unsqueeze(0).expand(3, 2)
        return (w * torch.relu(m.layer(x))).sum()

    return Expression(forward, w=torch.randn(4, 4), layer=nn.Linear(4, 2)), (rows(),)


@case
def weights_fetched_at_the_top() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        weights = [layer.weight.t() for layer in m.layers]
        for weight in weights:
            x = torch.relu(x @ weight)
        return x.sum()

    return Expression(forward, layers=nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))), (rows(),)


@case
def concatenated_weights() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        fused = torch.cat([m.q.weight, m.k.weight])
        return torch.relu(F.linear(m.first(x), fused)).sum() * torch.stack([m.q.bias, m.k.bias]).sum()

    return Expression(forward, first=nn.Linear(4, 4), q=nn.Linear(4, 4), k=nn.Linear(4, 4)), (rows(),)


@case
def recurrent_weight() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(m.cell(x))
        return x.sum()

    return Expression(forward, cell=nn.Linear(4, 4)), (rows(),)


@case
def frozen() -> tuple[nn.Module, tuple]:
    model, inputs = mlp()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    return model, inputs


@case
def all_frozen_but_the_input() -> tuple[nn.Module, tuple]:
    model, (x,) = mlp()
    return model.requires_grad_(False), (x.requires_grad_(),)


@case
def one_gradient_for_two() -> tuple[nn.Module, tuple]:
    # The gradient of a sum is the tangent itself, for both.
    return Expression(lambda m, x: ((m.a + m.b) * x).sum(), a=torch.randn(3, 4), b=torch.randn(3, 4)), (rows(),)


@case
def gradient_is_the_tangent() -> tuple[nn.Module, tuple]:
    return Expression(lambda m, x: m.a + m.b + x.sum(), a=torch.randn(()), b=torch.randn(())), (rows(),)


@case
def gradient_is_a_view_of_another() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return ((m.a + m.b.view(3, 4)) * x).sum()

    return Expression(forward, a=torch.randn(3, 4), b=torch.randn(12)), (rows(),)


class _Swap(torch.autograd.Function):
    """Its gradients are its inputs, whatever the tangent."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return b.view(b.shape), a.view(a.shape)


@case
def gradient_is_a_view_of_a_weight() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return _Swap.apply(m.a, m.b) + m.last(x).relu().sum()

    return Expression(forward, a=torch.randn(3, 4), b=torch.randn(3, 4), last=nn.Linear(4, 4)), (rows(),)


class _Constant(torch.autograd.Function):
    """Has a gradient that depends on neither tangent nor weight."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (a * x).sum()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x * 3, None


@case
def gradient_without_a_tangent() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return _Constant.apply(m.a, x) + m.last(x).relu().sum()

    return Expression(forward, a=torch.randn(3, 4), last=nn.Linear(4, 4)), (rows(),)


@case
def only_gradients_without_a_tangent() -> tuple[nn.Module, tuple]:
    return Expression(lambda m, x: _Constant.apply(m.a, x), a=torch.randn(3, 4)), (rows(),)


@case
def bias_only_in_forward() -> tuple[nn.Module, tuple]:
    return Expression(lambda m, x: torch.exp(x + m.bias).sum(), bias=torch.randn(4)), (rows(),)


@case
def batch_norm() -> tuple[nn.Module, tuple]:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    return Expression(lambda m, x: m.layers(x).sum(), layers=layers), (torch.randn(5, 2, 4, 4),)


@case
def dropout() -> tuple[nn.Module, tuple]:
    layers = nn.Sequential(Block(dropout=0.5), nn.Dropout(0.3), Block(dropout=0.5))
    return Expression(lambda m, x: m.layers(x).sum(), layers=layers), (rows(),)


@case
def checkpointed() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return m.last(x).sum()

    return Expression(forward, layers=nn.ModuleList(Block() for _ in range(3)), last=nn.Linear(4, 4)), (rows(),)


@case
def checkpointed_dropout() -> tuple[nn.Module, tuple]:
    model, inputs = checkpointed()
    for layer in model.layers:
        layer.dropout = 0.5
    return model, inputs


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS_SAVED = partial(create_selective_checkpoint_contexts, _save_products)


@case
def selectively_checkpointed() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=_PRODUCTS_SAVED)
        return x.sum()

    return Expression(forward, layers=nn.ModuleList(Block() for _ in range(2))), (rows(),)


@case
def autocast() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.layers(x).float().sum()

    return Expression(forward, layers=nn.Sequential(Block(), Block())), (rows(),)


@case
def int_input_and_constant() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor, k: int) -> Tensor:
        return (m.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) * k).sum()

    return Expression(forward, layer=nn.Linear(4, 4)), (rows(), 3)


@case
def branch_of_two_convolutions() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (m.a(x) * m.b(x).sigmoid()).sum()

    return Expression(forward, a=nn.Conv1d(3, 4, 2), b=nn.Conv1d(3, 4, 2)), (torch.randn(2, 3, 5),)


@case
def attention() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, dim=-1)
        return m.out(F.scaled_dot_product_attention(q[None], k[None], v[None])).sum()

    return Expression(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)), (rows(),)


@case
def expanded_token() -> tuple[nn.Module, tuple]:
    # As a ViT's class token: the expanded view of a weight is concatenated with an activation.
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(torch.cat([m.token.expand(2, 4), x])).relu().sum()

    return Expression(forward, token=torch.randn(1, 4), layer=nn.Linear(4, 4)), (rows(),)


@case
def low_rank_update() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, m.base.weight + m.b @ m.a)).sum()

    base = nn.Linear(4, 4).requires_grad_(False)
    return Expression(forward, base=base, a=torch.randn(2, 4), b=torch.randn(4, 2)), (rows(),)


@case
def detached_weight() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (torch.relu(m.layer(x)) @ m.w.detach()).sum()

    return Expression(forward, layer=nn.Linear(4, 4), w=torch.randn(4, 4)), (rows(),)


@case
def changed_input() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return m.layer(x).relu_().mul(3).sum()

    return Expression(forward, layer=nn.Linear(4, 4)), (rows(),)


@case_since("2.13")
def weight_in_a_nested_region() -> tuple[nn.Module, tuple]:
    region = torch.compiler.nested_compile_region(lambda m, x: torch.relu(m.layer(x)))
    return Expression(lambda m, x: region(m, region(m, x)).sum(), layer=nn.Linear(4, 4)), (rows(),)


@torch.library.custom_op("zinf_tests::effectful", mutates_args=())
def _effectful(x: Tensor) -> Tensor:
    return x.clone()


_effectful.register_fake(torch.empty_like)
_effectful.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)
_register_effectful_op("zinf_tests::effectful", _EffectType.ORDERED)


@case
def effectful_operation() -> tuple[nn.Module, tuple]:
    # AOTAutograd puts a token of its own before the inputs, and takes it out again after the partition.
    return Expression(lambda m, x: _effectful(m.layer(x)).relu().sum(), layer=nn.Linear(4, 4)), (rows(),)


@case
def weight_as_reshaped_copy() -> tuple[nn.Module, tuple]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.relu(x @ m.w.t().reshape(2, 8).reshape(4, 4)).sum()

    return Expression(forward, w=torch.randn(4, 4)), (rows(),)


# One of each kind of what is saved for backward, for passes that change what that is: of the other models, slow tests.
# Of which the gate runs whatever looks at all models: others are captured by the tests of the passes that they are for.
IN_THE_GATE = (
    "no_stored_parameter",
    "tied_far_apart",
    "split_and_unbind_of_a_weight",
    "views_of_views",
    "weights_fetched_at_the_top",
    "concatenated_weights",
    "recurrent_weight",
    "frozen",
    "one_gradient_for_two",
    "gradient_is_a_view_of_a_weight",
    "only_gradients_without_a_tangent",
    "bias_only_in_forward",
    "batch_norm",
    "selectively_checkpointed",
    "int_input_and_constant",
    "detached_weight",
    "changed_input",
    "weight_in_a_nested_region",
    "effectful_operation",
    "weight_as_reshaped_copy",
)
SAVING = (
    "mlp",
    "views_of_views",
    "batch_norm",
    "checkpointed_dropout",
    "selectively_checkpointed",
    "int_input_and_constant",
    "attention",
    "changed_input",
    "weight_in_a_nested_region",
    "effectful_operation",
)


@cache
def trained(name: str) -> Record:
    """Return the record of one training step of a case, which was that of eager PyTorch, for tests that only look at
    it."""
    model, inputs = CASES[name]()
    return assert_trains_like_eager(model, *inputs)


def rows() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
