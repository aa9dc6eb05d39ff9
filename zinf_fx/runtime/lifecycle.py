"""Objects that are in one of a few states, and say in which one where they are used as another allows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar


class Lifecycle:
    """What is in one state at a time, of those that its class has.

    Attributes:
        state: the present one.
        what: what messages call the object.
        following: by state, those that may come next.
    """

    state: Enum
    what: ClassVar[str]
    following: ClassVar[Mapping[Enum, tuple[Enum, ...]]]

    def become(self, state: Enum) -> None:
        """From now on, be in another state, which may follow the present one."""
        assert state in self.following[self.state], f"a {self.what} that is {self.state.value} can't be {state.value}"
        self.state = state
