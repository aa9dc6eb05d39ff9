"""What one device does in a step, from a Transformer's dimensions or from a module that is run without values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from zinf_fx.adam import SPLIT, AdamStates, MasterForm, StateForm, has_master
from zinf_fx.analysis import efficiency, memory
from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.memory import StateBytes
from zinf_fx.analysis.symbols import evaluate
from zinf_fx.errors import ConfigError
from zinf_fx.flops import formulas_besides
from zinf_fx.quantisation import FORMATS, can_be_quantised, quantised_shape, tables_of


@dataclass(frozen=True)
class Workload:
    """A model and what a step of it takes on one device.

    Attributes:
        dtype: what most parameters have, such as "bfloat16".
        states: bytes per parameter of each model state, on average.
        work: FLOP per device and step.
        checkpoints: bytes of activations that are kept per device from forward to backward.
        working_states: bytes of the largest operator's parameter and gradient (MSWM).
        working_activations: bytes of the activations that are computed again at a time (AWM).
        recompute: backward computes activations again.
    """

    model: str
    dtype: str
    parameters: int
    states: StateBytes
    work: float
    checkpoints: int
    working_states: int
    working_activations: int
    recompute: bool


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps of a parameter: Adam's states, or `nbytes` per element in their place.

    Attributes:
        state_dtype, master_dtype: of the moments, and of the masters of bf16 parameters; None: fp32.
    """

    nbytes: float | None = None
    state_dtype: StateForm | None = None
    master_dtype: MasterForm | None = None

    def states_of(self, dtype: torch.dtype) -> StateBytes:
        """Bytes per parameter of a dtype; one in fp32 is its own master."""
        size = dtype.itemsize
        adam = self._adam(dtype)
        reread = size if adam.reads_weights else 0
        return StateBytes(size, size, adam.nbytes if self.nbytes is None else self.nbytes, reread)

    def _adam(self, dtype: torch.dtype) -> AdamStates:
        splits = self.master_dtype == SPLIT and dtype == torch.bfloat16
        if self.master_dtype == SPLIT and has_master(dtype.itemsize) and not splits:
            raise ConfigError(f"master-dtype={SPLIT!r} is for bfloat16 parameters, and these are {dtype}: leave it out")
        return AdamStates(dtype.itemsize, self.state_dtype, splits)


ADAM = Optimizer()
"""In mixed precision."""


def of_transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    sequence: int,
    interval: int = 1,
    dtype: str = "bfloat16",
    optimizer: Optimizer = ADAM,
    lora: int | None = None,
    frozen: str | None = None,
) -> Workload:
    """A GPT-like Transformer with activation checkpoints (ZeRO-Infinity, sections 3 and 4.1).

    `batch`: sequences per device. `interval`: blocks from one checkpoint to the next. `lora`: the rank of adapters in
    fp32 beside each linear layer, which alone are trained then; `frozen`: the format of the others, default `dtype`.

    Raises: ConfigError for a format of what is frozen where nothing is.
    """
    if frozen is not None and lora is None:
        raise ConfigError(f"frozen={frozen!r} is a format of frozen parameters, and all are trained: give --lora RANK")
    states = optimizer.states_of(getattr(torch, dtype))
    values = {
        s.layers: layers,
        s.hidden: hidden,
        s.heads: heads,
        s.batch: batch,
        s.sequence: sequence,
        s.interval: interval,
    }
    parameters = int(evaluate(memory.transformer_parameters, values))
    # The paper's formulas for activations and for the largest operator are for elements of 2 bytes.
    widths = states.parameters / 2
    model = f"Transformer of {layers:,} layers x {hidden:,} hidden, {heads:,} heads; batch {batch:,} x {sequence:,}"
    whole = Workload(
        model=model,
        dtype=dtype,
        parameters=parameters,
        states=states,
        work=evaluate(efficiency.computation, {**values, s.parameters: parameters}),
        checkpoints=int(widths * evaluate(memory.activation_checkpoints, values)),
        working_states=int(widths * evaluate(memory.model_state_working_memory, values)),
        working_activations=int(widths * evaluate(memory.activation_working_memory, values)),
        recompute=True,
    )
    if lora is None:
        return whole
    return _with_adapters(whole, layers, hidden, batch * sequence, lora, frozen, optimizer)


def _with_adapters(
    base: Workload, layers: int, hidden: int, tokens: int, rank: int, frozen: str | None, optimizer: Optimizer
) -> Workload:
    """The workload where adapters of a rank are trained beside the linear layers, and `base` is frozen in a format.

    Beside a layer of (m, n) they have rank x (m + n) parameters; the four layers of a block are (hd, 3hd), (hd, hd),
    (hd, 4hd) and (4hd, hd).
    """
    adapters = layers * rank * 16 * hidden
    count = base.parameters + adapters
    values_nbytes = base.states.parameters
    nbytes = values_nbytes if frozen is None else FORMATS[frozen].row_nbytes(hidden) / hidden
    own = optimizer.states_of(torch.float32)
    share = adapters / count
    # Of a frozen layer, no gradient of the weight is computed: one of three products of a step is left out.
    work = 2 * tokens * (3 * base.parameters + 4 * adapters)
    # What is packed is there together with the values that are made of it.
    largest = 4 * hidden * hidden * (nbytes + (values_nbytes if frozen is not None else 0))
    return replace(
        base,
        model=f"{base.model}; LoRA of rank {rank:,}, all else frozen in {frozen or base.dtype}",
        parameters=count,
        states=StateBytes(
            nbytes * (1 - share) + own.parameters * share,
            own.gradients * share,
            own.optimizer * share,
            own.reread * share,
        ),
        work=work,
        working_states=int(largest),
    )


def of_module(
    model: torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    name: str,
    optimizer: Optimizer = ADAM,
    frozen: str | None = None,
) -> Workload:
    """A module with example inputs for one device, run forward and backward on tensors without values.

    `frozen`: the format of frozen matrices, except tables. FLOP are those of matrix products and convolutions.
    Activations are what autograd saves; those that `torch.utils.checkpoint` drops are not among them. Frozen parameters
    have no gradient and no optimizer states.

    Raises: ConfigError: nothing in the model is trained by this call. Whatever the model raises.
    """
    run = _DryRun(model, inputs)
    everything = list(model.parameters())
    trained = [parameter for parameter in everything if parameter.requires_grad]
    if not trained or not run.trains:
        raise ConfigError(f"{name} trains nothing: no parameter requires a gradient from what the model returns")
    count = sum(parameter.numel() for parameter in everything)
    tables = tables_of(model.modules())
    packed = {id(p) for p in everything if frozen and not p.requires_grad and can_be_quantised(p)} - tables

    def nbytes(parameter: torch.Tensor) -> int:
        return math.prod(quantised_shape(parameter.shape, frozen)) if id(parameter) in packed else parameter.nbytes

    by_dtype: Counter[str] = Counter()
    for parameter in everything:
        by_dtype[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return Workload(
        model=name,
        dtype=by_dtype.most_common(1)[0][0],
        parameters=count,
        states=StateBytes(
            sum(map(nbytes, everything)) / count,
            sum(one.nbytes for one in trained) / count,
            sum(one.numel() * optimizer.states_of(one.dtype).optimizer for one in trained) / count,
            sum(one.numel() * optimizer.states_of(one.dtype).reread for one in trained) / count,
        ),
        work=run.work,
        checkpoints=run.saved,
        working_states=max(
            nbytes(one) + (one.nbytes if one.requires_grad or id(one) in packed else 0) for one in everything
        ),
        working_activations=0,  # counted with what is saved: nothing is computed again in bulk
        recompute=False,
    )


class _DryRun:
    """One forward and backward on fake tensors: `work` in FLOP, `saved` bytes of activations, and whether it trains."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        mode = FakeTensorMode()
        fake = partial(_fake, mode=mode)
        step = _TrainingStep(model)
        state = {name: fake(tensor) for name, tensor in (*step.named_parameters(), *step.named_buffers())}
        arguments = tree_map_only(torch.Tensor, fake, inputs)
        args, kwargs = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
        there_anyway = {_storage(t) for t in (*state.values(), *tree_iter(arguments)) if isinstance(t, torch.Tensor)}
        with mode, FlopCounterMode(display=False, custom_mapping=formulas_besides()) as counter:
            self.trains = torch.func.functional_call(step, state, args, kwargs)
        self.work = counter.get_total_flops()
        kept = {_storage(tensor): tensor for tensor in step.saved}
        self.saved = sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in there_anyway)


class _TrainingStep(torch.nn.Module):
    """A model whose call is a forward and a backward, so that a recomputation has the same parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.saved: list[torch.Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> bool:
        """Whether anything that the model returns requires a gradient."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            results = self.model(*args, **kwargs)
        trained = [t for t in tree_iter(results) if isinstance(t, torch.Tensor) and t.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.ones_like(t) for t in trained])
        return bool(trained)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor)
        return tensor


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor without values, on the CPU if the tensor is on the meta device."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    with mode:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return like.requires_grad_(tensor.requires_grad)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
