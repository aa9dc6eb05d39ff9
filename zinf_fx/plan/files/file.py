"""Plan files: JSON with a schema version. Reading one executes nothing and believes nothing: what is read is checked
before it is a plan."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from zinf_fx.arguments import check_path
from zinf_fx.errors import PlanError, PlanFileError
from zinf_fx.plan.codec import decode
from zinf_fx.plan.files.parsing import parsed
from zinf_fx.plan.files.soundness import check_sound
from zinf_fx.plan.plan import FORMAT, SCHEMA, Plan
from zinf_fx.regular_files import read_at_once

# A plan of a trillion parameters takes some megabytes.
_LARGEST_FILE = 1 << 30


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file that `Plan.save` wrote.

    Raises: PlanFileError for whatever isn't a sound plan: the message names the place in the file.
    """
    check_path(path, "load_plan")
    path = Path(path)
    what = f"plan file {path}"
    try:
        text = read_at_once(path, _LARGEST_FILE).decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise PlanFileError(f"{what} has more bytes than {_LARGEST_FILE}, and no plan has") from None
        raise PlanFileError(f"{what} can't be read: {error}") from error
    return plan_from(text, what)


def plan_from(text: str, what: str) -> Plan:
    """The plan that a text of JSON stands for; `what` names it in errors. Raises: PlanFileError."""
    content = parsed(text, what, "plan", PlanFileError)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanFileError(f'{what} is JSON, but no plan: it has no field "format" with the value {FORMAT!r}')
    schema = content.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        shown = schema if type(schema) is int else type(schema).__name__
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
