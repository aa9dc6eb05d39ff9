"""What several benchmarks have as arguments and check of them, and the threads that they compute with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def check(options: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End the program, saying which, where one of the named numbers, or of the named lists of them, is below 1, or a
    model's heads don't divide its hidden size."""
    for name in names:
        given = getattr(args, name)
        for number in given if isinstance(given, list) else [given]:
            if number < 1:
                options.error(f"--{name.replace('_', '-')} must be at least 1, not {number}")
    if "heads" in names and args.hidden % args.heads:
        options.error(f"--hidden ({args.hidden}) must be a multiple of --heads ({args.heads})")


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """A block in which PyTorch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def add_gpt(parser: argparse.ArgumentParser, context: int) -> None:
    """The shape of a GPT, by default of 303 M parameters; `context`: bytes of text in a sequence, by default."""
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=context)
