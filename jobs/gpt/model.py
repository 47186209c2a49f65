"""A GPT in plain torch: pre-norm blocks, causal attention, rotary positions, tied embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.gpt.config import ModelConfig

VOCABULARY = 256
"""One token for each value of a byte."""


class Gpt(nn.Module):
    """Logits of the next byte at each position: [batch, seq] int64 -> [batch, seq, 256]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head_width = config.width // config.heads
        # Each block adds to the residual stream twice; smaller steps keep its variance level with depth
        # (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3).
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                out_of_block = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if out_of_block else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = rotary_angles(tokens.shape[1], self.head_width, tokens.device)
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Attention, then an MLP, each beside the residual stream: [batch, seq, width] -> the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention_in = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self._drop(self._attention(self.attention_norm(x), rotation))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.attention_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotate(query, rotation),
            rotate(key, rotation),
            value,  # [batch, heads, seq, head width], as the other two
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        projected: Tensor = self.attention_out(y.transpose(1, 2).flatten(2))
        return projected

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def rotary_angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, each [length, head_width / 2] float32.

    Made anew in each forward and not kept as a buffer, which DDP would send from rank 0 to all in every step.

    Source: Su et al. 2021, "RoFormer", section 3.2.2, with its base of 10,000.
    """
    exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = torch.outer(position, 10_000.0**-exponent)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels (i, i + half) by its position's angle; [..., seq, head width], dtype kept."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).type_as(x)
