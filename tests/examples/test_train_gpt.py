from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import slow

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import corpus
import train_gpt
from gpt import GPT, GPTConfig, default_dtype, small
from master_adamw import MasterAdamW

TINY = {"layers": 1, "hidden": 16, "heads": 2, "context": 16, "batch": 2, "steps": 2, "sample": 8, "eval-every": 1}
TINY_FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    return path


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what a run prints."""

    def run(*arguments: str) -> str:
        torch._dynamo.reset()
        assert train_gpt.main(arguments) == 0
        return capsys.readouterr().out

    return run


class TestCorpus:
    def test_standard_library_is_deterministic_and_split_by_file(self) -> None:
        first, second = corpus.load_corpus(), corpus.load_corpus()
        assert torch.equal(first.training, second.training)
        assert torch.equal(first.held_out, second.held_out)
        assert len(first.training) > 5 * len(first.held_out) > 500_000
        source = Path(argparse.__file__).read_bytes()
        assert (source in first.training.numpy().tobytes()) != (source in first.held_out.numpy().tobytes())

    def test_directory_holds_out_every_tenth_file(self, tmp_path: Path) -> None:
        for i in range(20):
            (tmp_path / f"{i:02}.txt").write_bytes(b"%02d" % i)
        (tmp_path / ".hidden").write_bytes(b"hidden")
        (tmp_path / "binary").write_bytes(b"\0")
        split = corpus.load_corpus(tmp_path)
        assert bytes(split.held_out) == b"0919"
        assert bytes(split.training) == b"".join(b"%02d" % i for i in range(20) if i not in (9, 19))

    def test_single_file_holds_out_its_end(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_bytes(bytes(range(1, 101)))
        split = corpus.load_corpus(tmp_path / "text")
        assert bytes(split.training) + bytes(split.held_out) == bytes(range(1, 101))
        assert len(split.held_out) == 10

    def test_size_is_capped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(corpus, "SIZE_LIMIT", 50)
        (tmp_path / "text").write_bytes(b"x" * 100)
        split = corpus.load_corpus(tmp_path / "text")
        assert len(split.training) + len(split.held_out) == 50

    def test_batches_are_windows_of_the_text(self) -> None:
        text = torch.arange(200, dtype=torch.uint8)
        tokens, targets = next(corpus.batches(text, batch=3, context=5, seed=1))
        assert tokens.shape == targets.shape == (3, 5)
        assert torch.equal(targets, tokens + 1)
        again, _ = next(corpus.batches(text, batch=3, context=5, seed=1))
        assert torch.equal(tokens, again)

    def test_batches_reach_the_last_byte(self) -> None:
        _, targets = next(corpus.batches(torch.arange(6, dtype=torch.uint8), batch=1, context=5, seed=0))
        assert targets[0, -1] == 5

    def test_evaluation_windows_do_not_overlap(self) -> None:
        text = torch.arange(250, dtype=torch.uint8)
        parts = corpus.evaluation_batches(text, batch=2, context=8, limit=5)
        targets = torch.cat([targets for _, targets in parts]).flatten()
        assert len(parts) == 5
        assert len(targets.unique()) == 5 * 2 * 8
        assert targets.max() > 220


class TestBaselines:
    def evaluation(self, text: bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        tokens = torch.tensor([list(text)])
        return [(tokens[:, :-1], tokens[:, 1:])]

    def test_unigram(self) -> None:
        training = torch.tensor(list(b"aaab" * 25), dtype=torch.uint8)
        expected = -(2 * math.log(76 / 356) + math.log(26 / 356)) / 3
        assert corpus.unigram_loss(training, self.evaluation(b"xaab")) == pytest.approx(expected)

    def test_bigram(self) -> None:
        training = torch.tensor(list(b"ab" * 50), dtype=torch.uint8)
        after_a = (50 + 51 / 356) / 51
        assert corpus.bigram_loss(training, self.evaluation(b"ab")) == pytest.approx(-math.log(after_a))

    def test_both_are_normalised(self) -> None:
        training = torch.tensor(list(b"some text to count"), dtype=torch.uint8)
        every_pair = [(torch.full((1, 256), ord("t")), torch.arange(256)[None])]
        for loss in (corpus.unigram_loss, corpus.bigram_loss):
            chances = [
                math.exp(-loss(training, [(a[:, i : i + 1], b[:, i : i + 1])]))
                for a, b in every_pair
                for i in range(256)
            ]
            assert sum(chances) == pytest.approx(1)

    def test_bits(self) -> None:
        assert corpus.bits(math.log(8)) == pytest.approx(3)


class TestModel:
    def test_small_gives_a_loss_near_uniform(self) -> None:
        torch.manual_seed(0)
        model, inputs = small()
        assert model(*inputs).item() == pytest.approx(math.log(256), abs=0.3)

    def test_small_is_built_on_the_default_device_and_dtype(self) -> None:
        with torch.device("meta"), default_dtype(torch.bfloat16):
            model, inputs = small()
        assert {p.device.type for p in model.parameters()} == {"meta"} == {x.device.type for x in inputs}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model(*inputs).shape == ()

    @pytest.mark.parametrize("tied", [True, False])
    def test_tied_head(self, tied: bool) -> None:
        model = GPT(GPTConfig(layers=1, hidden=16, heads=2, context=8, tied=tied))
        assert (model.head.weight is model.tokens.weight) == tied

    def test_attention_is_causal(self) -> None:
        model = GPT(GPTConfig(layers=2, hidden=16, heads=2, context=8))
        tokens = torch.randint(256, (1, 8))
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + 1) % 256
        assert torch.equal(model.logits(tokens)[:, :-1], model.logits(changed)[:, :-1])

    def test_generate(self) -> None:
        model = GPT(GPTConfig(layers=1, hidden=16, heads=2, context=8))
        greedy = model.generate(b"abc", 20)
        assert greedy.startswith(b"abc") and len(greedy) == 23
        assert greedy == model.generate(b"abc", 20, seed=1)
        sampled = model.generate(b"abc", 20, temperature=1.0, seed=1)
        assert sampled == model.generate(b"abc", 20, temperature=1.0, seed=1)
        assert sampled != model.generate(b"abc", 20, temperature=1.0, seed=2)

    def test_bad_sizes(self) -> None:
        with pytest.raises(ValueError, match=r"hidden \(10\) must be a multiple of heads \(3\)"):
            GPTConfig(hidden=10, heads=3)


def test_master_adamw_steps_the_masters_and_rounds_them_back() -> None:
    start = torch.randn(7, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(start.clone())
    expected = start.float().requires_grad_()
    ours = MasterAdamW([parameter], lr=1e-3)
    reference = torch.optim.AdamW([expected], lr=1e-3, fused=True)
    for _ in range(5):
        parameter.grad = torch.randn(7, dtype=torch.bfloat16)
        expected.grad = parameter.grad.float()
        ours.step()
        reference.step()
        assert torch.equal(parameter, expected.bfloat16())
        ours.zero_grad()
        assert parameter.grad is None


def test_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    share = train_gpt.warmup_then_cosine(warmup=10, steps=110)
    assert [share(0), share(9), share(10)] == pytest.approx([0.1, 1, 1])
    assert share(60) == pytest.approx(0.55)
    assert share(110) == pytest.approx(0.1)


def test_printable_keeps_text_and_replaces_controls() -> None:
    assert train_gpt.printable("é\n\t".encode() + b"\x1b[2J\xff") == "é\n\t�[2J�"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "3"], "hidden (128) must be a multiple of heads (3)"),
        (["--layers", "0"], "must be a whole number of at least 1, not '0'"),
        (["--steps", "-1"], "must be a whole number of at least 1, not '-1'"),
        (["--lr", "0"], "must be a number above 0, not '0'"),
        (["--lr", "nan"], "must be a number above 0, not 'nan'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--plain", "--store", "."], "leave out --store, --placement, --state-dtype"),
        (["--plain", "--text", "nowhere"], "no such file or directory: nowhere"),
        (["--plain", "--text", "{empty}"], "no text in"),
        (["--plain", "--text", "{short}"], "a context of 128 needs 129"),
        (["--plain", "--text", "{text}"], "one batch of 16 x 128 needs 2049"),
    ],
)
def test_flags_are_refused(
    flags: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty := tmp_path / "empty").mkdir()
    (short := tmp_path / "short").write_bytes(b"a few words")
    with pytest.raises(SystemExit) as exit:
        train_gpt.main([flag.format(empty=empty, short=short, text=text) for flag in flags])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def as_a_program(*arguments: str) -> str:
    command = [sys.executable, train_gpt.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.parametrize(
    ("dtype", "in_process"), [pytest.param("float32", False, marks=pytest.mark.slow), ("bfloat16", True)]
)
def test_plain_run(dtype: str, in_process: bool, text: Path, train: Callable[..., str]) -> None:
    run = train if in_process else as_a_program
    output = run("--plain", "--text", str(text), "--dtype", dtype, "--accumulate", "2", *TINY_FLAGS)
    assert "1,980 bytes to train on, 220 held out" in output
    assert "step 2/2  loss 5." in output
    assert "step 1: held-out loss 5." in output
    for line in ("byte frequencies alone", "byte pairs alone", "this GPT", "peak resident memory"):
        assert line in output
    assert "store" not in output


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("held out", "training"))]


@pytest.mark.parametrize("placement", [slow("device"), "infinity-nvme"])
def test_zinf_runs_have_the_losses_of_the_plain_run(
    text: Path, tmp_path: Path, train: Callable[..., str], placement: str
) -> None:
    flags = ["--text", str(text), "--accumulate", "2", *TINY_FLAGS]
    plain = losses(train("--plain", *flags))
    through_zinf = train("--store", str(tmp_path), "--placement", placement, *flags)
    assert losses(through_zinf) == plain
    assert "disk read" in through_zinf
    assert "store, written per step" in through_zinf


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--placement", "moon"], "placement='moon' is unknown"),
        (["--store", "{tmp}/nowhere"], "nowhere"),
    ],
)
def test_zinf_refuses_flags(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        train_gpt.main([flag.format(tmp=tmp_path) for flag in flags])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
