"""The token: the tiny tensor that stands for a storage in graphs, and is all that is inside of a stored tensor."""

from __future__ import annotations

from typing import Any

import torch


def token_of(key: int, nbytes: int) -> torch.Tensor:
    """A tensor of one number, the key of a storage that has `nbytes` in all, on whatever ranks they are.

    Whoever divides a model into files (huggingface_hub's `get_torch_storage_size`) asks the tensors inside of a tensor
    subclass, in Python, for the sizes of their storages. The token answers with the size of what it stands for.
    PyTorch accepts plain tensors alone inside of a subclass in some places, so these answers belong to the object; it
    asks for `numel()` and `size()` itself, and sees one number of eight bytes.
    """
    token = _plain(key)
    nominal = NominalStorage(token.nbytes)
    nominal.stand_for(key, nbytes, token.data_ptr())
    token.untyped_storage = nominal.itself
    token.nelement = nominal.nelement
    token.__deepcopy__ = nominal.copy_of_token
    token.__reduce_ex__ = nominal.reduce_token
    return token


class NominalStorage(torch.UntypedStorage):
    """A token's storage, as Python sees it: with the token's address, and the size of what the token stands for.

    `size()` is that of the memory which is really here. Copies and pickles of the token have no part of this.
    """

    def stand_for(self, key: int, nbytes: int, address: int) -> None:
        """Be the storage of the token at `address`, which stands for `nbytes` under `key`."""
        self._key, self._nbytes, self._address = key, nbytes, address

    def itself(self) -> NominalStorage:
        """This: what the token answers when it is asked for its storage."""
        return self

    def nbytes(self) -> int:
        """Of what the token stands for."""
        return self._nbytes

    def size(self) -> int:
        """Of the token."""
        return super().nbytes()

    def data_ptr(self) -> int:
        """Of the token; other tokens have others."""
        return self._address

    def nelement(self) -> float:
        """How many numbers of the token's dtype are as large as what it stands for."""
        return self._nbytes / self.size()

    def copy_of_token(self, memo: dict[int, Any]) -> torch.Tensor:
        """The token's `__deepcopy__`."""
        return _plain(self._key)

    def reduce_token(self, protocol: int) -> tuple[Any, ...]:
        """The token's `__reduce_ex__`."""
        return _plain(self._key).__reduce_ex__(protocol)


def _plain(key: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(key, dtype=torch.int64, device="cpu")
