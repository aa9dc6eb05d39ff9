"""Native code has no race, no leak and no bad access under many threads and faults, built with the compiler's
sanitizers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import pytest
from gate import slow

from zinf_fx.native import engine
from zinf_fx.native.build import SOURCES

NATIVE = Path(engine.__file__).parent
ARITHMETIC = {"codes.c", "masters.c", "threads.c", "update.c"}
ENGINE = set(SOURCES) - ARITHMETIC


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def sanitizer(request: pytest.FixtureRequest) -> str:
    return request.param


def compile_with(sanitizer: str, *arguments: object) -> None:
    options = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", f"-I{NATIVE}"]
    done = subprocess.run(["cc", *options, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    if f"lib{'tsan' if sanitizer == 'thread' else 'asan'}" in done.stderr:
        pytest.skip("the compiler's sanitizer library is not installed")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def build(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the program of a file beside this one with sources of the engine, each of which is compiled once. Other
    files beside it, and options, may follow its name."""
    folder = tmp_path_factory.mktemp("native")

    @cache
    def compiled(source: str) -> Path:
        compile_with(sanitizer, "-c", NATIVE / source, "-o", made := folder / f"{Path(source).stem}.o")
        return made

    def build(program: str, *more: str, sources: Collection[str]) -> Path:
        objects = map(compiled, sources)
        compile_with(sanitizer, f"{program}.c", *more, *objects, "-o", folder / program, "-ldl", "-lm", "-lpthread")
        return folder / program

    return build


@pytest.fixture(scope="module")
def stress(build: Callable[..., Path]) -> Path:
    return build("stress", "faults.c", sources=ENGINE)


@pytest.mark.parametrize("provider", ["aio", "threads", slow("buffered")])
def test_stress(stress: Path, provider: str, tmp_path: Path):
    done = subprocess.run([stress, provider, tmp_path / "file", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def opening(build: Callable[..., Path]) -> Path:
    wrapped = (f"-Wl,--wrap={name}" for name in ("calloc", "eventfd", "pthread_create", "syscall"))
    return build("opening", *wrapped, sources=ENGINE)


@pytest.mark.parametrize("provider", ["aio", "threads"])
def test_whatever_fails_while_an_engine_is_opened_leaves_nothing_behind(opening: Path, provider: str):
    done = subprocess.run([opening, provider], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_work_that_threads_share(build: Callable[..., Path]):
    done = subprocess.run(build("divide", sources=["threads.c"]), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sanitizer", ["thread", slow("address,undefined")], indirect=True)
def test_updates(build: Callable[..., Path], sanitizer: str):
    least = "3" if sanitizer == "thread" else "1"
    program = build("update", sources=ARITHMETIC)
    done = subprocess.run([program, least], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
