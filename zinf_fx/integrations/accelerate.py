"""accelerate, through which transformers' Trainer compiles, accepts the backends of a closed list: "zinf" joins it.

Import this module before the Trainer is made: `import zinf_fx.integrations.accelerate`.
"""

from __future__ import annotations

from accelerate.utils.dataclasses import DynamoBackend

NAME = "ZINF"


def add_member(kind: type, name: str) -> None:
    """Let an enumeration of strings have one more member, whose value is its name."""
    member = str.__new__(kind, name)
    member._name_ = member._value_ = name
    setattr(kind, name, member)
    kind._member_map_[name] = kind._value2member_map_[name] = member
    kind._member_names_.append(name)


if NAME not in DynamoBackend.__members__:
    add_member(DynamoBackend, NAME)
