"""A training as the parts that are saved under their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch.optim import Optimizer

from zinf_fx.checkpoint.training.parts.gradients import GradientsPart
from zinf_fx.checkpoint.training.parts.held import HeldPart
from zinf_fx.checkpoint.training.parts.module import ModulePart, parameter_names
from zinf_fx.checkpoint.training.parts.optimizer import OptimizerPart
from zinf_fx.checkpoint.training.parts.part import Part
from zinf_fx.checkpoint.training.parts.randomness import RandomPart
from zinf_fx.checkpoint.training.parts.state import Stateful, StatePart, ValuePart
from zinf_fx.errors import CheckpointError
from zinf_fx.optim.streamed import Streamed
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.tensor.local_parameter import stored_in

Parts = Mapping[str, Part | ValuePart | HeldPart]

MODEL, OPTIMIZER = "model", "optimizer"
_OURS = (GradientsPart.name, RandomPart.name)


def parts_of(model: torch.nn.Module, optimizer: Optimizer | None, extra: Mapping[str, object]) -> Parts:
    """The parts of a training, by their names. Raises: CheckpointError for what is no model or optimizer."""
    _check(model, optimizer, extra)
    named = {MODEL: model, **({} if optimizer is None else {OPTIMIZER: optimizer}), **extra}
    names: dict[torch.Tensor, str] = {}
    for name, one in named.items():
        if isinstance(one, torch.nn.Module):
            prefix = "" if name == MODEL else f"{name}/"
            names = {p: prefix + its_name for p, its_name in parameter_names(one).items()} | names
    parts = {name: _part(name, one, names) for name, one in named.items()}
    return parts | {GradientsPart.name: GradientsPart(names), RandomPart.name: RandomPart()}


def _part(name: str, one: object, names: Mapping[torch.Tensor, str]) -> Part | ValuePart:
    if isinstance(one, torch.nn.Module):
        return ModulePart(name, one)
    if isinstance(one, Optimizer):
        return OptimizerPart(name, one, names)
    return StatePart(name, one) if isinstance(one, (Stateful, torch.Generator)) else ValuePart(name, one)


def _check(model: object, optimizer: object, extra: Mapping[str, object]) -> None:
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(f"the model is a {type(model).__name__}: give a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise CheckpointError(
            f"the optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or None; others go by names "
            "of their own, as in save_checkpoint(directory, model, first, second=second)"
        )
    for name in extra:
        if name in _OURS or "/" in name:
            raise CheckpointError(f"'{name}' is no name for what else is saved: choose another one")


def streamed_in(parts: Parts) -> list[Streamed]:
    """The optimizers of `zinf_fx.optim`."""
    optimizers = [part.optimizer for part in parts.values() if isinstance(part, OptimizerPart)]
    return [one for one in optimizers if isinstance(one, Streamed)]


def modules_in(parts: Parts) -> list[torch.nn.Module]:
    """The models, the one that is called so first."""
    present = [part.part if isinstance(part, HeldPart) else part for part in parts.values()]
    return [part.module for part in present if isinstance(part, ModulePart)]


def unwritten_in(parts: Parts) -> set[int]:
    """The keys of the storages of frozen parameters, which no step rewrites."""
    frozen = (p for module in modules_in(parts) for p in module.parameters() if not p.requires_grad)
    return {stored.storage.key for parameter in frozen for stored in stored_in(parameter)}


@contextmanager
def between_steps(parts: Parts, *, whole: bool) -> Iterator[None]:
    """A block in which nothing else changes the training. With `whole`, no step has been torn.

    Raises: OptimizerError after a torn step, or in the middle of one that began in backward; StoreError.
    """
    with ExitStack() as rooms:
        rooms.enter_context(RUNNING.turn())
        for optimizer in streamed_in(parts):
            if whole:
                rooms.enter_context(optimizer.between_steps())
            elif optimizer.torn is None:
                optimizer.finish()
        yield
