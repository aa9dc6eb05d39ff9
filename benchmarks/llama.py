"""A Llama (Touvron et al. 2023) or Qwen3, with grouped heads: ordinary PyTorch, one operation after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """By default Llama 3.1 8 B."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    head: int | None = None
    """Elements of a head; None: the heads divide the hidden size."""
    normalised: bool = False
    """Queries and keys are, as in Qwen3."""

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads


class Norm(nn.Module):
    """Root mean square normalisation, in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Queries or keys [batch, heads, length, size], turned by angles that grow with their positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, config.head_size
        self.q = nn.Linear(config.hidden, self.heads * self.size, bias=False)
        self.k = nn.Linear(config.hidden, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(config.hidden, self.kv_heads * self.size, bias=False)
        self.o = nn.Linear(self.heads * self.size, config.hidden, bias=False)
        self.q_norm = Norm(self.size) if config.normalised else nn.Identity()
        self.k_norm = Norm(self.size) if config.normalised else nn.Identity()

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = (rotated(heads, cosines, sines) for heads in (self.q_norm(q), self.k_norm(k)))
        k, v = (heads.repeat_interleave(self.heads // self.kv_heads, dim=1) for heads in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(config.hidden), Attention(config)
        self.mlp_norm = Norm(config.hidden)
        self.gate = nn.Linear(config.hidden, config.inner, bias=False)
        self.up = nn.Linear(config.hidden, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        inner = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """Gives the mean cross entropy of the next tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.size = config.head_size
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        frequencies = 500000.0 ** (-torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * frequencies.repeat(2)
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosines, sines)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, -2).float(), targets.flatten())
