"""Who wraps stored parameters in FullyShardedDataParallel is told that they are divided already.

It would make one tensor in memory of all their values, and train that.
"""

from __future__ import annotations

import sys

from zinf_fx.errors import StoredTensorError

# What looks for the parameters that it is to divide, and leaves out those that are to be ignored.
_COLLECTS = "_get_orig_params"


class Undivided:
    """A tensor of which FullyShardedDataParallel asks whether it has it already."""

    @property
    def _fsdp_flattened(self) -> bool:
        """Raises: StoredTensorError where it is about to take this tensor."""
        asks = sys._getframe(1).f_back  # behind the function that reads this attribute of any tensor
        if asks is not None and asks.f_code.co_name == _COLLECTS:
            raise StoredTensorError(
                "FullyShardedDataParallel would have the values of stored parameters in memory and divide them, as "
                "zinf_fx does where they are stored: train the model without it, each rank the same, or wrap what else "
                "there is to train, with ignored_modules=[...] for the modules that have stored parameters"
            )
        return False
