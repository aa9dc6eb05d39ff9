"""Modules compiled by `torch.compile`, seen as wholes: Dynamo shows a backend the graphs that it captured, and nothing
of the code that it left to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import innermost_backend
from torch.nn.modules.module import register_module_module_registration_hook

_then: Callable[[torch.nn.Module, object], None]


def when_first_called(then: Callable[[torch.nn.Module, object], None]) -> None:
    """From now on, call `then(module, backend)` after the first call of each module that `torch.compile` wraps, with
    any backend. Called once, by the module that knows what to do.

    `backend` is what compiles graphs, with the options given to `torch.compile`. A call that raises doesn't count.
    Functions, and `module.compile()`, make no such wrapper.
    """
    global _then
    _then = then
    register_module_module_registration_hook(_registered)


def _registered(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if name == "_orig_mod" and isinstance(parent, OptimizedModule):
        parent.register_forward_hook(_called)


def _called(optimized: torch.nn.Module, arguments: Any, result: Any) -> None:
    if torch.compiler.is_compiling():  # as a part of another module, which has a first call of its own
        return
    for number, hook in list(optimized._forward_hooks.items()):
        if hook is _called:
            del optimized._forward_hooks[number]
    callback = getattr(optimized.dynamo_ctx, "callback", None)
    if callback is not None:
        _then(optimized._orig_mod, innermost_backend(callback))
