"""How the backend's errors reach whoever calls a compiled function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import TracingContext

from zinf_fx.errors import ZinfError
from zinf_fx.lines import line_of


class _Refusal(BackendCompilerFailed):
    """Carries an error of ours through Dynamo, which would wrap any other exception, to the compiled function's caller.

    There, Dynamo raises what `remove_dynamo_frames` returns. Until then it is what a failing backend raises, so that
    Dynamo keeps nothing of the attempt, and the next call compiles again.
    """

    def remove_dynamo_frames(self) -> ZinfError:
        return self.inner_exception


@contextmanager
def refusing(module: fx.GraphModule) -> Iterator[None]:
    """A block that compiles a graph, and whose errors of ours say which it is."""
    try:
        yield
    except ZinfError as error:
        if place := _place(module):
            error.add_note(f"This was said of the graph that begins here:\n{place}")
        if TracingContext.try_get() is None:  # not called by Dynamo
            raise
        raise _Refusal(_named_zinf, error, None) from error


def _named_zinf() -> None:
    """Gives the backend's name to Dynamo's log."""


_named_zinf.__name__ = "zinf"


def _place(module: fx.GraphModule) -> str:
    """The line of the model's code that the first operation of a graph is from; empty: it isn't known."""
    operations = (node for node in module.graph.nodes if node.op != "placeholder" and node.stack_trace)
    return next(map(line_of, operations), "")
