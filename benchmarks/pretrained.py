"""Memory of reading, training and writing a checkpoint of transformers: plain, and through zinf, on one and more ranks.

    python benchmarks/pretrained.py                                    # 2 GB on disk, 16 GB while it trains; minutes
    python benchmarks/pretrained.py --layers 2 --hidden 256 --steps 1  # seconds

A random Llama in bf16 is saved by transformers. Each row is a process of its own, or one per rank, and its peaks are
resident memory above what there was before, pages of mapped files included, the largest rank's. What zinf exports is
then read by plain transformers, whose logits are compared with those of the model in the store.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate
from train_step import machine

from zinf_fx.sizes import in_words

WORKER = Path(__file__).with_name("pretrained_worker.py")
_HEAD = 128


def run(request: dict) -> list[dict]:
    """Return the answer of each rank."""
    ranks = request.get("ranks", 1)
    with tempfile.TemporaryDirectory() as meeting:
        request = {**request, "meeting": f"{meeting}/file"}
        commands = [[sys.executable, str(WORKER), json.dumps({**request, "rank": rank})] for rank in range(ranks)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for command in commands]
        answers = [process.communicate() for process in processes]
    for process, (_, complaint) in zip(processes, answers, strict=True):
        if process.returncode:
            raise RuntimeError(f"{request['do']} ended with status {process.returncode}:\n{complaint.strip()}")
    return [json.loads(answer.splitlines()[-1]) for answer, _ in answers]


def row(name: str, answers: list[dict], equal: str = "") -> list[str]:
    cells = [name]
    for phase in ("load", "train", "export"):
        usages = [answer[phase] for answer in answers if phase in answer]
        peak = in_words(max(usage["peak"] for usage in usages)) if usages else ""
        cells += [peak, f"{max(usage['seconds'] for usage in usages):.1f}" if usages else ""]
    return [*cells, equal]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=1, help="of training, before the weights are written")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="to read the checkpoint in")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for checkpoints and stores, in place of /tmp")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    shape = {"hidden_size": args.hidden, "intermediate_size": 11 * args.hidden // 4, "num_hidden_layers": args.layers}
    shape |= {"num_attention_heads": args.hidden // _HEAD, "num_key_value_heads": args.hidden // _HEAD // 2}
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        (Path(folder) / "store").mkdir()
        files = {"store": f"{folder}/store", "out": f"{folder}/out", "logits": f"{folder}/logits.pt"}
        [made] = run({"do": "make", "folder": f"{folder}/saved", "shape": {**shape, "vocab_size": args.vocabulary}})
        for dtype in args.dtypes:
            plain = {"do": "plain", "dtype": dtype}
            rows.append(row(f"plain, {dtype}", run({**plain, "folder": f"{folder}/saved"})))
            for ranks in args.ranks:
                steps = args.steps if dtype == "bfloat16" else 0
                request = {"do": "zinf", "dtype": dtype, "ranks": ranks, "steps": steps, **files}
                answers = run({**request, "folder": f"{folder}/saved"})
                [read] = run({**plain, "folder": files["out"], "logits": files["logits"]})
                rows.append(row(f"zinf, {dtype}, {ranks} rank(s)", answers, "yes" if read["equal"] else "NO"))
    print(f"{machine()}\n\na Llama of {in_words(made['nbytes'])} in bf16; peak memory, and seconds, to\n")
    headers = ["", "load", "s", "train", "s", "export", "s", "same\nlogits"]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 7)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
