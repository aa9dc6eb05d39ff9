"""What is no regular file is refused at once, wherever a file that somebody else may have made is read."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zinf_fx
from zinf_fx.checkpoint.safetensors_format import places_in
from zinf_fx.errors import ZinfError
from zinf_fx.plan import hardware
from zinf_fx.regular_files import NotRegularError, open_regular, read_at_once, read_regular
from zinf_fx.runtime.disk import measure
from zinf_fx.runtime.disk.read_only import ReadOnlyFile

KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "link to a fifo": lambda path: (os.mkfifo(path.with_suffix(".fifo")), path.symlink_to(path.with_suffix(".fifo"))),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "large": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "nested": lambda path: path.write_text("[" * 100_000),
    "objects": lambda path: path.write_text('{"weight_map":' * 100_000),
    "nothing": Path.touch,
}


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "plan file": ("plan.json", zinf_fx.load_plan),
    "hardware": ("machine.toml", lambda path: hardware.load(str(path))),
    "safetensors": ("model.safetensors", lambda path: zinf_fx.load_safetensors(net(), path)),
    "safetensors in a directory": ("model.safetensors", lambda path: zinf_fx.load_safetensors(net(), path.parent)),
    "index": ("model.safetensors.index.json", lambda path: zinf_fx.load_safetensors(net(), path)),
    "header": ("model.safetensors", places_in),
    "checkpoint": ("manifest.json", lambda path: zinf_fx.load_checkpoint(path.parent, net())),
    "base": ("manifest.json", lambda path: zinf_fx.attach_base(net(), path.parent)),
    "data of a base": ("data", lambda path: ReadOnlyFile(path, "threads", lambda *_: pytest.fail("it was opened"))),
}


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_it_is_refused(tmp_path: Path, reader: str, kind: str):
    name, read = READERS[reader]
    if reader == "data of a base" and kind in ("large", "nested", "objects", "nothing"):
        pytest.skip("a regular file may have any bytes")
    if reader == "plan file" and kind == "device":
        pytest.skip("test_plan_file has it, with a smaller limit")
    KINDS[kind](tmp_path / name)
    with pytest.raises(ZinfError) as caught:
        read(tmp_path / name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_profiles_that_can_not_be_read_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(measure, "profiles_path", lambda: tmp_path / "profiles.json")
    KINDS[kind](tmp_path / "profiles.json")
    assert measure.load_profile(tmp_path) is None and "can't be read" in caplog.text


def test_a_lock_of_profiles_that_is_a_link_empties_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "profiles_path", lambda: tmp_path / "cache" / "profiles.json")
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "profiles.lock").symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(ZinfError, match="the profile can't be stored"):
        measure.store_profile(tmp_path, measure.Profile(1.0, 1.0, 1.0, "threads", 1, 4096, 0.0))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_links_are_followed_only_where_that_is_wanted(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == read_at_once(tmp_path / "link", 4) == b"1234"
    with pytest.raises(NotRegularError, match="it is a link to another place, and no regular file"):
        open_regular(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with pytest.raises(OSError, match="it has more bytes than 3"):
        read_regular(tmp_path / "file", 3)


def _mutated(header: dict, chance: random.Random) -> object:
    name = chance.choice(list(header))
    entry, key = header[name], chance.choice(["dtype", "shape", "data_offsets", "other"])
    values = [None, True, -1, 0, 2**63, 1e9, "", "F99", "F32", [], [-1], [2**63, 2], [0, 0], {}, [[0, 8]], "\ud800"]
    what = chance.randrange(5)
    if what == 0:
        return {**header, name: {**entry, key: chance.choice(values)}}
    if what == 1:
        return {**header, name: {k: v for k, v in entry.items() if k != key}}
    if what == 2:
        return {**header, chance.choice(["__metadata__", "\x1b[2J", ""]): chance.choice([entry, *values])}
    if what == 3:
        return {**header, name: {**entry, "shape": [2**32, 2**32], "data_offsets": [0, chance.choice([8, 2**62])]}}
    return chance.choice(values)


def test_headers_of_any_form_end_in_an_error_of_ours_or_equal_values(tmp_path: Path):
    zinf_fx.export_safetensors(model := net(), tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, loaded = json.loads(content[8 : 8 + length]), 0
    del header["__metadata__"]
    for seed in range(300):
        text = json.dumps(_mutated(header, random.Random(seed))).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        other = net()
        try:
            zinf_fx.load_safetensors(other, file)
        except ZinfError as error:
            assert str(error).isprintable()
        else:
            assert all(map(torch.equal, other.parameters(), model.parameters()))
            loaded += 1
    assert 0 < loaded < 300


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"weight": 5}},
        {"weight_map": {"weight": []}},
        {"weight_map": {"weight": "../other.safetensors"}},
        {"weight_map": {"weight": "/etc/passwd"}},
        {"weight_map": {"weight": "model.safetensors.index.json"}},
        {"weight_map": {"\x1b[2J": "model.safetensors"}},
        {"weight_map": {"weight": "pipe"}},
        {"weight_map": []},
        {"weight_map": {"weight": "x" * 5000}},
        [],
        5,
        None,
    ],
)
def test_an_index_of_any_form_is_refused(tmp_path: Path, index: object):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ZinfError) as caught:
        zinf_fx.load_safetensors(net(), tmp_path)
    assert str(caught.value).isprintable()
