"""Which rank saves what: each its own shares, and what several have, one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zinf_fx.checkpoint.training.holdings import Holding
from zinf_fx.checkpoint.training.layout import SavedRun
from zinf_fx.checkpoint.training.manifest import SavedBox, SavedTensor
from zinf_fx.runtime.ranks import Ranks

_WHAT = "what each rank has to save"

Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
"""A tensor's name, its box's offsets and shape, and the first element and the one behind the last."""


def divided(ranks: Ranks, tensors: Mapping[str, Holding]) -> list[SavedRun]:
    """The elements that this rank is to save, of those that it has.

    Of what several ranks have, stored tensors go to the one that has least to save so far, and ordinary ones, which may
    differ, to the first.
    """
    runs = [SavedRun(name, holding, elements) for name, holding in tensors.items() for elements in holding.own]
    if ranks.size == 1:
        return runs
    mine = {_key(run): run for run in runs}
    offers = ranks.of_all([(key, run.nbytes, run.holding.is_ordinary) for key, run in mine.items()], _WHAT)
    having: dict[Key, list[int]] = {}
    described: dict[Key, tuple[int, bool]] = {}
    for rank, found in enumerate(offers):
        for key, nbytes, is_ordinary in found:
            having.setdefault(key, []).append(rank)
            described[key] = nbytes, is_ordinary
    loads = [0] * ranks.size
    taken: list[Key] = []
    for key, several in having.items():
        nbytes, is_ordinary = described[key]
        saver = several[0] if is_ordinary else min(several, key=loads.__getitem__)
        loads[saver] += nbytes
        if saver == ranks.rank:
            taken.append(key)
    return [mine[key] for key in taken]


def merged(parts: Iterable[SavedTensor]) -> tuple[SavedTensor, ...]:
    """The tensors of which ranks saved these parts."""
    boxes: dict[str, dict[tuple, list]] = {}
    described: dict[str, SavedTensor] = {}
    for part in parts:
        described.setdefault(part.name, part)
        for box in part.boxes:
            boxes.setdefault(part.name, {}).setdefault(box.box, []).extend(box.pieces)
    return tuple(
        SavedTensor(name, one.dtype, one.shape, tuple(_in_order(box, found) for box, found in boxes[name].items()))
        for name, one in described.items()
    )


def equal_or_by_rank(ranks: Ranks, values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of each part: once, if all ranks have the same; else those of each."""
    found = ranks.of_all(values, "plain values to save")
    together: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in found for name in each):
        several = [each.get(name) for each in found]
        same = all(one == several[0] for one in several)
        together[name] = several[0] if same else {"kind": _kind(several), "ranks": several}
    return together


def _kind(several: list[Any]) -> str:
    return next(one["kind"] for one in several if one is not None)


def _key(run: SavedRun) -> Key:
    box = run.holding.box
    return run.name, box.offsets, box.shape, run.elements.start, run.elements.stop


def _in_order(box: Any, pieces: list) -> SavedBox:
    return SavedBox(box.offsets, box.shape, tuple(sorted(pieces, key=lambda piece: piece.start)))
