"""`Streamed`: turns a torch.optim class into one whose states live in the store and pass through memory in chunks."""

from __future__ import annotations

import inspect
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError
from zinf_fx.interrupts import held_back, sealed
from zinf_fx.optim.arithmetic import Group, State, as_groups, skips, states_of_zeros, step_groups, without_hooks
from zinf_fx.optim.formats import KeptAs, MasterDtype, StateDtype
from zinf_fx.optim.in_place import InPlaceGroups, InPlaceUpdate
from zinf_fx.optim.layouts import GroupLayouts, Layouts, StateLayout
from zinf_fx.optim.partial_step import ReservedStates, TornStep, check_loaded
from zinf_fx.optim.rehearsal import Rehearsal
from zinf_fx.optim.slices import Update, UpdateGroups
from zinf_fx.optim.states import KeptStates, check_gradient, fitting
from zinf_fx.optim.step import StreamedStep
from zinf_fx.optim.update_batch import RecurringUpdates, UpdateBatch
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.executor import EXECUTOR, Stage
from zinf_fx.runtime.gradients.state import consume_gradient
from zinf_fx.runtime.tensor.local_parameter import local_input, stored_parameter
from zinf_fx.runtime.tensor.pending_gradient import GradientConsumer
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# Of gradients that wait in memory for their update, as far as one is not larger.
GRADIENT_BUFFER = 64 << 20


def follow(consumer: GradientConsumer, parameter: StoredTensor) -> None:
    """Let `consumer` take the parameter's gradient from now on when it is whole.

    Raises: OptimizerError when another living optimizer does.
    """
    state = parameter.stored.gradient
    if state.consumer not in (None, consumer):
        raise OptimizerError(
            f"two optimizers with step_in_backward=True have one parameter of shape {tuple(parameter.shape)}: its "
            "gradient can be consumed once; leave the option out of both"
        )
    if not state.followed:
        parameter.expects_gradient = False  # it is told of what arrives from the next use on
    state.consumer, state.backwards_due = consumer, 0


def check_steps_in_backward(closure: object, scales: bool) -> None:
    """Raises: OptimizerError when `step()` got what it would need before backward."""
    refused = "a closure" if closure is not None else "a GradScaler" if scales else None
    if refused is not None:
        raise OptimizerError(
            f"step() got {refused}, and step_in_backward=True updates parameters before it is called: leave the option "
            "out"
        )


def second_gradient(parameter: StoredTensor) -> OptimizerError:
    """Return the error with which a parameter's second gradient before `step()` is refused."""
    return OptimizerError(
        f"a parameter of shape {tuple(parameter.shape)} got a second gradient before optimizer.step(): with "
        "step_in_backward=True, the first one has updated it; call step() after each backward pass, or leave the "
        "option out to accumulate gradients"
    )


Fitted = Callable[[State, Group, StoredTensor], State]
"""An entry fitted to its parameter, under the options that were saved for its group."""


@contextmanager
def taking_stored(optimizer: Optimizer, fitted: Fitted) -> Iterator[dict[StoredTensor, State]]:
    """Open a block in which a class of torch loads a state dict without what that has for stored parameters. That is in
    the result when the block ends. Hooks that are to run when all is loaded don't run in it."""
    entries: dict[StoredTensor, State] = {}

    def take_stored(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        rest, taken = _without_stored(state_dict, optimizer.param_groups, fitted)
        entries.update(taken)
        return rest

    # The last hook to see the values, and the only place where torch would not cast them to the parameter's dtype.
    handle = optimizer.register_load_state_dict_pre_hook(take_stored)
    posts, optimizer._optimizer_load_state_dict_post_hooks = (
        optimizer._optimizer_load_state_dict_post_hooks,
        OrderedDict(),
    )
    try:
        yield entries
    finally:
        handle.remove()
        optimizer._optimizer_load_state_dict_post_hooks = posts


def _without_stored(
    state_dict: dict[str, Any], groups: Sequence[Group], fitted: Fitted
) -> tuple[dict[str, Any], dict[StoredTensor, State]]:
    """Return `state_dict` without what it has for the stored parameters of an optimizer's `groups`, and that, `fitted`
    to each parameter under the options that were saved for its group."""
    entries: dict[StoredTensor, State] = {}
    saved_groups, rest = [], dict(state_dict["state"])
    for saved, mine in zip(state_dict["param_groups"], groups, strict=False):
        if saved.get("fused") is None and "fused" in mine:  # what runs the arithmetic, not part of the state
            saved = {**saved, "fused": mine["fused"]}
        saved_groups.append(saved)
        for key, parameter in zip(saved["params"], map(stored_parameter, mine["params"]), strict=False):
            if parameter is not None and key in rest:
                entries[parameter] = fitted(rest.pop(key), saved, parameter)
    saved_groups += state_dict["param_groups"][len(saved_groups) :]
    return {**state_dict, "state": rest, "param_groups": saved_groups}, entries


class Streamed(Optimizer):
    """Base class, before a torch.optim class: `class AdamW(Streamed, torch.optim.AdamW)`.

    The result takes the options of the torch class. For every stored parameter with a gradient, `step()` brings
    weights, gradient and states to host memory (to the device, where the states live there) chunk by chunk
    (`Config.chunk` bytes of fp32 weights), runs the torch class on the chunk, and writes back what changed. The next
    chunk is read, and the one before written, meanwhile (ZeRO-Infinity, sections 5.2.2 and 6.3). With `overlap`,
    `step()` returns when what the next forward needs first is updated; the rest goes on between the operators of
    compiled graphs, and whatever reads a parameter, a gradient or a state that is not updated yet waits for it, so that
    nobody sees a difference. An error of that part is raised where training has got to by then. Where the class offers
    `fused`, that is the default. Low-precision parameters are updated through an fp32 copy, the state "master"; what
    others write to such a parameter between steps is taken over into it. Ordinary parameters in the same optimizer are
    stepped as by the torch class.

    A class whose update of an element depends on others, as those of Adafactor, Muon and Lamb do, gets one whole
    parameter after the other, with its gradient and states: what it does is exact, and the largest parameter must fit
    in memory with them. Of parameters that are partitioned over ranks, each rank gathers the whole and updates it. What
    a class keeps for a parameter in other shapes is stored from 4 KiB on. What it changes besides: see `rehearsal`.

    With `step_in_backward`, a parameter is updated as soon as backward has its gradient and needs its value no more
    (of compiled graphs: all those whose forward pass ran), and the gradient is gone; `step()` updates what is left. So
    there is one backward pass per step, without clipping, GradScaler and closures, and a learning rate that changes
    between backward and `step()` is for the next step.

    Space for the states of trainable parameters is reserved at construction; they appear in `state`, as stored tensors,
    after the first step, or `reserve_states`. `finish()` waits until everything is in the store.

    Attributes:
        overlap: whether steps go on in the background; may be changed between steps. Steps whose gradients are ordinary
            tensors, or scaled by a GradScaler, never do.
        step_in_backward: whether backward updates parameters.
        kept_as: what the store has element-wise states in, `state_dtype` (torch.bfloat16, or "8bit": see `blockwise`),
            and masters of bf16 parameters, `master_dtype` ("split", at no loss: see `split`), if not as it computes.
        step_seconds: for which training did the last step's arithmetic, or waited for it, until now.
        torn: what is known after a step that was interrupted, else None. Stepping is refused until `load_state_dict`.

    Raises: StoreError when the states don't fit, OptimizerError for a class that needs more than one parameter at a
        time or keeps anything but a state for each, for parameters that aren't floating-point, and for `capturable` and
        `differentiable`, which can't apply to values on disk.
    """

    _arithmetic: ClassVar[type[Optimizer]]
    _has_masters = True
    _constructed = False
    _last_step: StreamedStep | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._arithmetic = next(base for base in cls.__mro__ if not issubclass(base, Streamed))
        if cls._arithmetic is Optimizer:
            raise TypeError(f"{cls.__name__} has no arithmetic: name a torch.optim class after Streamed")

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        overlap: bool = True,
        step_in_backward: bool = False,
        state_dtype: StateDtype | None = None,
        master_dtype: MasterDtype | None = None,
        **kwargs: Any,
    ) -> None:
        kept = KeptAs.of(state_dtype, master_dtype)
        accepted = inspect.signature(self._arithmetic)
        given = accepted.bind(params, *args, **kwargs).arguments
        if "fused" in accepted.parameters and given.get("fused") is None and not given.get("foreach"):
            kwargs["fused"] = True
        groups = as_groups(params)
        # The torch class checks its options over a stand-in: some make dense states of their parameters here.
        super().__init__([torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))], *args, **kwargs)
        self.param_groups.clear()
        self.state.clear()
        self.overlap, self.step_in_backward, self.kept_as = overlap, step_in_backward, kept
        self._complete()
        for group in groups:
            super().add_param_group(group)
        self._take_groups(self.param_groups)

    if TYPE_CHECKING:
        state: defaultdict[torch.Tensor, State]  # an attribute for callers, as in torch
    else:

        @property
        def state(self) -> defaultdict[torch.Tensor, State]:
            """As in torch. Finishes a step that goes on in the background."""
            self.finish()
            return self._state

        @state.setter
        def state(self, state: defaultdict[torch.Tensor, State]) -> None:
            self._state = state

    @property
    def step_seconds(self) -> float:
        return self._ordinary_seconds + (self._last_step.seconds if self._last_step is not None else 0.0)

    @torch._disable_dynamo
    @sealed  # so that the memory of each gradient goes back in a block that is open already
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        super().zero_grad(set_to_none)

    def finish(self) -> None:
        """Wait until the last step is done and in the store. Raises: StoreError when it failed; see `torn`."""
        if (step := self._last_step) is not None:
            step.finish()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{k: getattr(self, k) for k in ("overlap", "step_in_backward", "kept_as")}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not self._constructed:  # a copy, or unpickled
            self._complete()
        attributes = dict(state)
        if "state" in attributes:
            self.state = attributes.pop("state")
        super().__setstate__(attributes)

    def _complete(self) -> None:
        self._ordinary_seconds, self._last_step = 0.0, None
        self._threads = torch.get_num_threads()  # of the thread that trains: see [Note: update threads]
        self._finishes_when_dropped = weakref.finalize(self, bool)
        self.torn: TornStep | None = None
        self._kept = KeptStates(masters=self._has_masters)
        self._layouts, self.rehearsal = Layouts(self._arithmetic), Rehearsal(self._arithmetic)
        self._in_place, self._groups_updated = InPlaceGroups(), UpdateGroups()
        self._recurring: RecurringUpdates | None = None  # that of the last step
        self._shared: frozenset[str] = frozenset()  # names of the attributes that are another optimizer's
        self._groups: dict[torch.Tensor, int] = {}  # of each parameter, the number of its group then
        self._stage = Stage()
        self._constructed = True

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. Raises: StoreError when there is no space for the states; the group is not added then."""
        super().add_param_group(param_group)
        if not self._constructed:
            return
        group = self.param_groups[-1]
        try:
            self._take_groups([group])
        except BaseException:
            self.param_groups.pop()
            for parameter in group["params"]:
                if (stored := stored_parameter(parameter)) is not None:
                    self._kept.states.pop(stored, None)
            raise

    @held_back
    def _take_groups(self, groups: Sequence[Group]) -> None:
        """Make room for the states of all trained parameters in new groups."""
        layouts: dict[StoredTensor, StateLayout] = {}
        for group in groups:
            of_group = self._layouts_of(group)
            for parameter in map(stored_parameter, group["params"]):
                if parameter is not None:
                    layouts[parameter] = of_group.of(parameter, self._kept.dtype(parameter))
        trained = {p: layout for p, layout in layouts.items() if p.requires_grad or p.grad is not None}
        self._kept.make_room(trained)
        for parameter, layout in trained.items():
            self._kept.reserve(parameter, layout, self._state)
        for parameter in layouts if self.step_in_backward else ():
            follow(self, parameter)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo  # inside a compiled training loop too, this is I/O; the public decorator imports Dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """As in torch. Raises: StoreError; OptimizerError from then on, because the step is torn: see `torn`."""
        if self.step_in_backward:
            check_steps_in_backward(closure, hasattr(self, "found_inf"))
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        self.rehearsal.take_over(self)
        return loss

    @held_back
    @torch.no_grad()
    def _take_step(self) -> None:
        started, self._threads = time.perf_counter(), torch.get_num_threads()
        if not skips(self):
            with RUNNING.turn():
                self._check_whole()  # again: by now, the closure or another thread may have stepped
                if (begun := self._begun_in_backward) is None:
                    self.rehearsal.run(self)
                in_place, groups = self._divided()
                step = begun or self._new_step(groups)
                batch = self._batch(step, groups)
                step.follows(self._step_ordinary(groups))
                self._ordinary_seconds = time.perf_counter() - started
                self._step_stored(step, in_place, batch)

    def share(self, optimizer: Optimizer) -> None:
        """Step the stored parameters of `optimizer`, by its options, groups and states as they are now."""
        if not self._constructed:
            self._complete()
            self.overlap, self.step_in_backward, self.kept_as = False, False, KeptAs()
        attributes = {k: v for k, v in without_hooks(optimizer).items() if k not in ("state", "step")}
        for left in self._shared - attributes.keys():  # a GradScaler takes its numbers away after its step
            self.__dict__.pop(left, None)
        self.__dict__.update(attributes)
        self._shared = frozenset(attributes)
        self._state = optimizer.state

    def check(self) -> None:
        """Raises: OptimizerError for a stored parameter that can't be stepped."""
        for group in self.param_groups:
            stored = [p for p in map(stored_parameter, group["params"]) if p is not None]
            if not stored:
                continue
            layouts = self._layouts_of(group)
            for parameter in stored:
                if parameter.requires_grad or parameter.grad is not None:
                    layouts.of(parameter, self._kept.dtype(parameter))

    @torch._disable_dynamo
    def step_stored(self) -> None:
        """Step the stored parameters alone, and wait until that is done. Raises: as `step`."""
        self._check_whole()
        self._take_step()

    @held_back
    def take_gradients(self, parameters: Sequence[StoredTensor]) -> None:
        """Begin the update of parameters whose gradients are whole. Backward calls this: see `GradientConsumer`.

        Raises: StoreError; OptimizerError for a second gradient before `step()`, or when a step is torn.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not parameters:
            return
        self._check_whole()
        step = self._begun_in_backward
        if step is not None:
            for parameter in parameters:
                if parameter in step.parameters:
                    raise second_gradient(parameter)
        else:
            self.rehearsal.run(self)
            step = self._new_step(self.param_groups)
        with torch.no_grad():
            layouts = cache(lambda number: self._layouts_of(self.param_groups[number]))
            updates = [self._update_of(parameter, layouts) for parameter in parameters if parameter in self._groups]
        for _, states, _ in updates:
            assert states.gradient is not None
            consume_gradient(states.parameter, states.gradient.dtype)
        if updates:
            step.add(UpdateBatch(updates), owned=True)
            step.advance()

    def make_room(self, nbytes: int) -> None:
        """Update parameters until so many bytes more of gradients may be held in memory: see `GradientConsumer`."""
        if (step := self._begun_in_backward) is not None:
            step.make_room(nbytes, GRADIENT_BUFFER)

    def abandon(self, error: BaseException) -> None:
        """Tear a step that backward began and ended with `error`. See `GradientConsumer`."""
        if (step := self._begun_in_backward) is not None:
            step.abandon(error)

    def state_dict(self) -> dict[str, Any]:
        """As in torch; element-wise states of stored parameters are stored tensors, which `torch.save` writes as
        ordinary ones. It waits and raises as `between_steps` does; where another thread trains, save within that block,
        because the tensors of the result have the values of when they are read."""
        with RUNNING.lock if isinstance(self.torn, ReservedStates) else self.between_steps():
            return super().state_dict()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Open a block in which parameters and states are those after one step, whatever other threads do: for saving.

        It begins when the step under way is in the store and no compiled graph runs. Until it ends, other threads that
        step or run a compiled graph wait: nothing in it may wait for them, nor, on a CUDA device, call backward.

        Raises: OptimizerError after a torn step, so that no good checkpoint is overwritten; with `step_in_backward`,
        from when backward has updated its first parameter until `step()` has updated the last: save after `step()` or,
        in another thread than the one that trains, try again. StoreError when the step under way fails.
        """
        with RUNNING.lock:
            self._check_whole()
            if self._begun_in_backward is not None:
                raise OptimizerError(
                    "backward has updated some parameters and not others: call step() before state_dict() and "
                    "between_steps() or, if another thread trains, try again when it has"
                )
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; values go to the store one after the other, in fp32 for low-precision parameters.

        Accepts the state of the plain torch class too: masters are then taken from the parameters.

        Raises: OptimizerError for a state that doesn't fit, before anything is changed.
        """
        if self.torn is None:
            self.finish()

        def fitted(entry: State, saved: Group, parameter: StoredTensor) -> State:
            layout, dtype = self._layout({**self.defaults, **saved}, parameter), self._kept.dtype(parameter)
            check_loaded(self.torn, entry)
            return fitting(entry, layout, parameter, dtype, type(self).__name__)

        with taking_stored(self, fitted) as entries:
            super().load_state_dict(state_dict)
        self.take_entries(entries)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def reserved(self, parameter: StoredTensor, group: Group) -> State:
        """Return the states of a stored parameter under the options of `group`: zeros, and tensors with room for
        values, which `load_state_dict` doesn't copy where an entry has them itself, so that they may be filled after
        it."""
        layout = self._layout({**self.defaults, **group}, parameter)
        tensors = self._kept.reserve(parameter, layout, self._state).tensors
        return layout.zeros() | {name: parameter.shown(tensor) for name, tensor in tensors.items()}

    # -- what is kept where ------------------------------------------------------------------------------------------

    def _layouts_of(self, group: Group) -> GroupLayouts:
        """Return the layouts under the present options of a group."""
        return self._layouts.under(self, group, self.kept_as, self.rehearsal.moving, in_backward=self.step_in_backward)

    def _layout(self, group: Group, parameter: StoredTensor) -> StateLayout:
        return self._layouts_of(group).of(parameter, self._kept.dtype(parameter))

    def take_entries(self, entries: dict[StoredTensor, State]) -> None:
        """Copy values of states, in whatever form, to where they live."""
        self.torn = TornStep("a state dict was loaded in part", (), (), ())
        groups = {stored_parameter(p): group for group in self.param_groups for p in group["params"]}
        self._kept.load(entries, lambda parameter: self._layout(groups[parameter], parameter), self._state)
        self.torn = None

    # -- the step ----------------------------------------------------------------------------------------------------

    def _divided(self) -> tuple[list[InPlaceUpdate], list[Group]]:
        """Return what is updated in place, and the groups with all other parameters."""
        if self.step_in_backward:
            return [], self.param_groups
        return self._in_place.divide(self, self._state, self._kept.states, self._layouts_of)

    def _step_ordinary(self, groups: list[Group]) -> list[torch.Tensor]:
        """Step the ordinary parameters. Returns those that had a gradient."""
        groups = [{**g, "params": [p for p in g["params"] if stored_parameter(p) is None]} for g in groups]
        step_groups(self, self._arithmetic, [group for group in groups if group["params"]], self._state)
        return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]

    def _check_whole(self) -> None:
        """Finish what goes on in the background. Raises: StoreError if that fails; OptimizerError if a step is torn."""
        if self.torn is None and self._begun_in_backward is None:
            self.finish()
        if self.torn is not None:
            raise OptimizerError(str(self.torn))

    @property
    def _begun_in_backward(self) -> StreamedStep | None:
        """The step that backward began, until `step()`."""
        return self._last_step if self._last_step is not None and self._last_step.takes_more else None

    def _step_stored(self, step: StreamedStep, in_place: list[InPlaceUpdate], batch: UpdateBatch | None) -> None:
        if not (in_place or batch or step.parameters):
            self._last_step = None
            return
        try:
            EXECUTOR.begin(self._stage)
            EXECUTOR.drop_anticipated()
            if in_place:
                step.update_in_place(in_place)
            if batch is not None:
                step.add(batch)
            step.close(overlap=self.overlap)
            if self.step_in_backward:
                for parameter in map(stored_parameter, self._groups):
                    if parameter is not None:  # it may have become one after it joined
                        follow(self, parameter)
            EXECUTOR.end(self._stage)
            step.commit()
        except BaseException as error:
            step.abandon(error)
            EXECUTOR.reset()
            raise

    def _new_step(self, groups: list[Group]) -> StreamedStep:
        """Begin a step over stored parameters of `groups`, which are as many as the optimizer's."""
        reference = weakref.ref(self)

        def tear(torn: TornStep) -> None:
            if (optimizer := reference()) is not None:
                optimizer.torn = torn

        ahead, self._last_step = self._last_step and self._last_step.ahead, None
        self._groups_updated.begin_step(self.param_groups)
        numbered = ((number, p) for number, group in enumerate(groups) for p in group["params"])
        self._groups = {p if type(p) is StoredTensor else local_input(p): number for number, p in numbered}
        step = self._last_step = StreamedStep(self, self._arithmetic, self._kept.states, tear, ahead, self._threads)
        self._finishes_when_dropped.detach()
        self._finishes_when_dropped = weakref.finalize(self, step.finish_when_dropped)
        self._finishes_when_dropped.atexit = False
        return step

    def _batch(self, step: StreamedStep, groups: Sequence[Group]) -> UpdateBatch | None:
        """Return the updates of stored parameters in `groups` whose gradients `step` has not taken, if there are
        any."""
        parameters = [group["params"] for group in groups]
        layouts = cache(lambda number: self._layouts_of(self.param_groups[number]))
        recurring, self._recurring = None if step.parameters else self._recurring, None
        if recurring is not None and recurring.comes_again(parameters, self._state, layouts):
            self._recurring = recurring
            return recurring.batch
        stored = (p for p in self._groups if isinstance(p, StoredTensor) and p not in step.parameters)
        updates = [self._update_of(parameter, layouts) for parameter in stored if parameter.grad is not None]
        batch = UpdateBatch(updates) if updates else None
        self._recurring = batch and RecurringUpdates.of(batch, parameters, self._state, layouts)
        return batch

    def _update_of(self, parameter: StoredTensor, layouts: Callable[[int], GroupLayouts]) -> Update:
        """Return the update of a parameter, with space for its states. `layouts` gives those of a group, by its
        number."""
        number = self._groups[parameter]
        group = self.param_groups[number]
        check_gradient(parameter)
        layout = layouts(number).of(parameter, self._kept.dtype(parameter))
        states = self._kept.reserve(parameter, layout, self._state)
        entry = self._state[parameter.whole]
        present = states.take_over_shown(entry)
        states.gradient = parameter.grad
        states.look_for_writes(present)
        return Update(self._groups_updated.of(number, group, states, layout, present), states, entry)


@torch._disable_dynamo
@held_back
def reserve_states(optimizer: Streamed) -> None:
    """Have a new optimizer show its states, so that torch.distributed.checkpoint can load into them.

    `get_state_dict` and `set_state_dict` of that library take a step with zeros for gradients, all in memory, where an
    optimizer has no states. Call this before: no bytes are moved. The stored tensors in `state` have no values then,
    and stepping and saving are refused until `load_state_dict`, which `set_state_dict` calls after `dcp.load`. Where
    there are states, nothing is done.

    Raises: OptimizerError for an optimizer that isn't of `zinf_fx.optim`, or after a torn step; StoreError where there
    is no space.
    """
    if not isinstance(optimizer, Streamed):
        raise OptimizerError(
            f"reserving states of a {type(optimizer).__module__}.{type(optimizer).__qualname__} was refused: it makes "
            "them by itself; use an optimizer of zinf_fx.optim"
        )
    if optimizer.torn is not None:
        raise OptimizerError(str(optimizer.torn))
    if optimizer.state:
        return
    states = {}
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        ordinary = [parameter for parameter in trained if stored_parameter(parameter) is None]
        if ordinary:
            made = states_of_zeros(optimizer, optimizer._arithmetic, group, ordinary)
            states.update(zip(ordinary, made, strict=True))
        for parameter in trained:
            if (stored := stored_parameter(parameter)) is not None:
                states[stored.whole] = optimizer.reserved(stored, group)
    optimizer.state.update(states)
    optimizer.torn = ReservedStates("states were reserved", (), (), ())
