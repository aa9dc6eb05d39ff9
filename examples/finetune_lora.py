"""Fine-tune a frozen model that does not fit with LoRA: the base streams from disk in 4 or 8 bits, the adapter stays.

python examples/finetune_lora.py                                   # a small random Llama over the standard library
python examples/finetune_lora.py --size 7b --length 256            # a random one of 6.7 billion parameters
python examples/finetune_lora.py Llama-3.1-8B --text book.txt --store /mnt/nvme --output my-adapter

A checkpoint is a directory that `from_pretrained` reads; it goes to the store quantised, tensor by tensor. A random
base has no tokenizer, and reads bytes. Needs peft: pip install -e '.[test,clients]'.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from corpus import CorpusError, load_corpus
from gpt import default_dtype
from resident import peak_resident_bytes, resident_bytes
from tabulate import tabulate
from tqdm import tqdm

import zinf_fx
from zinf_fx.errors import ZinfError

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Shapes of Llama; the one of a billion parameters is TinyLlama's, without its grouped queries."""

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BYTES = 256


def random_base(size: str, length: int) -> torch.nn.Module:
    """A Llama over bytes with random weights. Its head is as wide as Llama's, so that a step costs as much."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = 32000 if size != "tiny" else BYTES
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=length, use_cache=False, **SIZES[size])
    with default_dtype(torch.bfloat16):
        return LlamaForCausalLM(config)


def base_and_tokens(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The frozen model, stored in the format, and the text as token ids, 1-D."""
    text = load_corpus(args.text).training
    where = {} if args.store is None else {"store": args.store}
    with zinf_fx.offloading(placement="nvme", frozen_dtype=args.frozen, **where):
        if args.checkpoint is None:
            torch.manual_seed(args.seed)
            model = random_base(args.size, args.length)
        else:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    if args.checkpoint is None:
        return model, text.long()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    return model, torch.tensor(tokenizer(bytes(text.tolist()).decode(errors="replace"))["input_ids"])


def batches(tokens: torch.Tensor, batch: int, length: int, seed: int) -> Callable[[], torch.Tensor]:
    """Draws token ids: [batch, length]."""
    draw = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        starts = torch.randint(len(tokens) - length, (batch,), generator=draw)
        return torch.stack([tokens[start : start + length] for start in starts])

    return drawn


def adapted(base: torch.nn.Module, rank: int) -> torch.nn.Module:
    """The base with an adapter beside each linear layer of its blocks, in fp32 as peft makes it."""
    import peft

    return peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS))


def train(model: torch.nn.Module, data: Callable[[], torch.Tensor], args: argparse.Namespace) -> list[list]:
    """The rows of the report."""
    run = torch.compile(model, backend="zinf", options={"activations": args.activations})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, fused=True)
    losses, seconds, read = [], [], []
    with tqdm(total=args.steps, unit="step", disable=not sys.stdout.isatty(), file=sys.stdout) as bar:
        for step in range(1, args.steps + 1):
            start, before = time.perf_counter(), zinf_fx.stats(model)
            tokens = data()
            loss = run(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            read.append(zinf_fx.stats(model).bytes_read - before.bytes_read)
            line = f"loss {losses[-1]:.3f}  {args.batch * args.length / seconds[-1]:,.1f} tokens/s"
            line += f"  disk {read[-1] / seconds[-1] / 2**20:,.0f} MiB/s  resident {resident_bytes() / 2**20:,.0f} MiB"
            if bar.disable:
                print(f"step {step}/{args.steps}  {line}", flush=True)
            bar.set_postfix_str(line, refresh=False)
            bar.update()
    later = median(seconds[1:] or seconds)
    stats = zinf_fx.stats(model)
    return [
        ["loss, first and last step", f"{losses[0]:.3f}, {losses[-1]:.3f}"],
        ["first step, with its compilation", f"{seconds[0]:.1f} s"],
        ["a later step", f"{later:.2f} s"],
        ["tokens per second", f"{args.batch * args.length / later:,.1f}"],
        ["read from disk per step", f"{median(read[1:] or read) / 2**30:.2f} GiB"],
        ["written to disk since the base was stored", f"{(stats.bytes_written - args.stored) / 2**20:.1f} MiB"],
        ["peak resident memory", f"{peak_resident_bytes() / 2**20:,.0f} MiB"],
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a directory that from_pretrained reads")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the random base where none is given")
    parser.add_argument("--frozen", choices=("nf4", "int8", "fp8"), default="nf4", help="format of the base on disk")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--text", type=Path, help="a file; without one, Python's standard library")
    parser.add_argument("--store", type=Path, help="an existing directory on the disk to use; default: zinf_fx's own")
    parser.add_argument("--output", type=Path, default=Path("adapter"), help="directory for the trained adapter")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--activations", default="keep", help="keep, recompute, offload or auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        base, tokens = base_and_tokens(args)
    except (CorpusError, ZinfError, ImportError, OSError) as error:
        print(f"finetune_lora: {error}", file=sys.stderr)
        return 1
    args.stored = zinf_fx.stats(base).bytes_written
    torch.manual_seed(args.seed)
    model = adapted(base, args.rank)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{count:,} parameters, of which {trained:,} are trained; the base is {args.frozen} on disk", flush=True)
    rows = train(model, batches(tokens, args.batch, args.length, args.seed), args)
    model.save_pretrained(args.output)
    print(f"\n{tabulate(rows, tablefmt='plain', colalign=('left', 'right'))}\n\nthe adapter is in '{args.output}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
