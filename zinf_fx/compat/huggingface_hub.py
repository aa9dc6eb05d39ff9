"""huggingface_hub (1.0 to 2.4): sizes of stored tensors, where it divides a model into files.

Its `get_torch_storage_size` asks the tensors inside of a tensor subclass, in Python, for the sizes of their storages,
and calls tensors whose storages have one address tied. A stored tensor has one tensor inside, its token, which is one
number. So the token answers with the size of what it stands for. PyTorch asks for `numel()` and `size()` itself, and
sees one number of eight bytes; it accepts plain tensors alone inside of a subclass in some places, so these answers
belong to the object.
"""

from __future__ import annotations

from typing import Any

import torch


def token_with_size(number: int, nbytes: int) -> torch.Tensor:
    """A tensor of one number, which says that its storage has `nbytes`."""
    token = _plain(number)
    nominal = NominalStorage(token.nbytes)
    nominal.stand_for(number, nbytes, token.data_ptr())
    token.untyped_storage = nominal.itself
    token.nelement = nominal.nelement  # pyright: ignore[reportAttributeAccessIssue]
    token.__deepcopy__ = nominal.copy_of_token
    token.__reduce_ex__ = nominal.reduce_token  # pyright: ignore[reportAttributeAccessIssue]
    return token


class NominalStorage(torch.UntypedStorage):
    """A token's storage, as Python sees it: with the token's address, and the size of what the token stands for.

    `size()` is that of the memory which is really here. Copies and pickles of the token have no part of this.
    """

    def stand_for(self, number: int, nbytes: int, address: int) -> None:
        """Be the storage of the token at `address`, which has this number, and stands for so many bytes."""
        self._number, self._nbytes, self._address = number, nbytes, address

    def itself(self) -> NominalStorage:
        """Return this object, which the token gives when it is asked for its storage."""
        return self

    def nbytes(self) -> int:
        """The size of what the token stands for."""
        return self._nbytes

    def size(self) -> int:
        """The size of the token."""
        return super().nbytes()

    def data_ptr(self) -> int:
        """The address of the token; other tokens have others."""
        return self._address

    def nelement(self) -> float:
        """How many numbers of the token's dtype are as large as what it stands for."""
        return self._nbytes / self.size()

    def copy_of_token(self, memo: dict[int, Any]) -> torch.Tensor:
        """The token's `__deepcopy__`."""
        return _plain(self._number)

    def reduce_token(self, protocol: int) -> tuple[Any, ...]:
        """The token's `__reduce_ex__`."""
        return _plain(self._number).__reduce_ex__(protocol)


def _plain(number: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")
