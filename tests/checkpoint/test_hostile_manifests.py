"""Whatever a manifest with a right checksum says, it is refused at once, or what it names is loaded."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import slow
from jobs import Job, assert_equal
from manifests import mutated, nested, read, write

import zinf_fx
from zinf_fx.checkpoint.catalog import checkpoints_in, look_at
from zinf_fx.checkpoint.load import damages_of
from zinf_fx.checkpoint.manifest import from_text
from zinf_fx.cli import main
from zinf_fx.errors import CheckpointError


class _Saved:
    """A checkpoint whose manifest is changed, and a job that loads it."""

    def __init__(self, root: Path, fields: dict[str, Any]) -> None:
        first = Job(root / "first", seed=1, fields=fields)
        first.train(3)
        self.directory = root / "saved"
        first.save(self.directory)
        self.expected, self.content = _tensors(first), read(self.directory)
        self.first = first  # whose store has the bytes of a generation
        self.other = Job(root / "other", seed=2, fields=fields)
        self.other.train(2)

    def refused(self, content: dict[str, Any] | str) -> str:
        """Why another manifest is refused, which is found out at once, and changes nothing."""
        write(self.directory, content)
        before = _tensors(self.other)
        with _at_once(), pytest.raises(CheckpointError) as caught:
            self.other.load(self.directory)
        assert_equal(_tensors(self.other), before)
        return str(caught.value)

    def try_out(self, seed: int) -> bool:
        """Return whether a mutation is loaded; what is looked at and verified is at least no other error."""
        write(self.directory, content := mutated(self.content, seed))
        with _at_once():
            (checkpoint,) = checkpoints_in(self.directory)
        if checkpoint.manifest is not None:
            with _at_once():
                damages_of(self.directory, checkpoint.manifest, lambda nbytes: None)
        try:
            with _at_once():
                self.other.load(self.directory)
        except CheckpointError:
            return False
        except KeyError:  # of the job, which is given the values that there are
            assert "done" not in content["values"]
        assert_equal(_tensors(self.other), self._expected_of(content))
        return True

    def _expected_of(self, content: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what was saved, with the states under the names that a manifest gives them: an optimizer may have
        any."""
        saved, hostile = (described["values"]["optimizer"]["state"] for described in (self.content, content))
        (group,) = self.content["values"]["optimizer"]["groups"]
        expected = dict(self.expected)
        for number, parameter in enumerate(group["params"]):
            names = {value["$kept"]: name for name, value in _kept(hostile.get(parameter, {}))}
            states = {name: value["$kept"] for name, value in _kept(saved.get(parameter, {}))}
            values = {names[kept]: expected.pop(f"state.{number}.{name}") for name, kept in states.items()}
            expected |= {f"state.{number}.{name}": value for name, value in values.items()}
        return expected


def _tensors(job: Job) -> dict[str, torch.Tensor]:
    """Return those that files have: what is among the plain values is as these say."""
    return {name: value for name, value in job.values().items() if not name.endswith("step")}


def _kept(state: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the states of a parameter, by name, that files have."""
    return [(name, value) for name, value in state.items() if isinstance(value, dict) and "$kept" in value]


@contextmanager
def _at_once() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before, begun = signal.signal(signal.SIGALRM, late), time.process_time()
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begun < 1


@pytest.fixture(scope="module", params=["copies", slow("generation")])
def once_saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Saved:
    fields = {"checksum": False} if request.param == "copies" else {}
    return _Saved(tmp_path_factory.mktemp(request.param), fields)


@pytest.fixture
def saved(once_saved: _Saved) -> _Saved:
    """Save a model; the manifest is there as it was saved, and loaded."""
    write(once_saved.directory, once_saved.content)
    once_saved.other.load(once_saved.directory)
    return once_saved


def test_mutations_end_in_an_error_of_ours_or_equal_values(saved: _Saved):
    loaded = sum(saved.try_out(seed) for seed in range(100))
    assert 0 < loaded < 100


@pytest.mark.slow
def test_ten_thousand_mutations(saved: _Saved):
    for seed in range(1000, 6000):
        saved.try_out(seed)


def tensor(shape: list[int], boxes: list[tuple[list[int], list[int]]], **fields: Any) -> dict[str, Any]:
    """Describe a tensor in boxes, each in a piece."""
    described = []
    for offsets, extent in boxes:
        piece = {"start": 0, "count": max(math.prod(extent), 1), "file": 0, "offset": 0, "crc32c": 0}
        described.append({"offsets": offsets, "shape": extent, "pieces": [piece]})
    return {"name": "model/x", "dtype": "float32", "shape": shape, "boxes": described, **fields}


def with_tensor(content: dict[str, Any], *arguments: Any, **fields: Any) -> dict[str, Any]:
    return {**content, "tensors": [tensor(*arguments, **fields)], "same": []}


def with_piece(content: dict[str, Any], **fields: int) -> dict[str, Any]:
    first = content["tensors"][0]
    (box,) = first["boxes"]
    pieces = [{**box["pieces"][0], **fields}, *box["pieces"][1:]]
    return {**content, "tensors": [{**first, "boxes": [{**box, "pieces": pieces}]}, *content["tensors"][1:]]}


def with_values(content: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**content, "values": {**content["values"], **parts}}


def with_option(content: dict[str, Any], value: Any) -> dict[str, Any]:
    (group,) = content["values"]["optimizer"]["groups"]
    groups = [{**group, "options": {**group["options"], "lr": value}}]
    return with_values(content, optimizer={**content["values"]["optimizer"], "groups": groups})


def with_file(content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    first, *others = content["files"]
    return {**content, "files": [{**first, **fields}, *others]}


def twice(content: dict[str, Any]) -> dict[str, Any]:
    """Two tensors in one place, which would be written over each other."""
    first, *others = content["tensors"]
    kinds = [(entry["dtype"], entry["shape"]) for entry in others]
    number = kinds.index((first["dtype"], first["shape"]))
    others[number] = {**others[number], "boxes": first["boxes"]}
    return {**content, "tensors": [first, *others]}


def with_nobody(content: dict[str, Any]) -> dict[str, Any]:
    return {"nobody": {}, **content["values"]["optimizer"]["state"]}


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "values nested 900 deep": (
        lambda c: with_values(c, done={"kind": "value", "value": nested(900)}),
        "nested in more",
    ),
    "an option nested 101 deep": (lambda c: with_option(c, nested(101)), "nested in more than 100 levels"),
    "files nested 900 deep": (lambda c: {**c, "files": nested(900)}, "is not a table of path"),
    "nested without an end": (lambda c: '{"format":"zinf_fx checkpoint","schema":' + "[" * 99999 + "}", "nested too"),
    "boxes that overlap": (
        lambda c: with_tensor(c, [12_000, 12_000], [([n, n], [12_000 - n, 12_000 - n]) for n in range(12_000)]),
        "the boxes of 'model/x' are not all of it",
    ),
    "as many elements, and two boxes in one place": (
        lambda c: with_tensor(c, [4, 4], [([0, 0], [2, 4]), ([0, 0], [2, 4])]),
        "the boxes of 'model/x' are not all of it",
    ),
    "columns that overlap": (
        lambda c: with_tensor(c, [6000, 12_000], [([0, n // 2 * 2], [6000, 1]) for n in range(12_000)]),
        "the boxes of 'model/x' are not all of it",
    ),
    "boxes of fewer dimensions": (lambda c: with_tensor(c, [4, 4], [([0], [16])]), "are not all of it"),
    "offsets of fewer dimensions": (lambda c: with_tensor(c, [4, 4], [([0], [4, 4])]), "are not all of it"),
    "boxes of more dimensions": (lambda c: with_tensor(c, [16], [([0, 0], [4, 4])]), "are not all of it"),
    "a box outside": (lambda c: with_tensor(c, [4], [([4], [4])]), "are not all of it"),
    "boxes of two to the thirtieth corners": (
        lambda c: with_tensor(c, [2] * 30, [([n] * 30, [1] * 30) for n in range(2)]),
        "are not all of it",
    ),
    "a shape of many dimensions": (lambda c: with_tensor(c, [2**62] * 10**5, []), "100000 dimensions that no"),
    "a shape beyond memory": (lambda c: with_tensor(c, [2**40, 2**40], []), "2 dimensions that no tensor has"),
    "an empty shape beyond memory": (lambda c: with_tensor(c, [0, 2**62, 2**62], []), "that no tensor has"),
    "a huge number": (lambda c: {**c, "ranks": 10**30}, "not JSON of a manifest: a number of 31 digits"),
    "a number out of range": (lambda c: {**c, "ranks": 2**63}, "ranks=a number beyond 2^63 is out of range"),
    "a float": (lambda c: {**c, "ranks": 1.0}, "ranks=1.0 is not a whole number"),
    "no number": (lambda c: {**c, "ranks": float("nan")}, "NaN is no number"),
    "an infinite number": (lambda c: with_option(c, float("inf")), "Infinity is no number"),
    "a float without an end": (
        lambda c: json.dumps(with_option(c, "@")).replace('"@"', "1e999"),
        "a number among its plain values is beyond all numbers",
    ),
    "a name given twice": (lambda c: json.dumps(c)[:-1] + ',"ranks":2}', "an object has 'ranks' twice"),
    "a negative offset": (lambda c: with_piece(c, offset=-4096), "offset=-4096 is less than 0"),
    "a negative size": (lambda c: with_tensor(c, [-4], []), r"shape[0]=-4 is less than 0"),
    "a piece of nothing": (lambda c: with_piece(c, count=0), "count=0 is less than 1"),
    "a piece behind the end": (lambda c: with_piece(c, offset=2**61), "lies behind the end of its file"),
    "a piece of another file": (lambda c: with_piece(c, file=99), "lies behind the end of its file"),
    "two tensors in one place": (twice, "lies where another one does"),
    "padding of a file": (lambda c: with_piece(c, padding=4096), "a piece of"),
    "a tensor twice": (lambda c: {**c, "tensors": c["tensors"] + c["tensors"][:1]}, "has a tensor twice"),
    "a name of nothing": (lambda c: {**c, "same": [["model/a", "model/b"]]}, "the name of one that is not there"),
    "a name twice": (lambda c: {**c, "same": c["same"] * 2}, "has a tensor twice"),
    "a dtype of no elements": (lambda c: with_tensor(c, [4], [([0], [4])], dtype="load"), "'load' is no dtype"),
    "a dtype with a scale": (lambda c: with_tensor(c, [4], [([0], [4])], dtype="qint8"), "'qint8' is no dtype"),
    "a file in another directory": (lambda c: with_file(c, path="d/thesis.tex"), "which is none that a save writes"),
    "a file of another name": (lambda c: with_file(c, path="lock"), "which is none that a save writes"),
    "the manifest as a file": (lambda c: with_file(c, path="manifest.json"), "which is none that a save writes"),
    "a file of a rank of a thousand digits": (
        lambda c: with_file(c, path=f"data-00000000-{'1' * 5000}-0.extents", of_store=True),
        "which is none that a save writes",
    ),
    "a copy that is a store's": (
        lambda c: with_file(c, of_store=not c["files"][0].get("of_store", False)),
        "which is none that a save writes",
    ),
    "a file twice": (lambda c: {**c, "files": [*c["files"], c["files"][0]]}, "names a file twice"),
    "a time of no calendar": (lambda c: {**c, "time": "2026"}, "has the time '2026'"),
    "a time without a zone": (lambda c: {**c, "time": "2026-11-22T21:14:09"}, "has the time"),
    "a time that nothing comes after": (lambda c: {**c, "time": "9999-12-31T23:59:59+00:00"}, "has the time"),
    "values of no part": (lambda c: {**c, "values": {"model": []}}, "is no kind of part"),
    "a part of no kind": (lambda c: with_values(c, model={"kind": "code"}), "'code' is no kind of part"),
    "a part without its fields": (lambda c: with_values(c, model={"kind": "module"}), "there is no field 'extra'"),
    "ranks that are no list": (lambda c: with_values(c, done={"kind": "value", "ranks": 7}), "7 is no list"),
    "groups without parameters": (
        lambda c: with_values(c, optimizer={**c["values"]["optimizer"], "groups": [{}]}),
        "there is no field 'params'",
    ),
    "a format of nothing": (
        lambda c: with_values(c, model={**c["values"]["model"], "quantised": {"last.weight": []}}),
        "is no format",
    ),
    "states of no parameter": (
        lambda c: with_values(
            c, optimizer={**c["values"]["optimizer"], "state": {"nobody": {}, **c["values"]["optimizer"]["state"]}}
        ),
        "has no parameter 'nobody'",
    ),
    "gradients that nobody names": (
        lambda c: with_values(c, gradients={"kind": "gradients", "of": {}}),
        "is in the checkpoint alone",
    ),
    "a value of no kind": (
        lambda c: with_values(c, schedule={"kind": "state", "state": {"$evil": 1}}),
        "a value of the checkpoint, of kind '$evil', can't be read",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused_at_once(saved: _Saved, name: str):
    change, says = HOSTILE[name]
    message = saved.refused(change(saved.content))
    assert says in message and len(message) < 2000


def test_one_tensor_is_kept_under_one_name(saved: _Saved):
    """Else some bytes could ask for any amount of memory."""
    kept = {"$kept": "model/last.bias"}
    content = with_values(saved.content, schedule={"kind": "state", "state": [kept] * 12_000})
    assert "names the tensor 'model/last.bias' twice" in saved.refused(content)


def test_what_is_looked_up_in_it_is_refused_as_well(saved: _Saved, capsys: pytest.CaptureFixture[str]):
    for change in (HOSTILE[name][0] for name in ("values nested 900 deep", "values of no part")):
        write(saved.directory, change(saved.content))
        for action in ("list", "verify", "inspect", "convert"):
            rest = ["-o", str(saved.directory.parent / "out")] if action == "convert" else []
            assert main(["checkpoint", action, str(saved.directory), *rest]) in (0, 1, 2)
        assert look_at(saved.directory).damage is not None
        assert "Traceback" not in capsys.readouterr().err


def test_a_state_that_is_refused_by_who_is_to_have_it(saved: _Saved):
    write(saved.directory, with_values(saved.content, scaler={"kind": "state", "state": {"x": 1}}))
    with pytest.raises(CheckpointError, match="can't be taken: KeyError"):
        saved.other.load(saved.directory)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ([], [([], [])]),
        ([0], [([0], [0])]),
        ([0, 4], []),
        ([5], [([0], [2]), ([2], [3]), ([5], [0])]),
        ([4, 6], [([0, 0], [4, 2]), ([0, 2], [2, 4]), ([2, 2], [2, 4])]),
        (
            [3, 3],
            [([0, 0], [2, 1]), ([2, 0], [1, 2]), ([1, 2], [2, 1]), ([0, 1], [1, 2]), ([1, 1], [1, 1])],
        ),  # a spiral
        ([2, 2, 2], [([a, b, c], [1, 1, 1]) for a in range(2) for b in range(2) for c in range(2)]),
        ([4096, 3], [([n, 0], [1, 3]) for n in range(4096)]),
    ],
)
def test_boxes_that_are_all_of_a_tensor(saved: _Saved, shape: list[int], boxes: list[tuple[list[int], list[int]]]):
    entry, offset = tensor(shape, boxes), 0
    for box in entry["boxes"]:
        (piece,) = box["pieces"]
        box["pieces"] = [{**piece, "offset": offset}] if all(box["shape"]) else []
        offset += 4 * sum(piece["count"] for piece in box["pieces"])
    file = {"path": "data-00000000-0-0.safetensors", "nbytes": offset}
    content = {**saved.content, "tensors": [entry], "same": [], "files": [file], "values": {}}
    write(saved.directory, content)
    assert from_text((saved.directory / "manifest.json").read_bytes(), "it").tensors[0].name == "model/x"


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "large": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_that_is_no_file(saved: _Saved, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]):
    """Nothing that looks at it waits for it, or reads without an end."""
    directory = tmp_path / "run" / "step-00000001"
    directory.mkdir(parents=True)
    KINDS[kind](directory / "manifest.json")
    job = saved.other
    manager = zinf_fx.CheckpointManager(tmp_path / "run", job.model, job.adam, **job.extra)
    with _at_once():
        for attempt in (
            lambda: job.load(directory),
            lambda: job.save(directory),
            manager.resume,
            lambda: zinf_fx.attach_base(torch.nn.Linear(2, 2), directory),
        ):
            with pytest.raises(CheckpointError):
                attempt()
        assert look_at(directory).damage is not None
        for command in (["clean"], ["checkpoint", "list"], ["checkpoint", "verify"], ["checkpoint", "inspect"]):
            assert main([*command, str(directory)]) in (0, 1, 2)
    assert set(os.listdir(directory)) <= {"manifest.json", "lock"} and "Traceback" not in capsys.readouterr().err
