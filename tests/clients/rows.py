"""A row of the clients' page says what was run, and how it compares with plain PyTorch doing the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import zinf_fx

Make = Callable[[], nn.Module]
Batch = Mapping[str, Tensor] | tuple[Tensor, ...]

BITWISE = "bitwise"


@dataclass
class Row:
    """Holds a library's name, what was run, and the results that the test found.

    A row without results says that nothing was compared, and fails.
    """

    library: str
    ran: str
    results: list[str] = field(default_factory=list)

    def compare(
        self,
        results: Iterable[Tensor | float],
        plain: Iterable[Tensor | float],
        within: float = 0.0,
        why: str = "",
        to: str = "",
    ) -> None:
        """Record how far `found` is from `plain`, and hold it to `within`: 0 asks for equal bits.

        `why` says why the results aren't bitwise those of plain PyTorch, `to` what they are compared with instead.
        """
        errors = [difference(f, p) for f, p in zip(results, plain, strict=True)]
        assert errors, f"{self.library}, {self.ran}: nothing to compare"
        error = max(errors)
        assert all(e <= within for e in errors), (  # NaN among them too
            f"{self.library}, {self.ran}: differs by {error:.2g} (relative), more than {within:g}"
        )
        result = BITWISE if error == 0 else f"within {error:.1g}"
        self.add(result + (f" {to}" if to else "") + (f": {why}" if why and error else ""))

    def add(self, result: str) -> None:
        if result not in self.results:
            self.results.append(result)


def difference(result: Tensor | float, plain: Tensor | float) -> float:
    """Return the largest difference of two tensors, relative to the largest value; 0 only where all bits are equal."""
    a, b = (values.detach() if isinstance(values, Tensor) else torch.tensor(values) for values in (result, plain))
    a = a.full_tensor() if isinstance(a, zinf_fx.StoredTensor) else a
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} of {a.dtype} beside {b.shape} of {b.dtype}"
    if torch.equal(a, b):
        return 0.0
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item(), 1e-300)


# -- training loops ----------------------------------------------------------------------------------------------------


def loss_of(output: object) -> Tensor:
    """Return the loss that a model returns: itself, in an output object, or the mean square of what else it
    computes."""
    output = getattr(output, "loss", None) if getattr(output, "loss", None) is not None else output
    output = getattr(output, "sample", getattr(output, "last_hidden_state", output))
    if isinstance(output, tuple):
        output = output[0]
    return output if output.dim() == 0 else output.float().square().mean()


def train(
    run: Callable[..., object],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    parameters: Sequence[nn.Parameter],
    clip: float = 1.0,
) -> Iterator[float]:
    """Yield losses of steps that clip, as a user writes them."""
    for number, batch in enumerate(batches):
        torch.manual_seed(number)  # of dropout
        output = run(**batch) if isinstance(batch, Mapping) else run(*batch)
        loss = loss_of(output)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def plain_run(make: Make, batches: Sequence[Batch], backend: str | None = None) -> list[Tensor | float]:
    """Return losses, then parameters, of plain PyTorch: eager, or compiled with `backend`."""
    torch.manual_seed(0)
    model = make()
    run = torch.compile(model, backend=backend) if backend else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    return [*train(run, optimizer, batches, trained), *(p.detach() for p in model.parameters()), *model.buffers()]


def offloaded(make: Make, store: Path) -> tuple[nn.Module, Callable[..., object]]:
    """Return the model, and what to call."""
    model = zinf_fx.offload(make(), store=store, placement="nvme")
    return model, torch.compile(model, backend="zinf")


def built_offloaded(make: Make, store: Path) -> tuple[nn.Module, Callable[..., object]]:
    with zinf_fx.offloading(store=store, placement="nvme"):
        model = make()
    return model, torch.compile(model, backend="zinf")


def in_one_line(make: Make, store: Path) -> tuple[nn.Module, Callable[..., object]]:
    model = make()
    return model, torch.compile(model, backend="zinf", options={"placement": "nvme", "store": str(store)})


WAYS = {"offload()": offloaded, "offloading()": built_offloaded, "one line": in_one_line}


def stored_run(
    make: Make, batches: Sequence[Batch], store: Path, way: str = "offload()"
) -> tuple[list[Tensor | float], nn.Module]:
    """Run as `plain_run`, with every model state on disk; return the model too."""
    torch.manual_seed(0)
    model, run = WAYS[way](make, store)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = zinf_fx.optim.AdamW(trained, lr=1e-2)
    losses = list(train(run, optimizer, batches, trained))
    stored = [isinstance(p, zinf_fx.StoredTensor) for p in model.parameters()]
    assert all(stored), f"{stored.count(False)} of {len(stored)} parameters stayed in memory"
    values = [p.full_tensor() for p in model.parameters()]
    return [*losses, *values, *model.buffers()], model


def compare_training(
    row: Row, make: Make, batches: Sequence[Batch], store: Path, ways: Iterable[str] = ("offload()",)
) -> None:
    """Train a model plainly and from disk, in each of `ways`, and record how far they are apart.

    AOTAutograd decomposes some operators otherwise than eager PyTorch, for every backend. Where that shows, the
    results have to be bitwise those of the "aot_eager" backend, and their distance from eager PyTorch is recorded too.
    """
    plain = plain_run(make, batches)
    for way in ways:
        torch._dynamo.reset()
        store.mkdir(exist_ok=True)
        results, _ = stored_run(make, batches, store, way)
        try:
            row.compare(results, plain)
        except AssertionError:
            torch._dynamo.reset()
            row.compare(results, plain_run(make, batches, "aot_eager"), to="to `aot_eager`")
            row.compare(results, plain, within=1e-4, to="of eager")
