"""Fine-tune a frozen model that does not fit with LoRA: the base streams from disk in 4 or 8 bits, the adapter stays.

python examples/finetune_lora.py                                   # a small random Llama over the standard library
python examples/finetune_lora.py --size 7b --batch 1 --length 128 --rank 8 --activations recompute \
    --host-memory 256MiB --steps 2 --generate 4                    # a random one of 6.7 billion parameters in 2 GiB
python examples/finetune_lora.py Llama-3.1-8B --text book.txt --store /mnt/nvme --base /mnt/nvme/llama-nf4

A checkpoint is a directory that `from_pretrained` reads; it goes to the store quantised, tensor by tensor. With --base,
that is done once: later jobs, also at the same time, read the quantised base where it is. A random one has no
tokenizer, and reads bytes. Needs peft: pip install -e '.[test,clients]'.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from corpus import CorpusError, load_corpus
from defaults import ShowDefaults
from gpt import default_dtype
from resident import peak_resident_bytes, resident_bytes
from tabulate import tabulate
from tqdm import tqdm
from train_gpt import not_negative, positive, positive_float

import zinf_fx
from zinf_fx.errors import ConfigError, ZinfError

try:
    import accelerate
    import peft
    import transformers
except ImportError as error:
    sys.exit(f"finetune_lora.py needs {error.name}: pip install -e '.[test,clients]'")

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Shapes of Llama; the one of a billion parameters is TinyLlama's, without its grouped queries."""

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BYTES = 256


def configuration(args: argparse.Namespace) -> transformers.PretrainedConfig:
    """Return the configuration of the checkpoint, or of a Llama over bytes, whose head is as wide as Llama's, so that a
    step costs as much."""
    if args.checkpoint is not None:
        return transformers.AutoConfig.from_pretrained(args.checkpoint)
    vocabulary = 32000 if args.size != "tiny" else BYTES
    return transformers.LlamaConfig(vocab_size=vocabulary, use_cache=False, **SIZES[args.size])


def is_kept(base: Path) -> bool:
    """Whether a base was kept there; a directory in which keeping one was interrupted has no manifest."""
    return (base / "manifest.json").exists() if base.is_dir() else base.exists()


def frozen_base(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model, quantised on disk: attached where it was kept, else loaded or made, and kept."""
    options = options_of(args)
    if args.base is not None and is_kept(args.base):
        with accelerate.init_empty_weights(include_buffers=False), default_dtype(torch.bfloat16):
            model = transformers.AutoModelForCausalLM.from_config(configuration(args))
        return zinf_fx.attach_base(model, args.base, **options)
    with zinf_fx.offloading(frozen_dtype=args.frozen, **options):
        if args.checkpoint is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
        else:
            torch.manual_seed(args.seed)
            with default_dtype(torch.bfloat16):
                model = transformers.AutoModelForCausalLM.from_config(configuration(args))
    if args.base is not None:
        zinf_fx.save_checkpoint(args.base, model)
    return model


def token_ids(args: argparse.Namespace) -> torch.Tensor:
    """Return the text as token ids, 1-D."""
    text = load_corpus(args.text).training
    if args.checkpoint is None:
        return text.long()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    return torch.tensor(tokenizer(bytes(text.tolist()).decode(errors="replace"))["input_ids"])


def batches(tokens: torch.Tensor, batch: int, length: int, seed: int) -> Callable[[], torch.Tensor]:
    """Draws token ids: [batch, length]."""
    draw = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        starts = torch.randint(len(tokens) - length, (batch,), generator=draw)
        return torch.stack([tokens[start : start + length] for start in starts])

    return drawn


def adapted(base: torch.nn.Module, args: argparse.Namespace) -> torch.nn.Module:
    """Return the base with an adapter beside each linear layer of its blocks, in fp32 as peft makes it, which stays in
    memory with its gradients and states whatever the budget for tiles is."""
    how = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=TARGETS)
    model = peft.get_peft_model(base, how)
    where = {"parameters": [("*.lora_*", "device"), ("*", "nvme")], "gradients": "device", "optimizer": "device"}
    return zinf_fx.offload(model, **{**options_of(args), "placement": where})


def options_of(args: argparse.Namespace) -> dict[str, object]:
    """Those of the store."""
    options = {"placement": "nvme", "host_memory": args.host_memory}
    return options if args.store is None else options | {"store": args.store}


def train(model: torch.nn.Module, data: Callable[[], torch.Tensor], args: argparse.Namespace) -> list[list]:
    """Train, and return the rows of the report."""
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
    later, peak = median(seconds[1:] or seconds), peak_resident_bytes()
    stats = zinf_fx.stats(model)
    return [
        ["loss, first and last step", f"{losses[0]:.3f}, {losses[-1]:.3f}"],
        ["first step, with its compilation", f"{seconds[0]:.1f} s"],
        ["a later step", f"{later:.2f} s"],
        ["tokens per second", f"{args.batch * args.length / later:,.1f}"],
        ["read from disk per step", f"{median(read[1:] or read) / 2**30:.2f} GiB"],
        ["written to disk since the base was stored", f"{(stats.bytes_written - args.stored) / 2**20:.1f} MiB"],
        ["peak resident memory", f"{peak / 2**20:,.0f} MiB"],
    ]


def continued(model: torch.nn.Module, prompt: torch.Tensor, args: argparse.Namespace) -> list[list]:
    """Return the rows of the report: what the tuned model says after `prompt`, [1, length], greedily."""
    base = model.get_base_model().eval()
    base.compile(backend="zinf")
    ends = []
    count = args.generate

    def note(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends.append(time.perf_counter())
        return scores

    with torch.no_grad():
        generated = base.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count, max_new_tokens=count, use_cache=True,
            do_sample=False, logits_processor=[note],
        )  # fmt: skip
    said = generated[0, prompt.shape[1] :].tolist()
    if args.checkpoint is not None:
        text = transformers.AutoTokenizer.from_pretrained(args.checkpoint).decode(said)
    else:
        text = bytes(number % BYTES for number in said).decode(errors="replace")
    seconds = [end - start for start, end in pairwise(ends)]
    return [
        ["generated", repr(text)],
        ["a token, of which the first ones are compiled", f"{median(seconds):.2f} s" if seconds else ""],
        ["peak resident memory by then", f"{peak_resident_bytes() / 2**20:,.0f} MiB"],
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=ShowDefaults)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a directory that from_pretrained reads")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the random base where none is given")
    parser.add_argument(
        "--frozen",
        choices=("nf4", "mxfp4", "int8", "fp8", "fp8_block"),
        default="nf4",
        help="format of the base on disk",
    )
    parser.add_argument("--rank", type=positive, default=16, help="of the adapters")
    parser.add_argument("--text", type=Path, help="a file; without one, Python's standard library")
    parser.add_argument("--store", type=Path, help="an existing directory on the disk to use; default: zinf_fx's own")
    parser.add_argument("--base", type=Path, help="directory that keeps the quantised base, for any number of jobs")
    parser.add_argument("--host-memory", help="budget for tiles in memory, such as 512MiB; default: no limit")
    parser.add_argument("--output", type=Path, default=Path("adapter"), help="directory for the trained adapter")
    parser.add_argument("--steps", type=positive, default=20, help="of the optimizer")
    parser.add_argument("--batch", type=positive, default=4, help="sequences per step")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=positive_float, default=1e-3, help="learning rate")
    parser.add_argument("--activations", default="keep", help="keep, recompute, offload or auto")
    parser.add_argument("--generate", type=not_negative, default=0, metavar="TOKENS", help="that follow a text")
    parser.add_argument("--seed", type=not_negative, default=0, help="of weights and batches")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if args.checkpoint is not None and not (args.checkpoint / "config.json").is_file():
        options.error(f"there is no checkpoint in '{args.checkpoint}': it has no config.json")
    try:  # what is wrong with an option is said before the base is made
        zinf_fx.Config(**options_of(args), frozen_dtype=args.frozen, activations=args.activations)
        tokens = token_ids(args)
        if len(tokens) <= args.length:
            options.error(f"the text has {len(tokens):,} tokens: give a longer one, or a --length of less")
    except (CorpusError, ConfigError, OSError) as error:
        options.error(str(error))
    try:
        base = frozen_base(args)
    except (ZinfError, OSError) as error:
        print(f"finetune_lora: {error}", file=sys.stderr)
        return 1
    args.stored = zinf_fx.stats(base).bytes_written
    torch.manual_seed(args.seed)
    model = adapted(base, args)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{count:,} parameters, of which {trained:,} are trained; the base is {args.frozen} on disk", flush=True)
    rows = train(model, batches(tokens, args.batch, args.length, args.seed), args)
    model.save_pretrained(args.output)
    if args.generate:
        rows += continued(model, tokens[None, :32], args)
    print(f"\n{tabulate(rows, tablefmt='plain', colalign=('left', 'right'))}\n\nthe adapter is in '{args.output}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
