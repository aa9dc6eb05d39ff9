"""What code outside of PyTorch asks a tensor for: its address, its memory, and its values as Python's or numpy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.tensor.views import memory_of

if TYPE_CHECKING:
    import numpy


class Exported:
    """These methods of a stored tensor."""

    __slots__ = ()

    def data_ptr(self) -> int:
        """The address of the value in memory, to be read, as of any tensor: safetensors saves through it.

        It is gathered for that, and kept as long as this object; what is written there doesn't reach the store. Tensors
        of one storage share the memory.
        """
        if self.captured:
            return super().data_ptr()
        with torch.no_grad():
            whole = self.storage.snapshot()
            value = self.replayed(whole.view(self.base.shape))
        self._in_memory = whole, memory_of(whole, value)
        return value.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the memory whose address `data_ptr()` gave last: torch.distributed.checkpoint.async_save copies it.
        One without bytes where nobody asked for an address."""
        held = self.__dict__.get("_in_memory")
        return super().untyped_storage() if held is None else held[1]

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        """As of any tensor, of a copy of the value: what is written there doesn't reach the store."""
        return self.full_tensor().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> object:
        """As of any tensor."""
        return self.full_tensor().tolist()

    def __format__(self, spec: str) -> str:
        """As of any tensor: one without dimensions is formatted as a number."""
        return format(self.item(), spec) if self.dim() == 0 and not self.captured else super().__format__(spec)

    def _has_no_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StoredTensorError(
            f"a stored tensor of shape {tuple(self.shape)} has no memory of its own that could be shared or changed "
            "from outside PyTorch: use full_tensor(), or zinf_fx.gathered() with modify=True"
        )

    # PyTorch would go through the address of the first element, which is null.
    apply_ = share_memory_ = __dlpack__ = _has_no_memory
