"""Plan files: JSON with a schema version. Reading one executes nothing and believes nothing: what is read is checked
before it is a plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from zinf_fx.config import LARGEST
from zinf_fx.errors import PlanError, PlanFileError
from zinf_fx.plan.codec import decode
from zinf_fx.plan.files.soundness import check_sound
from zinf_fx.plan.plan import FORMAT, SCHEMA, Plan

# A plan of a trillion parameters takes some megabytes.
_LARGEST_FILE = 1 << 30


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file that `Plan.save` wrote.

    Raises: PlanFileError for whatever isn't a sound plan: the message names the place in the file.
    """
    path = Path(path)
    what = f"plan file {path}"
    try:
        with path.open("rb") as file:
            found = file.read(_LARGEST_FILE + 1)  # what is no regular file doesn't say how much there is
        if len(found) > _LARGEST_FILE:
            raise PlanFileError(f"{what} has more bytes than {_LARGEST_FILE}, and no plan has")
        text = found.decode("utf-8")
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{what} can't be read: {error}") from error
    return plan_from(text, what)


def plan_from(text: str, what: str) -> Plan:
    """The plan that a text of JSON stands for; `what` names it in errors. Raises: PlanFileError."""
    content = _parsed(text, what)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanFileError(f'{what} is JSON, but no plan: it has no field "format" with the value {FORMAT!r}')
    found = content.pop("schema", None)
    if type(found) is not int or found != SCHEMA:
        shown = found if type(found) is int else type(found).__name__
        raise PlanFileError(f"{what} has schema {shown}, and this version of zinf_fx reads {SCHEMA}: export it again")
    del content["format"]
    plan = decode(Plan, content, what)
    try:
        check_sound(plan)
    except PlanFileError:
        raise
    except PlanError as error:
        raise PlanFileError(f"{what}: {error}") from error
    return plan


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_whole, parse_constant=_refused)
    except RecursionError:
        raise PlanFileError(f"{what} is nested too deeply: a plan has a few levels") from None
    except ValueError as error:  # of JSON, and of our own hooks
        raise PlanFileError(f"{what} is not JSON of a plan: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"an object has {name[:60]!r} twice")
        found[name] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > len(str(LARGEST)) + 1:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of a plan")
