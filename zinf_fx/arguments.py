"""Checks of what public functions are given, and what somebody who mistyped may have meant."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches

from zinf_fx.errors import ConfigError

LARGEST = 2**63 - 1
"""The largest whole number that means something, as bytes, elements or ranks."""


def shortened(value: object) -> str:
    """A value in an error, which a long one must not flood."""
    if isinstance(value, int) and abs(value) > LARGEST:  # of thousands of digits, perhaps, which Python won't print
        return "a number beyond 2^63"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def did_you_mean(given: object, accepted: Iterable[str]) -> str:
    """A question to end an error with; empty where nothing that is accepted looks like it."""
    names = {_plain(name): name for name in accepted}
    near = get_close_matches(_plain(given), names, n=1, cutoff=0.7) if isinstance(given, str) else []
    return f". Did you mean '{names[near[0]]}'?" if near else ""


def check_model(model: object, function: str) -> None:
    """Raises: ConfigError for what is no module; `function` names who was given it."""
    import torch  # which takes seconds, and `--help` needs none of it

    if isinstance(model, torch.nn.Module):
        return
    given, hint = f"a {type(model).__name__}", "give a torch.nn.Module"
    if isinstance(model, type):
        given, hint = f"the class {model.__name__}", f"give a model, such as {model.__name__}(...)"
    elif isinstance(model, (list, tuple)) and any(isinstance(part, torch.nn.Module) for part in model):
        hint = f"call it for each, or give torch.nn.ModuleList(...) of them ({len(model)} were found)"
    elif isinstance(model, (str, os.PathLike)):
        given, hint = f"the path {os.fspath(model)!r}", "give the model there, and the path behind it if it takes one"
    raise ConfigError(f"{function}() takes a model, found {given}: {hint}")


def check_path(path: object, function: str) -> None:
    """Raises: ConfigError for what is no path; `function` names who was given it."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{function}() takes a path, found a {type(path).__name__}: give a str or a pathlib.Path")


def _plain(name: object) -> str:
    return str(name).lower().replace("_", "-")
