"""The tiny model: Llama's architecture, with the option of layers that read the K and V of a layer below them.

Parameter names are those of transformers' `LlamaForCausalLM` without the leading `model.`.
"""
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Shape:
    """`share`: that many layers in a row use the K and V of the first of them; 1 is plain Llama."""
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    vocabulary: int = 4096
    context: int = 1024
    theta: float = 10_000.0
    eps: float = 1e-5
    share: int = 1

    def owner(self, layer):
        return layer - layer % self.share


class RmsNorm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape.hidden)), shape.eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def causal_attention(q, k, v, block=256):
    """Queries block by block, each against the keys up to its end: on CPUs a good deal faster than PyTorch's own."""
    out, length = [], q.shape[2]
    for start in range(0, length, block):
        end = min(start + block, length)
        scores = q[:, :, start:end] @ k[:, :, :end].mT
        later = torch.full((end - start, end), -torch.inf, dtype=scores.dtype).triu(start + 1)
        out.append(torch.softmax(scores / math.sqrt(q.shape[3]) + later, -1) @ v[:, :, :end])
    return torch.cat(out, 2)


class Attention(nn.Module):
    def __init__(self, shape, owns):
        super().__init__()
        self.shape, self.owns = shape, owns
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        if owns:
            self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
            self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)

    def forward(self, x, cos, sin, kv):
        batch, length, _ = x.shape

        def split(y, heads):
            return y.view(batch, length, heads, self.shape.head_dim).transpose(1, 2)

        q = rotate(split(self.q_proj(x), self.shape.heads), cos, sin)
        if self.owns:
            group = self.shape.heads // self.shape.kv_heads
            k = rotate(split(self.k_proj(x), self.shape.kv_heads), cos, sin)
            v = split(self.v_proj(x), self.shape.kv_heads)
            kv = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = causal_attention(q, *kv)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1)), kv


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape, owns):
        super().__init__()
        self.input_layernorm, self.self_attn = RmsNorm(shape), Attention(shape, owns)
        self.post_attention_layernorm, self.mlp = RmsNorm(shape), Mlp(shape)

    def forward(self, x, cos, sin, kv):
        y, kv = self.self_attn(self.input_layernorm(x), cos, sin, kv)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class TinyLlama(nn.Module):
    """Tied embeddings; tokens `[batch, length]` to logits `[batch, length, vocabulary]`."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, shape.owner(i) == i) for i in range(shape.layers)])
        self.norm = RmsNorm(shape)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, 0, 0.02 / (math.sqrt(2 * shape.layers) if into_residual else 1))

    def forward(self, tokens):
        shape = self.shape
        frequencies = 1 / shape.theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
        angles = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None] * frequencies
        x, kv = self.embed_tokens(tokens), None
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x, kv = layer(x, cos, sin, kv)
        return F.linear(self.norm(x), self.embed_tokens.weight)
