"""Plan files: what is written is read back, and is as the schema says; what is broken or hostile is refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
from gate import slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zinf_fx
from zinf_fx.errors import ConfigError, PlanError, PlanFileError
from zinf_fx.plan.codec import dtypes
from zinf_fx.plan.files import file
from zinf_fx.plan.files.file import plan_from
from zinf_fx.plan.files.json_schema import schema
from zinf_fx.plan.plan import SCHEMA, Plan

PUBLISHED = Path(__file__).parents[2] / "docs" / "plan.schema.json"


class Net(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        x = self.layers[2](self.layers[1](x).tanh())
        return x.square().sum()


def exported(**options: object) -> Plan:
    with torch.device("meta"):
        return zinf_fx.export_plan(Net(), (torch.empty(4, 64),), **{"placement": "nvme", **options})


@cache
def content() -> dict[str, Any]:
    """Return the content of a file, as other programs see it."""
    with tempfile.TemporaryDirectory() as folder:
        exported(activations="offload", tile="8KiB").save(path := Path(folder) / "plan.json")
        return json.loads(path.read_text())


@pytest.mark.parametrize(
    "options",
    [
        slow({}),
        {"device_memory": "80KiB"},
        slow({"host_memory": "1MiB", "chunk": "64KiB"}),
        {"activations": 1, "prefetch": None},
    ],
)
def test_what_is_written_is_read_back_and_described_by_the_schema(tmp_path: Path, options: dict):
    plan = exported(**options)
    plan.save(tmp_path / "plan.json")
    assert zinf_fx.load_plan(tmp_path / "plan.json") == plan
    jsonschema.validate(json.loads((tmp_path / "plan.json").read_text()), json.loads(PUBLISHED.read_text()))


def test_the_dtypes_are_looked_up_once():
    """All that torch has are looked up: a plan names one for every tile and every operator."""
    assert dtypes() is dtypes() and dtypes()["bfloat16"] is torch.bfloat16


def test_the_published_schema_is_that_of_the_code():
    """Of PyTorch's dtypes, it has those of the oldest version: 2.15 adds one."""
    published = json.loads(PUBLISHED.read_text())
    known = published["$defs"]["Tile"]["properties"]["dtype"]["enum"]
    assert set(dtypes()) - set(known) <= {"bcomplex32"} and set(known) <= set(dtypes())
    with mock.patch("zinf_fx.plan.files.json_schema.dtypes", lambda: known):
        assert published == json.loads(json.dumps(schema())), "python -m zinf_fx.plan.files.json_schema"
    jsonschema.Draft202012Validator.check_schema(schema())


def test_other_fields_take_another_number() -> None:
    """Else a file with the fields of yesterday is refused for one of them, and nobody is told to export it again."""
    published = json.loads(PUBLISHED.read_text())
    del published["$defs"]["Tile"]["properties"]["dtype"]
    digest = hashlib.sha256(json.dumps(published).encode()).hexdigest()[:12]
    assert (SCHEMA, digest) == (11, "afd1c222adb4"), "raise SCHEMA in zinf_fx/plan/plan.py, and put both here"


def event(kind: str) -> Callable[[dict], dict]:
    return lambda plan: next(e for e in plan["graphs"][0]["events"] if e["kind"] == kind)


def swap(plan: dict, first: str, second: str) -> None:
    """An event stands before one that it must follow: a circle of what waits for what."""
    events = plan["graphs"][0]["events"]
    index = next(n for n, e in enumerate(events) if e["kind"] == first and not {"for_backward", "resident"} & e.keys())
    other = next(n for n, e in enumerate(events) if e["kind"] == second and e["tile"] == events[index]["tile"])
    events[index]["kind"], events[other]["kind"] = second, first
    for number in (index, other):
        events[number].pop("offset", None)


def overlap(plan: dict) -> None:
    """Put all buffers at one place."""
    for graph in plan["graphs"]:
        for entry in graph["events"]:
            if "offset" in entry:
                entry["offset"] = 0


BROKEN: dict[str, tuple[Callable[[dict], object], str]] = {
    "no format": (lambda p: p.pop("format"), "no plan: it has no field"),
    "schema of tomorrow": (lambda p: p.update(schema=SCHEMA + 1), f"has schema {SCHEMA + 1}, and this version"),
    "schema of yesterday": (lambda p: p.update(schema=1), f"has schema 1, and .* reads {SCHEMA}: export it again"),
    "schema as text": (lambda p: p.update(schema="1"), "has schema str"),
    "missing field": (lambda p: p.pop("config"), "'config' is missing"),
    "missing option": (
        lambda p: p["config"].pop("chunk"),
        r"config: 'chunk' is missing; needed: placement",
    ),
    "unknown field": (lambda p: p.update(run="os.system('x')"), "unknown field 'run'"),
    "unknown option": (
        lambda p: p["config"].update(evil=1),
        "config: unknown field 'evil'; accepted: p",
    ),
    "micro-batches that are to be decided": (
        lambda p: p["config"].update(micro_batches="auto"),
        "config: micro_batches is not decided",
    ),
    "option of a megabyte": (lambda p: p["config"].update(placement="x" * 10**6), r"config: placement='xxx"),
    "option out of range": (
        lambda p: p["config"].update(chunk=1),
        r"config: chunk=1 bytes is too small: the least",
    ),
    "stage as a float": (lambda p: p["config"]["placement"].update(stage=1.0), "placement has stage 1.0"),
    "an attribute of torch": (
        lambda p: p["config"].update(reduce_dtype="load"),
        "reduce_dtype='load' is no dtype",
    ),
    "commands for a terminal": (
        lambda p: p["graphs"][0]["tiles"][0].update(name="\x1b[2J"),
        r"tiles\[0\]\.name='\\x1b\[2J' has characters that can't be printed",
    ),
    "half a character": (
        lambda p: p["fingerprint"]["lines"].append("\ud800"),
        r"fingerprint\.lines\[\d+\]='\\ud800' has characters that can't be printed",
    ),
    "store in a plan": (lambda p: p["config"].update(store="/"), "unknown field 'store'"),
    "text for a number": (lambda p: event("fetch")(p).update(tile="0"), r"graphs\[0\]\.events\[0\]\.tile='0' is not"),
    "true for a number": (lambda p: event("fetch")(p).update(tile=True), "True is not a whole number"),
    "float for a number": (lambda p: event("fetch")(p).update(tile=0.5), "0.5 is not a whole number"),
    "object for a list": (lambda p: p["graphs"][0].update(events={}), r"graphs\[0\]\.events=\{\.\.\.\} is not a list"),
    "list for an object": (
        lambda p: p["graphs"][0].update(tiles=[[]]),
        r"tiles\[0\]=\[\.\.\.\] is not a table of name",
    ),
    "huge number": (lambda p: event("fetch")(p).update(tile=2**63), "out of range"),
    "no such tile": (lambda p: event("fetch")(p).update(tile=99), "is of tile 99, and there are"),
    "negative tile": (lambda p: event("fetch")(p).update(tile=-1), r"events\[0\]\.tile=-1 is less than 0"),
    "no such operator": (lambda p: p["graphs"][0]["events"][-1].update(operator=77), "in operator 77"),
    "operators out of order": (lambda p: p["graphs"][0]["events"][-1].update(operator=-1), "in operator -1, after"),
    "no such event": (lambda p: event("fetch")(p).update(kind="exec"), "'exec' is none of fetch, upload"),
    "no such dtype": (lambda p: p["graphs"][0]["tiles"][0].update(dtype="os"), "'os' is no dtype"),
    "no such tier": (lambda p: p["graphs"][0]["tiles"][0].update(tier="cloud"), "'cloud' is none of device"),
    "a gradient without states": (lambda p: p["graphs"][0]["tiles"][0].pop("state_tier"), "and states on None"),
    "moments without states": (
        lambda p: p["graphs"][0]["tiles"][0].update(gradient_tier=None, state_tier=None, state_dtype="8bit"),
        "has no states, and state_dtype 8bit",
    ),
    "half of an fp32 master": (
        lambda p: p["graphs"][0]["tiles"][0].update(master_dtype="split"),
        "is torch.float32, and has a master in split",
    ),
    "huge tile": (lambda p: p["graphs"][0]["tiles"][0].update(shape=[2**40, 2**40]), "more bytes than any memory"),
    "endless shape": (lambda p: p["graphs"][0]["tiles"][0].update(shape=[2] * 1000), "has 1000 dimensions"),
    "negative shape": (lambda p: p["graphs"][0]["tiles"][0].update(shape=[-1]), r"shape\[0\]=-1 is less than 0"),
    "rows of another shape": (lambda p: p["graphs"][0]["tiles"][0].update(rows=[0, 7]), "has the rows 0 to 7"),
    "a tile twice": (lambda p: p["graphs"][0]["tiles"][1].update(p["graphs"][0]["tiles"][0]), "as one before"),
    "another tile in backward": (
        lambda p: p["graphs"][1]["tiles"][0].update(tier="host"),
        r"tiles\[0\] of the backward graph is another",
    ),
    "a tile less in backward": (
        lambda p: p["graphs"][1]["tiles"].pop(),
        "the backward graph has 7, and the first 8|is of tile 7, and there are 7",
    ),
    "missing wait": (lambda p: p["graphs"][0]["events"].remove(event("wait")(p)), "comes where wait is due"),
    "missing release": (lambda p: p["graphs"][0]["events"].remove(event("release")(p)), "release"),
    "missing graph": (lambda p: p["graphs"].pop(), r"graphs are \['forward'\]"),
    "a circle": (lambda p: swap(p, "fetch", "wait"), "comes where fetch is due"),
    "another circle": (lambda p: swap(p, "upload", "allgather"), "comes where upload is due"),
    "overlapping extents": (overlap, "share bytes"),
    "negative extent": (lambda p: event("fetch")(p).update(offset=-4096), r"offset=-4096 is less than 0"),
    "extent behind the end": (lambda p: event("fetch")(p).update(offset=2**40), "lies in its region|has one offset"),
    "region of any size": (lambda p: p["regions"].update(host=2**60), "region"),
    "started for backward in backward": (
        lambda p: p["graphs"][1]["events"][0].update(for_backward=True),
        "as one for backward",
    ),
    "as many elements as a chunk has bytes": (
        lambda p: p["regions"].update(chunk_elements=p["config"]["chunk"]),
        "more than `config.chunk` bytes hold",
    ),
    "chunks that are no whole blocks": (lambda p: p["regions"].update(chunk_elements=1000), "no multiple of 4096"),
    "a chunk that updates something else": (
        lambda p: p["update"]["chunks"][0]["slices"][0].update(count=1),
        r"update.chunks\[0\] is not what follows of the tiles and of the regions",
    ),
    "an update that is left out": (lambda p: p["update"]["chunks"].clear(), "update has 0 chunks of"),
    "an update before it is read": (
        lambda p: p["update"]["events"].reverse(),
        r"update.events\[0\] is not what follows",
    ),
    "fewer chunks than there are at a time": (lambda p: p["regions"].update(chunk_count=2), "chunk_count is 2"),
    "choices out of order": (lambda p: p["choices"].reverse(), "out of order"),
    "choice of nothing": (lambda p: p["choices"][0].update(end=0), "which are none"),
    "segment before the first": (
        lambda p: p["choices"][0].update(segment=-1),
        r"\[0\]\.segment=-1 is less than",
    ),
    "shard beyond memory": (lambda p: p["graphs"][0]["tiles"][0].update(shard=2**62), "more than any memory"),
    "less than no work": (
        lambda p: p["graphs"][0]["operators"][0].update(flops=-1),
        r"\[0\]\.flops=-1 is less than",
    ),
    "no such line": (lambda p: p["fingerprint"]["nodes"].append(10**6), r"is line 1000000 of"),
    "no ranks": (lambda p: p.update(world_size=0), "world_size=0 is less than 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name: str):
    broken = copy.deepcopy(content())
    plan_from(json.dumps(broken), "plan")  # it is sound so far
    change, text = BROKEN[name]
    change(broken)
    with pytest.raises(PlanFileError, match=text) as error:
        plan_from(json.dumps(broken), "plan file p.json")
    assert "plan file p.json" in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not JSON"),
        ("null", "no plan"),
        ("[]", "no plan"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"format": "zinf_fx plan", "schema": 1e999}', "has schema float"),
        ('{"format": "zinf_fx plan", "schema": ' + "1" * 10_000 + "}", "a number of 10000 digits"),
        ('{"format": "zinf_fx plan", "schema": NaN}', "NaN is no number"),
        ('{"format": "zinf_fx plan", "format": "zinf_fx plan"}', "has 'format' twice"),
        ("{" + "".join(f'"{n}":0,' for n in range(300_000)) + '"299999":0}', "has '299999' twice"),  # in linear time
    ],
)
def test_what_is_hardly_json_is_refused(text: str, expected: str):
    with pytest.raises(PlanFileError, match=expected):
        plan_from(text, "plan file p.json")


def test_a_truncated_file_is_refused(tmp_path: Path):
    text = json.dumps(content())
    for length in range(0, len(text), len(text) // 50):
        (tmp_path / "plan.json").write_text(text[:length])
        with pytest.raises(PlanFileError, match="not JSON"):
            zinf_fx.load_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="can't be read"):
        zinf_fx.load_plan(tmp_path / "plan.json")


def test_a_file_without_an_end_is_refused():
    refused = pytest.raises(PlanFileError, match="more bytes than 1048576, and no plan has")
    with mock.patch.object(file, "_LARGEST_FILE", 1 << 20), refused:
        zinf_fx.load_plan("/dev/zero")


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Return every place of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_anywhere_gives_a_plan_or_a_refusal(data: st.DataObject):
    changed = copy.deepcopy(content())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(changed)[1:]))
        value = data.draw(
            st.one_of(
                st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), st.text(max_size=5),
                st.just([]), st.just({}), st.sampled_from(["fetch", "release", "offload", "nvme", "int64"]),
            )
        )  # fmt: skip
        target = changed
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    with contextlib.suppress(PlanFileError):
        plan_from(json.dumps(changed), "plan")


def test_export_refuses_what_it_cannot_plan():
    with torch.device("meta"):
        x = torch.empty(4, 64)
        with pytest.raises(ConfigError, match="world_size=0 is not a number of ranks"):
            zinf_fx.export_plan(Net(), (x,), world_size=0)
        with pytest.raises(ConfigError, match=r"example_inputs is a tensor of shape \(4, 64\), .* give \(x,\)"):
            zinf_fx.export_plan(Net(), x, placement="nvme")
        with pytest.raises(PlanError, match="captured as"):
            zinf_fx.export_plan(Net(broken=True), (x,), placement="nvme")
        with pytest.raises(PlanError, match="no captured graph of the model uses a parameter"):
            zinf_fx.export_plan(nn.Identity(), (x,), placement="nvme")


def test_a_plan_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(PlanFileError, match="can't be written"):
        exported().save(tmp_path / "none" / "plan.json")
