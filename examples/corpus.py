"""Bytes to train on, bytes held out, and how well byte counts alone predict the latter."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SIZE_LIMIT = 16 * 2**20
HELD_OUT_EVERY = 10


class CorpusError(Exception):
    """The text is missing, unreadable, or too short for what was asked."""


@dataclass(frozen=True)
class Corpus:
    """Two one-dimensional uint8 tensors with no file in common (or, for a few files, the first 9/10 and the rest)."""

    name: str
    training: Tensor
    held_out: Tensor


def load_corpus(path: Path | None = None) -> Corpus:
    """At most ``SIZE_LIMIT`` bytes of a file or directory, or else of the standard library's top-level modules.

    Of a directory: every file below it in sorted order, without hidden ones and binary ones (those with a zero byte).
    """
    if path is None:
        name, files = "the standard library's source", _standard_library_files()
    else:
        name, files = str(path), _files_under(path)
    texts = [text for text in _read(files) if b"\0" not in text]
    if not texts:
        raise CorpusError(f"no text in {name}")
    if len(texts) < HELD_OUT_EVERY:
        whole = b"".join(texts)
        cut = len(whole) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
        return Corpus(name, _as_tensor(whole[:cut]), _as_tensor(whole[cut:]))
    held_out = b"".join(texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    training = b"".join(text for i, text in enumerate(texts, start=1) if i % HELD_OUT_EVERY)
    return Corpus(name, _as_tensor(training), _as_tensor(held_out))


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random ``(tokens, targets)``, each ``[batch, context]`` int64, the same for the same seed."""
    if len(text) <= context:
        raise CorpusError(f"the text to train on has {len(text)} bytes; a context of {context} needs {context + 1}")
    return _random_batches(text, batch, context, torch.Generator().manual_seed(seed))


def evaluation_batches(text: Tensor, batch: int, context: int, limit: int) -> list[tuple[Tensor, Tensor]]:
    """At most ``limit`` full batches of windows that don't overlap, spread evenly over ``text``."""
    available = (len(text) - 1) // context
    count = min(limit, available // batch)
    if count == 0:
        raise CorpusError(
            f"the held-out text has {len(text)} bytes; one batch of {batch} x {context} needs {batch * context + 1}: "
            "give a longer text, or a smaller --batch or --context"
        )
    starts = torch.arange(count * batch) * available // (count * batch) * context
    windows = text[starts[:, None] + torch.arange(context + 1)]
    return [_tokens_and_targets(part) for part in windows.split(batch)]


def unigram_loss(training: Tensor, evaluation: list[tuple[Tensor, Tensor]]) -> float:
    """Nats per byte of predicting each target from the frequencies of bytes in ``training`` (plus one each)."""
    return -float(torch.cat([_frequencies(training).log()[targets].flatten() for _, targets in evaluation]).mean())


def bigram_loss(training: Tensor, evaluation: list[tuple[Tensor, Tensor]]) -> float:
    """The same from the byte before: pair counts, with the byte frequencies added as one more observation."""
    text = training.long()
    pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256).view(256, 256).double()
    logs = ((pairs + _frequencies(training)) / (pairs.sum(dim=1, keepdim=True) + 1)).log()
    return -float(torch.cat([logs[tokens, targets].flatten() for tokens, targets in evaluation]).mean())


def bits(nats: float) -> float:
    return nats / math.log(2)


def _random_batches(
    text: Tensor, batch: int, context: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    span = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        yield _tokens_and_targets(text[starts + span])


def _frequencies(text: Tensor) -> Tensor:
    counts = torch.bincount(text.long(), minlength=256).double() + 1
    return counts / counts.sum()


def _tokens_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1].long(), windows[:, 1:].long()


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # The _sysconfigdata modules record how this interpreter was built: not the same on two machines.
    files = sorted(file for file in root.glob("*.py") if not file.name.startswith("_sysconfigdata"))
    if not files:
        raise CorpusError(f"no .py files in {root}: this Python comes without its sources, give --text PATH")
    return files


def _files_under(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"no such file or directory: {path}")
    visible = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
    return sorted(file for file in visible if file.is_file())


def _read(files: list[Path]) -> list[bytes]:
    texts, room = [], SIZE_LIMIT
    for file in files:
        try:
            with file.open("rb") as stream:
                texts.append(stream.read(room))
        except OSError as error:
            raise CorpusError(f"can't read {file}: {error.strerror}") from error
        room -= len(texts[-1])
        if room == 0:
            break
    return texts


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
