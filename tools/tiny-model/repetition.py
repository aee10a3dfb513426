"""Against repetition under greedy decoding: unlikelihood training of sequences (Welleck et al. 2019).

The model continues pieces of the training text greedily; the probability of tokens that end a run of four tokens seen
before in the same text is then lowered.
"""
import numpy as np
import torch
from torch.nn import functional as F

from model import rotate

PROMPTS = (4, 6, 9, 16, 32)         # tokens, `<|begin_of_text|>` counted
CONTINUATION, RUN = 128, 4          # tokens, tokens of a repeated run
DRAWN, TEXTS = 60, 12               # texts continued at once, texts of a step
BEGINNINGS = {"passages": 0.7, "prose": 0.2, "api": 0.1}


@torch.no_grad()
def continuations(model, prompts, count, temperature=0.0):
    """`[batch, length]` to `[batch, length + count]`, with a cache of K and V; greedy at temperature 0."""
    shape, tokens = model.shape, prompts
    total = prompts.shape[1] + count
    frequencies = 1 / shape.theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.arange(total, dtype=torch.float32)[:, None] * frequencies
    cache, new, seen = {}, prompts, 0
    while tokens.shape[1] < total:
        x, end = model.embed_tokens(new), seen + new.shape[1]
        cos, sin = angles[seen:end].cos().to(x.dtype), angles[seen:end].sin().to(x.dtype)
        mask = torch.full((end - seen, end), -torch.inf, dtype=x.dtype).triu(seen + 1)
        for i, layer in enumerate(model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)

            def split(y, heads):
                return y.view(len(new), -1, heads, shape.head_dim).transpose(1, 2)

            q = rotate(split(attention.q_proj(normed), shape.heads), cos, sin)
            if attention.owns:
                k = rotate(split(attention.k_proj(normed), shape.kv_heads), cos, sin)
                v = split(attention.v_proj(normed), shape.kv_heads)
                old = cache.get(i)
                cache[i] = (torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)) if old else (k, v)
            group = shape.heads // shape.kv_heads
            k, v = (t.repeat_interleave(group, 1) for t in cache[shape.owner(i)])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + attention.o_proj(y.transpose(1, 2).reshape(len(new), end - seen, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits, seen = F.linear(model.norm(x[:, -1]), model.embed_tokens.weight).float(), end
        if temperature:
            new = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        else:
            new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def repeats(tokens, start):
    """Which of `tokens[start:]` end a run of `RUN` tokens that came before."""
    seen, out = set(), np.zeros(len(tokens) - start, dtype=bool)
    for i in range(RUN, len(tokens) + 1):
        run = tuple(tokens[i - RUN:i])
        if i > start:
            out[i - 1 - start] = run in seen
        seen.add(run)
    return out


class Repetition:
    """Texts of the model, made anew after every `DRAWN / TEXTS` losses."""

    def __init__(self, seed):
        self.rng, self.waiting = np.random.default_rng([seed, 1]), []

    def draw(self, model, sources):
        """Most prompts begin a text, as a user's do; a third are from anywhere."""
        length, prompts = int(self.rng.choice(PROMPTS)), []
        for i, name in enumerate(self.rng.choice(list(BEGINNINGS), DRAWN, p=list(BEGINNINGS.values()))):
            source = sources[name]
            text = source.documents[self.rng.integers(len(source.documents))]
            if i % 3 == 0 or len(text) < length:
                text = source.stream[self.rng.integers(len(source.stream) - length):]
            prompts.append(text[:length].astype(np.int64))
        texts = continuations(model, torch.from_numpy(np.stack(prompts)), CONTINUATION)
        repeated = torch.from_numpy(np.stack([repeats(text, length) for text in texts.tolist()]))
        self.waiting = [(t, r) for t, r in zip(texts.split(TEXTS), repeated.split(TEXTS))]

    def loss(self, model, sources):
        """The unlikelihood, a mean over all tokens, and the share of them that repeat."""
        if not self.waiting:
            self.draw(model, sources)
        texts, repeated = self.waiting.pop()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(texts[:, :-1])[:, -CONTINUATION:]
        chosen = torch.log_softmax(logits.float(), -1).gather(2, texts[:, -CONTINUATION:, None])[..., 0]
        unlikelihood = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4))
        return (unlikelihood * repeated).mean(), repeated.float().mean().item()
