"""Twenty steps of training are bitwise those of plain PyTorch: every optimizer under everything that a training loop
does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch
from gate import slow
from torch import Tensor, nn

import zinf_fx
from zinf_fx import optim

STEPS = 20
# The options of each class; those in the second place are what the plain class needs for the same arithmetic.
OPTIMIZERS = {
    "AdamW": ({"lr": 1e-2, "weight_decay": 0.1}, {"fused": True}),
    "Adam": ({"lr": 1e-2, "weight_decay": 0.1}, {"fused": True}),
    "SGD": ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"fused": True}),
    "Adagrad": ({"lr": 0.1}, {"fused": True}),
    "RMSprop": ({"lr": 1e-2, "momentum": 0.5}, {}),
    "NAdam": ({"lr": 1e-2}, {}),
    "RAdam": ({"lr": 1e-2}, {}),
}
# GradScaler refuses to unscale fp16 gradients for others, fused Adagrad of torch 2.11 among them: they are in fp32.
SCALED_IN_FP16 = {
    name
    for name in ("AdamW", "Adam", "SGD", "Adagrad")
    if hasattr(getattr(torch.optim, name)([torch.zeros(1)], fused=True), "_step_supports_amp_scaling")
}


class Net(nn.Module):
    """An embedding and a head, a layer between them, and one that is never used."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        self.layer, self.unused = nn.Linear(8, 8), nn.Linear(8, 3)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(tokens)).tanh()).float().square().mean()


def in_one_group(parameters: list[Tensor]) -> Iterable:
    return parameters


def in_groups(parameters: list[Tensor]) -> Iterable:
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == matrix] for matrix in (True, False))
    return [{"params": matrices, "lr": 3e-2}, {"params": vectors, "weight_decay": 0.0}]


@dataclass(frozen=True)
class Condition:
    """What a training loop does beside forward, backward, step."""

    options: dict[str, object] = field(default_factory=dict)
    groups: Callable[[list[Tensor]], Iterable] = in_one_group
    schedule: bool = False
    clip: float | None = None
    micro_batches: int = 1
    frozen: tuple[str, ...] = ()
    tied: bool = False
    scaled: bool = False


CONDITIONS = {
    "groups": Condition(groups=in_groups),
    "scheduler": Condition(schedule=True),
    "clipping": Condition(clip=0.01),
    "accumulation": Condition(micro_batches=4),
    "frozen": Condition(frozen=("layer.weight", "tokens.weight")),
    "unused": Condition(),  # Net always has a layer that no gradient reaches
    "tied": Condition(tied=True),
    "maximize": Condition(options={"maximize": True}),
    "scaled": Condition(scaled=True),
}


class Side:
    """Holds one model in training. Low-precision plain models have fp32 masters, as stored ones do by themselves."""

    def __init__(self, model: Net, optimizer: str, condition: Condition, *, stored: bool) -> None:
        self.model, self.condition = model, condition
        for name in condition.frozen:
            model.get_parameter(name).requires_grad_(False)
        self.parameters = dict(model.named_parameters())
        self.masters = self.parameters if stored else {n: self._master(p) for n, p in self.parameters.items()}
        options, plain = OPTIMIZERS[optimizer]
        options = {**options, **condition.options, **({} if stored else plain)}
        module = optim if stored else torch.optim
        self.optimizer = getattr(module, optimizer)(condition.groups(list(self.masters.values())), **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6, enabled=condition.scaled)

    def step(self, batches: list[Tensor], overflow: bool) -> float:
        condition, total = self.condition, 0.0
        for tokens in batches:
            loss = self.model(tokens)
            self.scaler.scale(loss * (float("inf") if overflow else 1.0) / len(batches)).backward()
            total += loss.item()
        for name, master in self.masters.items():
            gradient = self.parameters[name].grad
            if master is not self.parameters[name]:
                master.grad = None if gradient is None else gradient.float()
        if condition.clip is not None:
            nn.utils.clip_grad_norm_(self.masters.values(), condition.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if condition.schedule:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
        return total

    def _master(self, parameter: Tensor) -> Tensor:
        return parameter if parameter.dtype == torch.float32 else parameter.detach().float()


# What a loop does is the same for all classes: one that is fused and one that isn't are put through everything, and
# others through what their arithmetic has a part in; in the gate, one of these.
@pytest.mark.parametrize(
    ("optimizer", "condition"),
    [
        *(("AdamW", condition) for condition in CONDITIONS),
        *((o, "groups") for o in OPTIMIZERS if o != "AdamW"),
        *(slow("RMSprop", condition) for condition in CONDITIONS if condition != "groups"),
        *(slow(o, c) for o in OPTIMIZERS if o not in ("AdamW", "RMSprop") for c in ("maximize", "scaled")),
    ],
)
def test_twenty_steps(tmp_path, optimizer: str, condition: str) -> None:
    what = CONDITIONS[condition]
    dtype = torch.float16 if what.scaled and optimizer in SCALED_IN_FP16 else torch.float32
    sides = []
    for stored in (True, False):
        torch.manual_seed(0)
        model = Net(what.tied).to(dtype)
        if stored:
            zinf_fx.offload(model, store=tmp_path, placement="nvme", chunk="64KiB")
        sides.append(Side(model, optimizer, what, stored=stored))
    mine, theirs = sides
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        batches = [torch.randint(0, 13, (2, 5)) for _ in range(what.micro_batches)]
        overflow = what.scaled and step == 7
        losses.append(mine.step(batches, overflow))
        assert losses[-1] == theirs.step(batches, overflow), step
    assert losses[0] != losses[-1]
    assert mine.scaler.get_scale() == theirs.scaler.get_scale()
    for name, parameter in mine.parameters.items():
        assert torch.equal(parameter.full_tensor(), theirs.parameters[name]), name
        trained = name not in what.frozen and not name.startswith("unused")
        assert (parameter in mine.optimizer.state) == trained
        if trained:  # the step that overflowed was skipped
            assert mine.optimizer.state[parameter].get("step", STEPS - what.scaled) == STEPS - what.scaled
