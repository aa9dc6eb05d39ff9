"""TARGET on the command line: `module:factory` or `path/to/file.py:factory`.

The factory takes no arguments and returns `(model, example_inputs)`; `model(*example_inputs)` is what gets planned.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from zinf_fx.arguments import did_you_mean
from zinf_fx.cli.arguments import TARGET_HELP
from zinf_fx.errors import ZinfError

Built = tuple[torch.nn.Module, Sequence[Any] | Mapping[str, Any]]


class TargetError(ZinfError):
    """A TARGET that can't be used."""


def build(target: str) -> Built:
    """The model and example inputs of a TARGET, on the meta device if its factory can do that.

    Raises: TargetError.
    """
    location, colon, name = target.rpartition(":")
    if not (location and name and colon):
        raise TargetError(f"target '{target}' is not of the form {TARGET_HELP.split(';')[0]}")
    factory = _factory(_module(location), location, name)
    try:
        with torch.device("meta"):
            return _checked(factory(), target)
    except TargetError:
        raise
    except Exception as error:
        print(
            f"zinf-fx: {target} can't be built on the meta device ({_brief(error)}): building it in memory",
            file=sys.stderr,
        )
    try:
        return _checked(factory(), target)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{target} raised {_brief(error)}") from error


@contextmanager
def running(what: str) -> Iterator[None]:
    """A block that runs a target's code without values.

    torch 2.15 logs what an operation without values raises, with a traceback, before the exception arrives here.

    Raises: TargetError for whatever the code raises, with `what` raised it; an error of zinf_fx's as it is.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    except ZinfError:
        raise
    except Exception as error:
        raise TargetError(f"{what} raised {_brief(error)}") from error
    finally:
        log.disabled = before


def _module(location: str) -> ModuleType:
    is_file = location.endswith(".py") or os.sep in location
    if is_file and not Path(location).is_file():
        raise TargetError(f"there is no file '{location}'")
    try:
        return _import_file(Path(location)) if is_file else _import_module(location)
    except ModuleNotFoundError as error:
        if not is_file and error.name and (location == error.name or location.startswith(f"{error.name}.")):
            raise TargetError(f"there is no module '{location}' (a file is given as path/to/file.py)") from error
        raise TargetError(f"importing '{location}' raised {_brief(error)}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing '{location}' raised {_brief(error)}") from error


def _import_module(name: str) -> ModuleType:
    _search_first(Path.cwd())  # as `python -m` does
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    _search_first(path.resolve().parent)  # its neighbours can be imported, as when it is run
    name = f"zinf_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_first(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _factory(module: ModuleType, location: str, name: str) -> Callable[[], object]:
    factory: Any = module
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if factory is None:
        there = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        public = [n for n in there if not n.startswith("_")]
        listed = ", ".join(public) or "none"
        raise TargetError(f"'{location}' has no '{name}'; its functions: {listed}{did_you_mean(name, public)}")
    if not callable(factory):
        raise TargetError(f"'{name}' in '{location}' is a {type(factory).__name__}, not a function")
    return factory


def _checked(result: object, target: str) -> Built:
    wanted = "it must return (model, example_inputs), a module and a tuple, list or mapping"
    if not isinstance(result, tuple) or len(result) != 2:
        returned = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise TargetError(f"{target} returned {returned}: {wanted}")
    model, inputs = result
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{target} returned a {type(model).__name__} as the model: {wanted}")
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise TargetError(f"{target} returned a {type(inputs).__name__} as the example inputs: {wanted}")
    return model, inputs


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
