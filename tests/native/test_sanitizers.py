"""The engine under many threads and faults, built with the compiler's sanitizers: no race, no leak, no bad access."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gate import slow

from zinf_fx.native import engine
from zinf_fx.native.build import SOURCES

NATIVE = Path(engine.__file__).parent


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("stress") / "stress"
    options = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={request.param}"]
    sources = [Path(__file__).parent / "stress.c", *(NATIVE / name for name in SOURCES)]
    command = ["cc", *options, f"-I{NATIVE}", *sources, "-o", program, "-ldl", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True)
    if f"lib{'tsan' if request.param == 'thread' else 'asan'}" in built.stderr:
        pytest.skip("the compiler's sanitizer library is not installed")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("provider", ["aio", "threads", slow("buffered")])
def test_stress(stress: Path, provider: str, tmp_path: Path):
    done = subprocess.run([stress, provider, tmp_path / "file", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
