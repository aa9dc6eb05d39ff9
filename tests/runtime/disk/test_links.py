"""The names that a store's data file has elsewhere, and which of them are gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zinf_fx.runtime.disk import links


def test_a_name_that_can_not_be_looked_at_for_a_moment_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't be on a network, or while a directory that was renamed gets its name back."""
    data, link = tmp_path / "data", tmp_path / "link"
    data.write_bytes(bytes(4096))
    os.link(data, link)
    looks = iter([False])
    look = links._is
    fd = os.open(data, os.O_RDWR)
    try:
        known = links.Links()
        known.add(link, fd, [range(4096)])
        monkeypatch.setattr(links, "_is", lambda *arguments: next(looks, None) is None and look(*arguments))
        assert known.gone(fd) == set()
        assert known.gone(fd) == set() and known.are_all(fd)
        link.unlink()
        assert known.gone(fd) == {link}
    finally:
        os.close(fd)
