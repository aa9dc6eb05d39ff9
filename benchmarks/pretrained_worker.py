"""What pretrained.py does in a process of its own: a JSON request as argument, a JSON line as answer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import zinf_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from resident import peak_resident_bytes, resident_bytes

TOKENS = torch.arange(3, 19).view(1, 16)


def make(request: dict) -> dict:
    """Make a random Llama in `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(**request["shape"], max_position_embeddings=256)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    model.save_pretrained(request["folder"], max_shard_size="1GB")
    return {"nbytes": sum(parameter.nbytes for parameter in model.parameters())}


def plain(request: dict) -> dict:
    """Read a checkpoint as transformers does, and use all of it."""
    answer = {}

    def load() -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=request["dtype"])
        for parameter in model.parameters():
            parameter.detach().sum()  # what is mapped is read
        return model

    model = measured(load, "load", answer)
    compare_logits(model, request, answer)
    return answer


def zinf(request: dict) -> dict:
    """Read the same checkpoint into the store; train, and write the weights."""
    answer: dict = {}
    options = {"store": request["store"], "placement": "infinity-nvme"}

    def load() -> PreTrainedModel:
        with zinf_fx.offloading(**options):
            return AutoModelForCausalLM.from_pretrained(request["folder"], dtype=request["dtype"])

    model = measured(load, "load", answer)
    if request["steps"]:
        measured(lambda: train(model, request["steps"]), "train", answer)
    measured(lambda: zinf_fx.export_safetensors(model, request["out"], max_shard_size="1GB"), "export", answer)
    model.eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(logits, request["logits"])
    return answer


def train(model: PreTrainedModel, steps: int) -> None:
    model.train()
    step, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        step(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(action: Callable, name: str, answer: dict) -> object:
    """Return what `action` returns, and note in `answer` its seconds and the most memory that it added."""
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins now
    started = time.perf_counter()
    result = action()
    answer[name] = {"seconds": time.perf_counter() - started, "peak": max(peak_resident_bytes() - before, 0)}
    return result


def compare_logits(model: PreTrainedModel, request: dict, answer: dict) -> None:
    if request.get("logits"):
        with torch.no_grad():
            answer["equal"] = torch.equal(model.eval()(TOKENS).logits, torch.load(request["logits"]))


def main() -> None:
    request = json.loads(sys.argv[1])
    transformers.utils.logging.disable_progress_bar()
    if request.get("ranks", 1) > 1:
        where = {"init_method": f"file://{request['meeting']}", "world_size": request["ranks"], "rank": request["rank"]}
        dist.init_process_group("gloo", **where)
    print(json.dumps({"make": make, "plain": plain, "zinf": zinf}[request["do"]](request)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
