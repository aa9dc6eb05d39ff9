"""A planned graph as plain Python that calls the `Run` of an execution between compute nodes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from zinf_fx import ops
from zinf_fx.plan.schedule import HEAD

_METHODS = {op: op._schema.name.split("::")[1] for op in ops.LOWERED}
_TAKE_A_VALUE = (ops.reduce_scatter, ops.offload)


def bind(module: fx.GraphModule, index: Mapping[tuple[str, int], int], operators: Mapping[str, int]) -> fx.GraphModule:
    """The graph as a function of (run, arguments): its `zinf` nodes become calls of the run's methods, which is told
    when an operator begins and ends, too.

    `index`: of each tile among the schedule's, by the placeholder of its token and its first element. `operators`: by
    the names of the nodes that compute, which operator they belong to.
    `arguments` is a reversed list from which each input is popped, so that inputs die with their last use.
    """
    bound = fx.Graph()
    run = bound.placeholder("run")
    arguments = bound.placeholder("arguments")
    copies: dict[fx.Node, fx.Node] = {}
    last = {operator: name for name, operator in operators.items()}
    begun: set[int] = set()
    for node in module.graph.nodes:
        operator = operators.get(node.name, HEAD)
        if operator != HEAD and operator not in begun:
            begun.add(operator)
            bound.call_method("begin_operator", (run, operator))
        if node.op == "placeholder":
            copies[node] = bound.call_method("pop", (arguments,))
            copies[node].name = node.name
        elif node.target in _METHODS:
            makes_token = node.target is ops.offload_activation
            token = node if makes_token else node.args[0]
            values = node.args if makes_token else node.args[1:] if node.target in _TAKE_A_VALUE else ()
            values = fx.node.map_arg(values, copies.__getitem__)
            options = dict(node.kwargs)
            tile = index[token.name, options.pop("start", 0)]
            copies[node] = bound.call_method(_METHODS[node.target], (run, tile, *values), options)
        else:
            copies[node] = bound.node_copy(node, copies.__getitem__)
        if last.get(operator) == node.name:
            bound.call_method("end_operator", (run,))
    return fx.GraphModule(module, bound, class_name=f"Planned{module.__class__.__name__}")
