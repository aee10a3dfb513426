"""What the drafters are worth on held-out text: the embedded model continues pieces of `val.txt` greedily, and the drafter
proposes below every token that a target pass would end with.

    python acceptance.py --data CORPUS --head RUN/model.safetensors --draft RUN/draft.gguf

Prints, for chains, the share of drafted tokens accepted at each depth, of those whose parent was; for chains and trees,
tokens per target pass. Trees grow as in EAGLE-2: each level extends the `width` likeliest nodes by their `width` likeliest
tokens, and the `total` likeliest nodes of all are verified.
"""
import argparse
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import draft
from distill import held_out, taps, target, turns
from eagle3 import LAYERS, Head
from model import TinyLlama, rotate
from repetition import continuations
from train import weights_of

PROMPT, CONTINUATION = 128, 128     # tokens
SHAPES = [(1, 5, 5), (4, 5, 16), (6, 5, 16), (8, 5, 16)]     # width, depth, total


class Memory:
    """K and V of a text's rows and, below the first `rows` of them, of a tree's nodes; a layer each."""

    def __init__(self):
        self.text, self.nodes, self.rows, self.mask = {}, {}, 0, None

    def at(self, layer):
        def attend(q, k, v):
            if self.mask is None:
                self.text[layer] = k, v
                mask = torch.full((k.shape[2], k.shape[2]), -torch.inf).triu(1)
            else:
                if layer in self.nodes:
                    k, v = (torch.cat(pair, 2) for pair in zip(self.nodes[layer], (k, v)))
                self.nodes[layer] = k, v
                k, v = (torch.cat([old[:, :, :self.rows], new], 2) for old, new in zip(self.text[layer], (k, v)))
                mask = torch.where(self.mask, 0.0, -torch.inf)
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            return torch.softmax(q @ k.mT / math.sqrt(q.shape[3]) + mask, -1) @ v
        return attend


class Eagle:
    """Row i takes token i + 1 and the features of token i, so it foresees token i + 2."""
    behind = 1

    def __init__(self, path, model):
        self.model, weights = model, load_file(path)
        self.ids = weights.pop("d2t") + torch.arange(len(weights["lm_head.weight"]))
        weights.pop("t2d")
        self.head = Head(draft_vocabulary=len(self.ids))
        self.head.load_state_dict({**{k: w.float() for k, w in weights.items()}, "draft_ids": self.ids})

    def run(self, tokens, states, positions, memory):
        cos, sin = turns(self.head.shape, positions)
        states = self.head.step(self.model.embed_tokens(tokens)[None], states[None], cos, sin, memory.at(0))[0]
        return states, torch.log_softmax(self.head.logits(states), -1)

    def text(self, tokens, memory):
        _, features = taps(self.model, tokens[None], LAYERS)
        return self.run(tokens[1:], self.head.fc(features[0, :-1]), torch.arange(len(tokens) - 1), memory)


class Draft:
    behind = 0

    def __init__(self, path, _model):
        self.model = TinyLlama(draft.SHAPE)
        self.model.load_state_dict(weights_of(path, self.model))
        self.ids = torch.arange(self.model.shape.vocabulary)

    def run(self, tokens, _states, positions, memory):
        model, shape = self.model, self.model.shape
        x, (cos, sin) = model.embed_tokens(tokens)[None], turns(shape, positions)

        def split(y, heads):
            return y.view(1, -1, heads, shape.head_dim).transpose(1, 2)

        for i, layer in enumerate(model.layers):
            part, normed = layer.self_attn, layer.input_layernorm(x)
            q = rotate(split(part.q_proj(normed), shape.heads), cos, sin)
            k = rotate(split(part.k_proj(normed), shape.kv_heads), cos, sin)
            y = memory.at(i)(q, k, split(part.v_proj(normed), shape.kv_heads))
            x = x + part.o_proj(y.transpose(1, 2).reshape(1, len(tokens), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[0], torch.log_softmax(F.linear(model.norm(x[0]), model.embed_tokens.weight), -1)

    def text(self, tokens, memory):
        return self.run(tokens, None, torch.arange(len(tokens)), memory)


def tree(drafter, memory, row, states, scores, width, depth):
    """Nodes below row `row` of the text: (token, parent, logarithm of the path's probability)."""
    memory.nodes, memory.rows = {}, row + 1
    nodes, seen, extended = [], [], 0       # seen: for each node that was run, which nodes that were run it sees

    def grow(parent, likelihoods, before):
        for value, best in zip(*likelihoods.topk(width)):
            nodes.append((int(drafter.ids[best]), parent, before + float(value)))

    grow(-1, scores[row], 0.0)
    ran, states_of = {}, {-1: states[row]}
    for level in range(1, depth):
        chosen = sorted(range(extended, len(nodes)), key=lambda n: -nodes[n][2])[:width]
        extended = len(nodes)
        for n in chosen:
            ran[n] = len(ran)
            seen.append(seen[ran[nodes[n][1]]] + [ran[n]] if nodes[n][1] >= 0 else [ran[n]])
        mask = torch.zeros(len(chosen), row + 1 + len(ran), dtype=torch.bool)
        mask[:, :row + 1] = True
        for i, n in enumerate(chosen):
            mask[i, [row + 1 + s for s in seen[ran[n]]]] = True
        memory.mask = mask
        below, likelihoods = drafter.run(torch.tensor([nodes[n][0] for n in chosen]),
                                         torch.stack([states_of[nodes[n][1]] for n in chosen]),
                                         torch.full((len(chosen),), row + level), memory)
        for i, n in enumerate(chosen):
            states_of[n] = below[i]
            grow(n, likelihoods[i], nodes[n][2])
    return nodes


def accepted(nodes, total, tokens):
    """How many of `tokens`, which the target goes on with, are a path of the `total` likeliest nodes."""
    kept, at = sorted(range(len(nodes)), key=lambda n: -nodes[n][2])[:total], -1
    for count, token in enumerate(tokens):
        found = [n for n in kept if nodes[n][1] == at and nodes[n][0] == token]
        if not found:
            return count
        at = found[0]
    return len(tokens)


@torch.no_grad()
def measure(drafter, texts, width, depth, total):
    passes = made = 0
    tried, right = np.zeros(depth), np.zeros(depth)
    for text in texts:
        memory, at = Memory(), PROMPT
        states, scores = drafter.text(text, memory)
        while at + depth < len(text):       # token `at` is the last one known
            nodes = tree(drafter, memory, at - drafter.behind, states, scores, width, depth)
            count = accepted(nodes, total, text[at + 1:at + 1 + depth].tolist())
            tried[:count + 1] += 1
            right[:count] += 1
            passes, made, at = passes + 1, made + count + 1, at + count + 1
    return right / tried[:depth], made / passes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of what corpus.py wrote")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = target()
    prompts = held_out(args.data, PROMPT)
    prompts = prompts[torch.arange(args.texts) * len(prompts) // args.texts]
    prompts[:, 0] = 0                       # <|begin_of_text|>
    texts = continuations(model, prompts, CONTINUATION)
    for kind, path in ((Eagle, args.head), (Draft, args.draft)):
        for shape in SHAPES if path else []:
            depths, mean = measure(kind(path, model), texts, *shape)
            print(f"{kind.__name__.lower():5} width {shape[0]}, depth {shape[1]}, total {shape[2]:2}: {mean:.2f} tokens "
                  "per pass; accepted at each depth " + " ".join(f"{share:.2f}" for share in depths), flush=True)


if __name__ == "__main__":
    main()
