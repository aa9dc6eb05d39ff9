"""accelerate, through which transformers' Trainer compiles, accepts the backends of a closed list: "zinf" joins it.

Import this module before the Trainer is made: `import zinf_fx.integrations.accelerate`.
"""

from __future__ import annotations

from accelerate.utils.dataclasses import DynamoBackend

NAME = "ZINF"


def _missing(cls: type, value: object) -> object:
    """What an enumeration asks for a value that it doesn't have."""
    if value != NAME:
        return None
    member = str.__new__(cls, NAME)
    member._name_ = member._value_ = NAME
    return member


DynamoBackend._missing_ = classmethod(_missing)
