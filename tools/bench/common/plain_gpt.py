"""A plain PyTorch GPT-2 for comparison: stock modules, sdpa, fused AdamW, optional torch.compile.

It represents a careful user's script without deliberate inefficiencies: all parameters in one dtype
without fp32 copies, one parameter for the tied table, clipping by torch's foreach norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tools.bench.common.contenders import CLIP, Batches, Shape, adamw


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block: [b, s, h] -> [b, s, h]."""
        batch, length, hidden = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """A model that maps tokens and labels [b, s] to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens and labels [b, s]."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class PlainLoop:
    """The plain GPT in a plain loop over the same batches as ours."""

    def __init__(
        self,
        shape: Shape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batches: Batches,
        compiled: bool,
    ) -> None:
        self.name = "plain PyTorch, compiled" if compiled else "plain PyTorch"
        torch.manual_seed(0)
        with torch.device(device):
            model = PlainGPT(shape).to(dtype)
        self._parameters = list(model.parameters())
        self._optimizer = adamw(self._parameters)
        self._model = torch.compile(model) if compiled else model
        self._batches = batches

    def step(self) -> float:
        batches = self._batches.next()
        total = torch.zeros((), device=batches[0][0].device)
        for tokens, labels in batches:
            loss = self._model(tokens, labels) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total.item()
