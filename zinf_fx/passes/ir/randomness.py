"""Which nodes draw random numbers, and how many these are."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

# Draw as many numbers whatever values they are given.
_BY_SHAPE = {"bernoulli", "native_dropout", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like"}
_BY_SHAPE |= {"randperm", "uniform", "normal_functional", "exponential", "_scaled_dot_product_flash_attention"}


def source_of(node: fx.Node) -> fx.Node:
    """Return the node that computes a tuple, given a member of that."""
    while node.target is operator.getitem:
        (node,) = node.all_input_nodes
    return node


def run_by(node: fx.Node) -> tuple[Any, tuple]:
    """The operation that a node runs, with its arguments: where the partitioner lets backward repeat it, the node runs
    it and saves the generator's state."""
    if node.target is torch.ops.higher_order.run_and_save_rng_state:
        return node.args[0], node.args[1:]
    return node.target, node.args


def is_random(node: fx.Node) -> bool:
    """Whether computing the node again would draw other random numbers. Attention without dropout draws none."""
    node = source_of(node)
    target, args = run_by(node)
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return bool(args[position] if position < len(args) else node.kwargs.get("dropout_p"))


def draws(node: fx.Node) -> bool:
    """Whether the node itself draws random numbers: what is a member of its results doesn't."""
    return node.target is not operator.getitem and is_random(node)


def draws_by_shape(node: fx.Node) -> bool:
    """Whether a node that draws random numbers draws as many whatever values it is given."""
    return run_by(node)[0]._opname in _BY_SHAPE
