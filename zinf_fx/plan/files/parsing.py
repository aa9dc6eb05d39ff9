"""JSON that somebody else may have written: what Python's parser takes, and JSON doesn't mean, is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from zinf_fx.config import LARGEST
from zinf_fx.errors import ZinfError


def parsed(text: str, what: str, noun: str, refusal: type[ZinfError]) -> Any:
    """What a text of JSON says. `what` names the text in errors, `noun` what it should be.

    Raises: `refusal` for what is no JSON, for a name given twice, and for numbers that are none, or too long.
    """

    def refused(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of a {noun}")

    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_whole, parse_constant=refused)
    except RecursionError:
        raise refusal(f"{what} is nested too deeply: a {noun} has a few levels") from None
    except ValueError as error:  # of JSON, and of our own hooks
        raise refusal(f"{what} is not JSON of a {noun}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"an object has {name[:60]!r} twice")
        values[name] = value
    return values


def _whole(digits: str) -> int:
    if len(digits) > len(str(LARGEST)) + 1:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
