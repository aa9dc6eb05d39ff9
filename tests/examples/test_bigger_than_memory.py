from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from gate import slow

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import bigger_than_memory
from bigger_than_memory import main
from fitting import RefusedError, bytes_per_parameter, fit, parameters_of, room_on, shaped
from gpt import GPT
from timeline import Sample, Timeline

from zinf_fx.plan.show.curve import ASCII

MIB, GIB = 1 << 20, 1 << 30
BYTES_OF_KIND = bytes_per_parameter("float32")
BYTES_PER_PARAMETER = sum(BYTES_OF_KIND.values())


@pytest.mark.slow
def test_a_run_on_a_disk_that_is_a_little_larger_than_the_memory(tmp_path: Path) -> None:
    memory = 1024 if torch.version.cuda is None else 1536  # MiB, of which a CUDA build takes more before it begins
    disk = memory * 1100 // 1024
    options = ["--memory", f"{memory}MiB", "--disk", f"{disk}MiB", "--steps", "2", "--context", "64"]
    plot, store = tmp_path / "timeline.svg", tmp_path / "store"
    store.mkdir()
    command = [sys.executable, bigger_than_memory.__file__, *options, "--store", str(store), "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    output = done.stdout

    # The model was scaled down to the disk. Its states exceed the memory, and what was resident doesn't.
    scaled = f"scaled down: states of {2 * memory / 1024:.1f} GiB don't fit {disk / 1024:.1f} GiB of the disk"
    assert scaled in output
    parameters = int(row(output, "parameters").split(", ")[0].replace(",", ""))
    assert memory * MIB < parameters * BYTES_PER_PARAMETER <= disk * MIB
    assert row(output, "memory limit") == f"{memory / 1024:.1f} GiB, as given"
    on_disk = f"{disk / 1024:.1f} GiB"
    assert [row(output, f"states on {tier}") for tier in ("device", "host", "nvme")] == ["0 B", "0 B", on_disk]
    resident = mebibytes(row(output, "resident at most, everything included"))
    assert 200 < resident < memory
    ratio = float(row(output, "states / resident at most"))
    rounding = 0.06 if resident < 1024 else 0.12  # GiB are printed with one decimal
    assert ratio == pytest.approx(parameters * BYTES_PER_PARAMETER / MIB / resident, abs=rounding)

    # It learns, the plan holds, and each step writes a gradient, parameter, master copy and moments.
    first, second = map(float, row(output, "loss of each step, nats per byte").split())
    assert 5 < first < 6.5 and second < first - 0.1
    planned, measured = (mebibytes(row(output, f"host arena at most, {what}")) for what in ("as planned", "measured"))
    assert 0.5 * planned < measured <= planned <= 256
    assert row(output, "written per step").endswith(", 16.0 bytes per parameter")
    assert len(row(output, "seconds per step (compilation is in the first)").split()) == 2
    for what in ("read and written, over all steps", "while anything was being read"):
        assert re.fullmatch(r"\d+\.\d [MG]iB/s", row(output, what)), what

    # The timeline, as a chart and as SVG; and nothing stays in the store.
    assert "(s: start, c: construct, f: forward, b: backward, o: optimizer)" in output
    (marks,) = re.findall(r"^ +([scfbo]{8,})$", output, flags=re.MULTILINE)
    assert re.fullmatch("s*c+f+b+o*f*b*o+", marks), marks
    picture = ElementTree.parse(plot).getroot()
    points = picture.find("{*}polyline").get("points").split()
    assert len(points) > 10 and len(picture.findall("{*}rect")) >= len(points)
    assert list(store.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_was_killed_goes_on(tmp_path: Path) -> None:
    options = ["--memory", "1GiB", "--resident", "1GiB", "--steps", "3", "--context", "64", "--state-dtype", "8bit"]
    stores = [tmp_path / name for name in ("a", "b", "c")]
    for store in stores:
        store.mkdir()

    def command(store: Path, checkpoint: str, disk: str = "2GiB") -> list[str]:
        places = ["--store", str(store), "--checkpoint", str(tmp_path / checkpoint), "--disk", disk]
        return [sys.executable, bigger_than_memory.__file__, *options, *places]

    whole = subprocess.run(command(stores[0], "whole"), capture_output=True, text=True, timeout=280)
    assert whole.returncode == 0, whole.stderr
    with subprocess.Popen(command(stores[1], "killed"), stdout=subprocess.PIPE, text=True) as killed:
        for line in killed.stdout:
            if line.startswith("step 2/3"):
                killed.kill()
    rest = subprocess.run(command(stores[2], "killed", disk="1.1GiB"), capture_output=True, text=True, timeout=280)
    assert rest.returncode == 0, rest.stderr
    steps = {
        output: re.findall(r"^step (\d)/3  loss (\S+)", output, re.MULTILINE) for output in (whole.stdout, rest.stdout)
    }
    assert len(steps[whole.stdout]) == 3 and re.search("^resumed after step [12]$", rest.stdout, re.MULTILINE)
    assert steps[rest.stdout] and steps[rest.stdout] == steps[whole.stdout][-len(steps[rest.stdout]) :]
    done = subprocess.run(command(stores[2], "killed"), capture_output=True, text=True, timeout=280)
    assert done.stdout.endswith("all 3 steps are done; --steps for more\n"), done.stdout + done.stderr


def row(output: str, name: str) -> str:
    """Return the cell beside a name in the table."""
    (cell,) = re.findall(rf"^{re.escape(name)}  +(.*)$", output, flags=re.MULTILINE)
    return cell


def mebibytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"MiB": 1, "GiB": 1024}[unit]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--memory", "8GiB", "--disk", "3GiB"], "don't fit the disk, of which 3.0 GiB may be taken"),
            (["--memory", "8GiB", "--states", "8GiB"], "--states 8.0 GiB is no more than the memory, 8.0 GiB"),
            (["--memory", "8GiB", "--resident", "9GiB"], "--resident 9.0 GiB is more than the memory, 8.0 GiB"),
            (["--memory", "8GiB", "--resident", "64MiB"], "allow at least"),
            (["--memory", "much"], "the size='much' is not a size"),
            (["--text", "/there/is/none"], "no such file or directory: /there/is/none"),
        ],
    )
    def test_before_anything_is_built(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
    ) -> None:
        with pytest.raises(SystemExit) as exit:
            main(["--store", str(tmp_path), *options])
        out, err = capsys.readouterr()
        assert exit.value.code == 2 and out == "" and message in err and list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "can't be read, and says which model was trained"),
            ('{"model": {"layers": 1, "hidden": 64}, "state_dtype": "8bit"}', "began with --state-dtype 8bit: give"),
        ],
    )
    def test_what_was_begun_otherwise(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
    ) -> None:
        (tmp_path / bigger_than_memory.MODEL).write_text(content)
        with pytest.raises(SystemExit):
            main(["--store", str(tmp_path / "store"), "--checkpoint", str(tmp_path)])
        assert message in capsys.readouterr().err and (tmp_path / bigger_than_memory.MODEL).read_text() == content

    def test_a_store_in_memory(self) -> None:
        if not Path("/dev/shm").is_dir():
            pytest.skip("no /dev/shm here")
        with pytest.raises(RefusedError, match="which is memory: give a --store on a disk"):
            room_on([Path("/dev/shm")])


class TestFitting:
    @pytest.mark.parametrize("states", [200 * MIB, 3 * GIB, slow(48 * GIB), slow(500 * GIB)])
    def test_the_model_is_as_large_as_asked(self, states: int) -> None:
        fitted = fit(states, memory=states // 2, room=1 << 50, context=128, bytes_of_kind=BYTES_OF_KIND)
        assert fitted.note is None and states <= fitted.states <= 1.35 * states
        assert fitted.states == fitted.parameters * 16
        assert fitted.config.hidden == 128 * fitted.config.heads
        assert 20 <= fitted.config.hidden / fitted.config.layers <= 120

    def test_a_model_has_the_parameters_that_are_counted(self) -> None:
        config = shaped(20 * MIB / 16, 64)
        assert parameters_of(config) == sum(parameter.numel() for parameter in GPT(config).parameters())

    def test_a_disk_that_is_too_small_scales_the_model_down(self) -> None:
        fitted = fit(48 * GIB, memory=24 * GIB, room=30 * GIB, context=128, bytes_of_kind=BYTES_OF_KIND)
        assert 24 * GIB < fitted.states <= 30 * GIB
        assert fitted.note == "scaled down: states of 48.0 GiB don't fit 30.0 GiB of the disk"

    def test_what_would_not_exceed_the_memory_is_refused(self) -> None:
        with pytest.raises(RefusedError, match=r"larger than the memory, 24.0 GiB, don't fit the disk"):
            fit(48 * GIB, memory=24 * GIB, room=24 * GIB, context=128, bytes_of_kind=BYTES_OF_KIND)

    def test_directories_of_one_disk_count_once(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        once = room_on([tmp_path / "a"])
        assert once > 0 and room_on([tmp_path / "a", tmp_path / "not" / "there"]) == pytest.approx(once, rel=0.2)


class TestTimeline:
    def test_it_samples_while_it_runs(self) -> None:
        seen: list[Sample] = []
        timeline = Timeline(seen.append)
        with timeline.running():
            timeline.phase = "first"
        assert timeline.samples == seen and len(seen) >= 1 and seen[0].nbytes > MIB

    def test_phases_and_seconds_stand_below_the_chart(self) -> None:
        timeline = Timeline()
        timeline.samples = [Sample(i / 2, "up" if i < 6 else "down", i * MIB) for i in range(1, 13)]
        lines = timeline.chart(12 * MIB, ASCII, 60).splitlines()
        assert lines[0] == "resident memory over time in seconds (u: up, d: down)"
        assert lines[2].endswith("## budget 12.0 MiB")
        assert lines[-1].strip() == "u" * 10 + "d" * 14
        assert lines[-2].split()[0] == "0" and int(lines[-2].split()[-1]) <= 6
