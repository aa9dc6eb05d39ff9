"""How many floating point operations there are in what has products inside. `torch.utils.flop_counter` has formulas of
most operators; formulas of others are here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

Shape = Sequence[int]

Formula = Callable[..., int]
"""A formula takes what the operator takes, and `out_shape`, with a shape for each tensor."""


def _product(left: Shape, *arguments: object, out_shape: Shape, **named: object) -> int:
    """Rows are multiplied by a matrix, however that lies in memory."""
    return 2 * math.prod(left) * out_shape[-1]


def _added_product(added: Shape, left: Shape, *arguments: object, out_shape: Shape, **named: object) -> int:
    return _product(left, out_shape=out_shape)


def _with_vector(matrix: Shape, *arguments: object, **named: object) -> int:
    return 2 * math.prod(matrix)


def _added_with_vector(added: Shape, matrix: Shape, *arguments: object, **named: object) -> int:
    return _with_vector(matrix)


def _products(left: Sequence[Shape], right: Sequence[Shape], **named: object) -> int:
    return sum(2 * math.prod(rows) * matrix[-1] for rows, matrix in zip(left, right, strict=True))


def _grouped(left: Shape, right: Shape, *arguments: object, **named: object) -> int:
    """Each row, each column or each summand is of one group, but where both operands have a dimension of groups."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _grouped_backward(left: Shape, right: Shape, *arguments: object, **named: object) -> int:
    return 2 * _grouped(left, right)


def _attention(query: Shape, key: Shape, value: Shape, *arguments: object, **named: object) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *arguments: object, **named: object
) -> int:
    """Backward computes the scores again, and two products for each of forward's."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _heads(query: Shape, key: Shape, value: Shape, width: int, heads: int, *arguments: object, **named: object) -> int:
    """The heads compute attention, and the products before and behind it."""
    projected = 2 * width * (2 * math.prod(query) + math.prod(key) + math.prod(value))
    return projected + _attention(query, key, value)


def _encoder_layer(source: Shape, width: int, heads: int, *arguments: Any, **named: object) -> int:
    """`arguments` are four weights of attention, two flags, an epsilon, four of norms, then those of both products."""
    return _heads(source, source, source, width, heads) + 4 * math.prod(source) * arguments[11][0]


def _sequence_convolution(source: Shape, weight: Shape, *arguments: object, out_shape: Shape, **named: object) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[:-1])


def _sequence_convolution_backward(
    gradient: Shape, source: Shape, weight: Shape, *arguments: object, **named: object
) -> int:
    return 2 * _sequence_convolution(source, weight, out_shape=gradient)


def _distances(left: Shape, right: Shape, *arguments: object, **named: object) -> int:
    return 3 * math.prod(left) * right[-2]


def _distances_backward(gradient: Shape, left: Shape, right: Shape, *arguments: object, **named: object) -> int:
    return _distances(left, right)


def _trilinear(
    first: Shape, second: Shape, third: Shape, *expanded: Sequence[int], out_shape: object, **named: object
) -> int:
    """Products of three elements are summed. Each operand has a dimension of 1 at those that it is expanded by."""
    shapes = []
    for shape, added in zip((first, second, third), expanded[:3], strict=True):
        whole = list(shape)
        for dim in sorted(added):
            whole.insert(dim, 1)
        shapes.append(whole)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


_FORMULAS: Mapping[str, Formula] = {
    **dict.fromkeys(
        (
            "aten::linear",
            "aten::mkldnn_linear",
            "aten::_int_mm",
            "aten::_scaled_mm",
            "aten::_scaled_mm_v2",
            "aten::_mixed_dtypes_linear",
            "aten::_weight_int8pack_mm",
            "aten::_weight_int4pack_mm",
            "aten::_weight_int4pack_mm_for_cpu",
            "aten::_weight_int4pack_mm_with_scales_and_zeros",
            "aten::_dyn_quant_matmul_4bit",
            "bitsandbytes::int8_linear_matmul",
            "bitsandbytes::int8_scaled_mm",
            "bitsandbytes::int8_mixed_scaled_mm",
            "bitsandbytes::gemv_4bit",
        ),
        _product,
    ),
    **dict.fromkeys(("aten::_addmm_activation", "aten::addbmm"), _added_product),
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), _with_vector),
    "aten::addmv": _added_with_vector,
    "aten::_foreach_mm": _products,
    **dict.fromkeys(
        (
            "aten::_grouped_mm",
            "aten::_scaled_grouped_mm",
            "aten::_scaled_grouped_mm_v2",
            "transformers::grouped_mm_fallback",
        ),
        _grouped,
    ),
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "aten::_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    "aten::_native_multi_head_attention": _heads,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::conv_tbc": _sequence_convolution,
    "aten::conv_tbc_backward": _sequence_convolution_backward,
    "aten::_cdist_forward": _distances,
    "aten::_cdist_backward": _distances_backward,
    "aten::_trilinear": _trilinear,
}

# Words of names that operators with products have, and names with such words that have none.
_WORDS = re.compile(
    r"(?<![a-z])(addmm|attention|attn|baddbmm|bmm|cdist|cholesky|conv|convolution|dot|einsum|gemm|gemv|gru|inverse|linalg"
    r"|linear|lstm|lu|matmul|mha|mlp|mm|moe|mv|orgqr|ormqr|rnn|solve|svd|tensordot|trilinear)(?![a-z])"
)
_WITHOUT = re.compile(r"upsample_|_thnn_fused_|slice_inverse|quantize_|prepack|_pack_")
# Of PyTorch's own operators, names say enough.
_OWN = frozenset(
    {"aten", "prims", "zinf", "quantized", "c10d", "_c10d_functional", "inductor", "debugprims", "rngprims"}
)


def formula_of(target: object) -> Formula | None:
    """Find what counts the operations of an operator, given its arguments and `out_val`; None: nothing does."""
    packet = getattr(target, "overloadpacket", target)
    return flop_registry.get(packet) or _of_shapes(_FORMULAS.get(name_of(target)))


def name_of(target: object) -> str:
    """Give an operator's name, such as `aten::mm`; that of a higher-order one has no namespace."""
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")


def seems_a_product(target: object, matrices: int) -> bool:
    """Say whether an operator without a formula may have products inside. PyTorch's own have names that say so; what
    others made is taken for one where at least two of its operands are matrices, and so is what contains a graph."""
    namespace, _, name = name_of(target).rpartition("::")
    if isinstance(target, HigherOrderOperator):
        return matrices > 0
    if not isinstance(target, torch._ops.OpOverload) or _WITHOUT.search(name):
        return False
    return _WORDS.search(name) is not None or (namespace not in _OWN and matrices > 1)


def _of_shapes(formula: Formula | None) -> Formula | None:
    if formula is None:
        return None

    def count(*args: object, out_val: object = None, **kwargs: object) -> int:
        args, kwargs, out_shape = tree_map_only(torch.Tensor, lambda tensor: tensor.shape, (args, kwargs, out_val))
        return formula(*args, out_shape=out_shape, **kwargs)

    return count
