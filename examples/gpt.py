"""A small GPT: pre-LN blocks, learned positions, a byte vocabulary. Ordinary PyTorch throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    tied: bool = True
    """The output head shares the token embedding's weight."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """``model(tokens, targets)`` is the mean cross-entropy in nats; both are ``[batch, length]`` integers."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # children come first in apply(): each block adds twice to the residual stream
            for out in (module.attention.out, module.mlp.down):
                nn.init.normal_(out.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute ``[batch, length] -> [batch, length, vocabulary]``; length is at most ``config.context``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        n: int,
        temperature: float = 0.0,
        seed: int = 0,
        logits: Callable[[Tensor], Tensor] | None = None,
    ) -> bytes:
        """Return ``prompt`` and ``n`` more bytes: the likeliest each time, or sampled where ``temperature`` is above 0.

        ``logits`` computes the scores. By default it is the method; pass ``torch.compile(model.logits, ...)`` to run it
        compiled.
        """
        logits = logits or self.logits
        if not prompt:
            raise ValueError("generate needs a prompt of at least one byte")
        device = self.tokens.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(n):
            window = torch.tensor([text[-self.config.context :]], device=device)
            scores = logits(window)[0, -1].float().cpu()
            if temperature > 0:
                chances = torch.softmax(scores / temperature, dim=0)
                text.append(int(torch.multinomial(chances, 1, generator=generator)))
            else:
                text.append(int(scores.argmax()))
        return bytes(text)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules built inside get parameters of ``dtype``, and are never held in another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def example_batch(config: GPTConfig, batch: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, on the default device."""
    shape = (batch, config.context)
    return torch.randint(config.vocabulary, shape), torch.randint(config.vocabulary, shape)


def small() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A command-line target: 4 layers of 128, a batch of 4 x 128, in the default device and dtype."""
    config = GPTConfig()
    return GPT(config), example_batch(config, batch=4)


def gpt_303m() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A command-line target: 24 layers of 1024 (303 M parameters), a batch of 4 x 512, bf16, on the default device."""
    config = GPTConfig(layers=24, hidden=1024, heads=16, context=512)
    with default_dtype(torch.bfloat16):
        return GPT(config), example_batch(config, batch=4)


def trillion() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A command-line target, to be planned: 128 layers of 25,600 (a trillion parameters), 1 x 1024 tokens, bf16."""
    config = GPTConfig(layers=128, hidden=25_600, heads=160, context=1024)
    with default_dtype(torch.bfloat16):
        return GPT(config), example_batch(config, batch=1)
