"""Frozen parameters that are made of several tensors, as those of quantising libraries: these tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zinf_fx.frontend.staying import stays
from zinf_fx.interrupts import held_back
from zinf_fx.runtime.tensor.local_parameter import made_of, stored_in


class Composed:
    """Those of some parameters whose class says what they are made of (`__tensor_flatten__`), and that are not stored.

    What the class does with its tensors, it does with stored ones: their operations gather, and in a graph that is
    captured, the gathers are nodes as any.

    Attributes:
        whole: these parameters, by name.
        parts: by name, the tensors as frozen parameters: they share their memory until they move.
        whole_of: by the name of each of these, that of its parameter, by which it is placed.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.whole = {
            name: parameter
            for name, parameter in parameters.items()
            if stays(parameter) and made_of(parameter) and not stored_in(parameter)
        }
        self.parts: dict[str, torch.nn.Parameter] = {}
        self.whole_of: dict[str, str] = {}
        for name, parameter in self.whole.items():
            self._take_apart(name, parameter)
            self.whole_of |= dict.fromkeys(self.parts.keys() - self.whole_of.keys(), name)

    def _take_apart(self, name: str, tensor: torch.Tensor) -> None:
        for attribute, part in made_of(tensor).items():
            its_name = f"{name}.{attribute}"
            if made_of(part):
                self._take_apart(its_name, part)
            else:
                self.parts[its_name] = torch.nn.Parameter(part.detach(), requires_grad=False)

    def put_together(self) -> None:
        """Make the parameters, which stay the same objects, of what their parts are now."""
        for name, parameter in self.whole.items():
            _replace(parameter, self._of_parts(name, parameter))

    def _of_parts(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        inner = {}
        for attribute, part in made_of(tensor).items():
            its_name = f"{name}.{attribute}"
            inner[attribute] = self._of_parts(its_name, part) if made_of(part) else self.parts[its_name]
        context = tensor.__tensor_flatten__()[1]
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


@held_back
def _replace(parameter: torch.Tensor, twin: torch.Tensor) -> None:
    """Give the object `parameter` the implementation and attributes of `twin`, of its own class: as `replace_in_place`,
    where weak references exist."""
    torch._C._swap_tensor_impl(parameter, twin)
    parameter.__dict__.update(twin.__dict__)
    parameter._is_param = True
