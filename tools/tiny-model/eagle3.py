"""An EAGLE-3 head (arXiv 2503.01840) for the embedded model: trains it, and writes it as vLLM's `speculators` do.

    python eagle3.py --data CORPUS --out RUN

CORPUS contains what `corpus.py` and `texts.py` wrote. Goes on from RUN/checkpoint.pt; at the end writes
RUN/model.safetensors (f16) and RUN/config.json.
"""
import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from distill import MIX, arguments, held_out, rows, taps, target, train, turns
from model import Mlp, RmsNorm, Shape, rotate

SHAPE = Shape(layers=1, heads=2, kv_heads=1, intermediate=192)
LAYERS = (2, 5, 7)          # the residual streams entering these layers of the target are the features
DRAFT_VOCABULARY = 1024
UNROLLED, DISCOUNT = 4, 0.85    # steps of training-time test, weight of each against the one before


class HeadAttention(nn.Module):
    """Reads the normed embedding and the normed hidden state side by side."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        width = 2 * shape.hidden
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x, cos, sin, attend):
        def split(y, heads):
            return y.view(*x.shape[:2], heads, self.shape.head_dim).transpose(1, 2)

        q = rotate(split(self.q_proj(x), self.shape.heads), cos, sin)
        k = rotate(split(self.k_proj(x), self.shape.kv_heads), cos, sin)
        y = attend(q, k, split(self.v_proj(x), self.shape.kv_heads))
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class HeadLayer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.hidden_norm, self.input_layernorm = RmsNorm(shape), RmsNorm(shape)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm, self.mlp = RmsNorm(shape), Mlp(shape)


class Head(nn.Module):
    """Parameter names are those of a published head. `norm_before_residual` is true: the normed hidden state is what
    attention and the MLP are added to."""

    def __init__(self, shape=SHAPE, features=3, draft_vocabulary=DRAFT_VOCABULARY):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(features * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape)])
        self.norm = RmsNorm(shape)
        self.lm_head = nn.Linear(shape.hidden, draft_vocabulary, bias=False)
        self.register_buffer("draft_ids", torch.zeros(draft_vocabulary, dtype=torch.int64))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0, 0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.03)

    def begin_as(self, model, draft_ids):
        """Before training: the rows and the norm of the target's output, and the last feature passed on."""
        with torch.no_grad():
            self.draft_ids.copy_(draft_ids)
            self.lm_head.weight.copy_(model.embed_tokens.weight[draft_ids])
            self.norm.weight.copy_(model.norm.weight)
            self.fc.weight[:, -self.shape.hidden:] += torch.eye(self.shape.hidden)

    def step(self, embeds, hidden, cos, sin, attend):
        """The hidden state that the next step takes; `logits` reads it. `hidden` is `fc(features)` or such a state."""
        layer = self.layers[0]
        hidden = layer.hidden_norm(hidden)
        x = hidden + layer.self_attn(torch.cat([layer.input_layernorm(embeds), hidden], -1), cos, sin, attend)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, hidden):
        return self.lm_head(self.norm(hidden))


class Unrolled:
    """Attention of training-time test. Step s at row i stands for position i + s: it sees the keys that step 0 made of
    real features up to row i, and those that steps 1 to s made at row i. One KV head, which broadcasts over the queries.
    `apart`, `[batch, 1, rows, rows]`, is true where a row must not see a row because it is of another text."""

    def __init__(self, length, apart=None):
        self.length, self.apart, self.keys, self.values = length, apart, [], []

    def __call__(self, q, k, v):
        self.keys.append(k)
        self.values.append(v)
        scale = 1 / math.sqrt(q.shape[-1])
        later = torch.full((self.length, self.length), -torch.inf, dtype=q.dtype).triu(1)
        if self.apart is not None:
            later = later.masked_fill(self.apart, -torch.inf)
        scores = [q @ self.keys[0].mT * scale + later]
        scores += [(q * k).sum(-1, keepdim=True) * scale for k in self.keys[1:]]
        weights = torch.softmax(torch.cat(scores, -1), -1)
        y = weights[..., :self.length] @ self.values[0]
        for i, v in enumerate(self.values[1:]):
            y = y + weights[..., self.length + i, None] * v
        return y


def unroll(head, embeds, features, steps, apart=None):
    """Hidden states of each step, `[batch, rows, hidden]`: the logits of that of step s at row i predict token i + s + 2
    of the text whose embeddings (the target's) and features these are. `apart` is that of `Unrolled`."""
    length, hidden, out = embeds.shape[1] - steps, head.fc(features), []
    hidden, attend = hidden[:, :length], Unrolled(length, apart)
    for s in range(steps):
        cos, sin = (t.to(embeds.dtype) for t in turns(head.shape, torch.arange(length) + s))
        hidden = head.step(embeds[:, s + 1:s + 1 + length], hidden, cos, sin, attend)
        out.append(hidden)
    return out


def most_frequent(data, count):
    """The most frequent tokens of the training texts, in the order of their ids."""
    total = np.zeros(SHAPE.vocabulary)
    for name, share in MIX.items():
        tokens = np.fromfile(data / f"{name}.bin", dtype=np.uint16)
        total += share * np.bincount(tokens, minlength=SHAPE.vocabulary) / len(tokens)
    return torch.from_numpy(np.sort(np.argsort(-total)[:count]))


def write(head, out, layers=LAYERS, verifier="tiny-rust-7m", marks=(0, 1), licence="MIT OR Apache-2.0"):
    """`layers` are the tapped ones of the model named `verifier`, `marks` the tokens that begin and end its texts."""
    ids, shape = head.draft_ids, head.shape
    known = torch.zeros(shape.vocabulary, dtype=torch.bool)
    known[ids] = True
    weights = {name: p.detach().half().contiguous() for name, p in head.named_parameters()}
    save_file({**weights, "d2t": ids - torch.arange(len(ids)), "t2d": known}, out / "model.safetensors",
              metadata={"format": "pt", "license": licence})
    layer = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=shape.hidden,
        intermediate_size=shape.intermediate, num_hidden_layers=1, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, hidden_act="silu", vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context, rms_norm_eps=shape.eps, rope_theta=shape.theta, attention_bias=False,
        mlp_bias=False, bos_token_id=marks[0], eos_token_id=marks[1], tie_word_embeddings=False)
    proposal = dict(proposal_type="greedy", speculative_tokens=3, verifier_accept_k=1, accept_tolerance=0.0)
    config = dict(
        architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=len(ids),
        target_hidden_size=shape.hidden, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=list(layers),
        transformer_layer_config=layer, tie_word_embeddings=False, dtype="float16",
        speculators_config=dict(algorithm="eagle3", default_proposal_method="greedy", proposal_methods=[proposal],
                                verifier=dict(name_or_path=verifier, architectures=["LlamaForCausalLM"])))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{out / 'model.safetensors'}: {(out / 'model.safetensors').stat().st_size:,} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, steps=2500)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model, head = target(), Head()
    head.begin_as(model, most_frequent(args.data, DRAFT_VOCABULARY))
    narrow = target().bfloat16()

    @torch.no_grad()
    def teach(tokens):
        hidden, features = taps(narrow, tokens, LAYERS)
        logits = F.linear(narrow.norm(hidden), narrow.embed_tokens.weight).float()
        return features, torch.softmax(logits, -1), logits.argmax(-1)

    def shares(embeds, features, wanted):
        """Cross-entropy of each step with the target's distribution, as far as the draft vocabulary goes."""
        with torch.autocast("cpu", torch.bfloat16):
            steps = [head.logits(hidden) for hidden in unroll(head, embeds, features, UNROLLED)]
        length, total = embeds.shape[1] - UNROLLED, 0.0
        for s, logits in enumerate(steps):
            loss = -(wanted[:, s + 1:s + 1 + length] * torch.log_softmax(logits.float(), -1)).sum(-1).mean()
            total = total + DISCOUNT ** s * loss
        return total

    teach, shares = torch.compile(teach, dynamic=False), torch.compile(shares, dynamic=False)

    def loss_of(step):
        tokens = rows(args, step)
        features, wanted, _ = teach(tokens)
        return shares(narrow.embed_tokens(tokens), features, wanted[..., head.draft_ids]), tokens.numel()

    @torch.no_grad()
    def validate():
        agree = torch.zeros(UNROLLED)
        batches = held_out(args.data, 512)[:48].split(args.rows)
        for tokens in batches:
            features, _, best = teach(tokens)
            with torch.autocast("cpu", torch.bfloat16):
                states = unroll(head, narrow.embed_tokens(tokens), features, UNROLLED)
                steps = [head.logits(hidden) for hidden in states]
            for s, logits in enumerate(steps):
                predicted = head.draft_ids[logits.argmax(-1)]
                agree[s] += (predicted == best[:, s + 1:s + 1 + predicted.shape[1]]).float().mean()
        return "agrees at each step: " + " ".join(f"{a / len(batches):.3f}" for a in agree)

    train(head, loss_of, validate, args)
    write(head, args.out)


if __name__ == "__main__":
    main()
