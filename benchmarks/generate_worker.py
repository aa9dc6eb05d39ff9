"""What generate.py does in a process of its own: a JSON request as argument, a JSON line as answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean, median

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import zinf_fx
from zinf_fx.frontend.explain import plan_model
from zinf_fx.machine.machine import measure_machine
from zinf_fx.plan.memory.accounting import phases
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.event_graph import Compute
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from resident import peak_resident_bytes

_WARM_UP = 4  # tokens: by then, Dynamo has made all graphs


class Clock:
    """A criterion that stops nothing, and notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, tokens: torch.Tensor, scores: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(**request["shape"], max_position_embeddings=4096, eos_token_id=None)
    answer: dict[str, object] = {}
    if request["variant"] == "memory":
        model = LlamaForCausalLM(config).eval()
    else:
        with zinf_fx.offloading(store=request["store"], placement="nvme", **request["options"]):
            model = LlamaForCausalLM(config).eval()
        plan, operators = planned(model, request["batch"])
        if request["variant"] == "zinf":
            model.compile(backend="zinf")
    torch.manual_seed(1)
    prompt = torch.randint(3, config.vocab_size, (request["batch"], request["prompt"]))

    def generate(tokens: int, *criteria: Clock) -> torch.Tensor:
        exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, stopping_criteria=list(criteria), **exactly)

    generate(_WARM_UP)
    machines = [measure_machine(request["store"])] if request["variant"] != "memory" else []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins now
    read, started, clock = zinf_fx.stats(model).bytes_read, time.perf_counter(), Clock()
    text = generate(request["tokens"], clock)
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    answer |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first": clock.times[0] - started,
        "seconds": median(seconds),
        "read": (zinf_fx.stats(model).bytes_read - read) / request["tokens"],
        "peak": peak_resident_bytes(),
        "text": text.tolist(),
    }
    if machines:
        machines.append(measure_machine(request["store"]))  # disks are faster and slower within minutes
        answer["planned_seconds"] = mean(simulate_plan(plan, hardware, operators).seconds for hardware in machines)
        answer["planned_read"] = dict(phases(plan))["inference"].nvme_to_host
    print(json.dumps(answer))


def planned(model: LlamaForCausalLM, batch: int) -> tuple[Plan, Compute]:
    """Return the plan of a call with a token of each text, and the seconds of its operators on this machine."""
    token = torch.zeros(batch, 1, dtype=torch.int64)
    with torch.no_grad():
        planning = plan_model(model, {"input_ids": token, "use_cache": False}, timed=True)
    return planning.only("a token"), planning.seconds[0]


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    main()
