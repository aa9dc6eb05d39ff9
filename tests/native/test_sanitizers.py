"""Native code under many threads and faults, built with the compiler's sanitizers: no race, no leak, no bad access."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gate import slow

from zinf_fx.native import engine
from zinf_fx.native.build import SOURCES

NATIVE = Path(engine.__file__).parent


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def sanitizer(request: pytest.FixtureRequest) -> str:
    return request.param


def built(program: str, sanitizer: str, folder: Path, *more: str) -> Path:
    """The program of a file beside this one, with the engine's. `more`: other files beside it, and options."""
    options = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    sources = [f"{program}.c", *more, *(NATIVE / name for name in SOURCES)]
    command = ["cc", *options, f"-I{NATIVE}", *sources, "-o", folder / program, "-ldl", "-lpthread"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if f"lib{'tsan' if sanitizer == 'thread' else 'asan'}" in done.stderr:
        pytest.skip("the compiler's sanitizer library is not installed")
    assert done.returncode == 0, done.stderr
    return folder / program


@pytest.fixture(scope="module")
def stress(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("stress", sanitizer, tmp_path_factory.mktemp("stress"), "faults.c")


@pytest.mark.parametrize("provider", ["aio", "threads", slow("buffered")])
def test_stress(stress: Path, provider: str, tmp_path: Path):
    done = subprocess.run([stress, provider, tmp_path / "file", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def opening(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wrapped = (f"-Wl,--wrap={name}" for name in ("calloc", "eventfd", "pthread_create", "syscall"))
    return built("opening", sanitizer, tmp_path_factory.mktemp("opening"), *wrapped)


@pytest.mark.parametrize("provider", ["aio", "threads"])
def test_whatever_fails_while_an_engine_is_opened_leaves_nothing_behind(opening: Path, provider: str):
    done = subprocess.run([opening, provider], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_work_that_threads_share(sanitizer: str, tmp_path: Path):
    done = subprocess.run(built("divide", sanitizer, tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
