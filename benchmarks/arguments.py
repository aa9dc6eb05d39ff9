"""What several benchmarks have as arguments and check of them, and the threads that they compute with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager


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
    """Open a block in which PyTorch computes with so many threads."""
    import torch  # here: some programs whose arguments these are leave it, and its memory, to their workers

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def add_gpt(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    context: int,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
) -> None:
    """Add options for the shape of a GPT: layers, their size, attention heads, and bytes of text in a sequence. By
    default it has 303 M parameters."""
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--context", type=int, default=context)
