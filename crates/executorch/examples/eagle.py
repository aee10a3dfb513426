"""Speculative decoding with two programs: the target says what follows, the draft head guesses trees from the target's features.

    python examples/eagle.py      # a small random model and a head that fits it

Each program has a tree session of its own. A round: the draft grows a tree, one execution per level; the target verifies all of
it in one execution; both commit the accepted path. The draft never computes K and V for its last level, so what it lacks of the
path is given to it again, in one execution with the target's features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Tuple

import torch

import kvist.executorch as ke
from kvist.executorch.op import update_and_attend

HIDDEN, VOCAB, HEADS, DIM = 64, 97, 4, 16
DEPTH, WIDTH = 3, 2


class Head(torch.nn.Module):
    """A draft head: one decoder layer over the target's features beside the embeddings of the tokens that follow them.

    forward(tokens [1, n], features [n, hidden], position [n, 1]) -> logits [n, vocab], features [n, hidden]."""

    def __init__(self, target):
        super().__init__()
        self.embed, self.norm, self.lm_head = target.model.embed_tokens, target.model.norm, target.lm_head
        self.fc = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HEADS * DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        with torch.no_grad():  # an untrained head that passes the embedding on, and adds a little of what it attends to
            self.fc.weight.copy_(torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1))
            self.out.weight.mul_(0.02)

    def forward(self, tokens, features, position):
        x = self.fc(torch.cat([self.embed(tokens)[0], features], dim=-1))
        n = x.shape[0]
        q, k, v = (part.view(1, n, HEADS, DIM).transpose(1, 2) for part in self.qkv(x).split(HEADS * DIM, dim=-1))
        attended = update_and_attend(q, k, v, position, 0, DIM**-0.5, torch.float32)
        x = x + self.out(attended.transpose(1, 2).reshape(n, HEADS * DIM))
        return self.lm_head(self.norm(x)), x


def export_pair(folder: Path) -> Tuple[ke.Program, ke.Program]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.3,
    )).eval()
    with torch.no_grad():  # layers that change little: then a head can guess what the model says
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.005)
    head = Head(model).eval()
    ke.export(model, folder / "target.pte", features=(2,), max_step_tokens=64)
    n = torch.export.Dim("n", min=1, max=64)
    inputs = (torch.zeros(1, 3, dtype=torch.long), torch.zeros(3, HIDDEN), torch.arange(3).unsqueeze(-1))
    shapes = ({1: n}, {0: n}, {0: n})
    ke.export_module(head, inputs, shapes, folder / "draft.pte", n_layers=1, n_kv_heads=HEADS, head_dim=DIM)
    return ke.Program(folder / "target.pte"), ke.Program(folder / "draft.pte")


@dataclass
class Tree:
    """Node 0 is the last known token."""

    tokens: List[int] = field(default_factory=list)
    parents: List[int] = field(default_factory=list)
    depths: List[int] = field(default_factory=list)

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return len(self.tokens) - 1


def session(program: ke.Program) -> ke.Session:
    return ke.make_tree_session("kvist", ke.make_config(program.cache_params, 256, torch.float32))


def positions(first: int, n: int) -> torch.Tensor:
    return torch.arange(first, first + n).unsqueeze(-1)


def grow(draft: ke.Program, cache: ke.Session, root: int, feature: torch.Tensor, base: int) -> Tree:
    """A tree below `root`, at position `base`. All but its last level is in the draft's cache then, as nodes."""
    tree = Tree()
    level, features = [tree.add(root, -1)], feature[None]
    for depth in range(DEPTH):
        cache.propose([tree.parents[node] for node in level])
        tokens = torch.tensor([[tree.tokens[node] for node in level]])
        logits, hidden = draft.execute(cache, (tokens, features, torch.full((len(level), 1), base + depth)))
        guesses = logits.log_softmax(-1).topk(WIDTH, dim=-1)
        best = sorted(
            ((guesses.values[i, j].item(), i, guesses.indices[i, j].item()) for i in range(len(level)) for j in range(WIDTH)), reverse=True
        )[:WIDTH]
        parents = [i for _, i, _ in best]
        level = [tree.add(token, level[i]) for _, i, token in best]
        features = hidden[parents]
    return tree


def verify(tree: Tree, logits: torch.Tensor) -> Tuple[List[int], int]:
    """The longest path whose tokens the target would have chosen, and the token that it chooses after it."""
    path, chosen = [0], logits.argmax(-1).tolist()
    while True:
        wanted = chosen[path[-1]]
        child = [n for n, parent in enumerate(tree.parents) if parent == path[-1] and tree.tokens[n] == wanted]
        if not child:
            return path, wanted
        path.append(child[0])


def generate_with_drafts(target: ke.Program, draft: ke.Program, prompt: List[int], n: int) -> Tuple[List[int], int]:
    """`n` tokens after the prompt, and the passes of the target that they took."""
    target_cache, draft_cache = session(target), session(draft)
    # All of the prompt but its last token, which is the first root. The draft's token i goes with the target's feature of i - 1.
    _, features = target.run(target_cache, prompt[:-1], range(len(prompt) - 1))
    shifted = torch.cat([torch.zeros(1, HIDDEN), features[:-1]])
    draft.execute(draft_cache, (torch.tensor([prompt[:-1]]), shifted, positions(0, len(prompt) - 1)))
    text, root, feature, base, passes = [], prompt[-1], features[-1], len(prompt) - 1, 0
    while len(text) < n:
        tree = grow(draft, draft_cache, root, feature, base)
        target_cache.propose(tree.parents)
        nodes = len(tree.tokens)
        logits, features = target.execute(
            target_cache, (torch.tensor([tree.tokens]), base + torch.tensor(tree.depths).unsqueeze(-1), torch.arange(nodes))
        )
        passes += 1
        path, bonus = verify(tree, logits)
        target_cache.commit(path)
        # Of the path the draft has guessed from its own features: it keeps the root, whose feature was the target's, and gets the
        # others again with the target's.
        draft_cache.commit(path[:1])
        again = path[1:]
        if again:
            tokens = torch.tensor([[tree.tokens[node] for node in again]])
            draft.execute(draft_cache, (tokens, features[path[:-1]], positions(base + 1, len(again))))
        text += [tree.tokens[node] for node in again] + [bonus]
        base, root, feature = base + len(path), bonus, features[path[-1]]
    return text[:n], passes


def generate(target: ke.Program, prompt: List[int], n: int) -> List[int]:
    """The same text, token by token."""
    cache = ke.make_decode_session("kvist", ke.make_config(target.cache_params, 256, torch.float32))
    text, fed, position = [], list(prompt), 0
    for _ in range(n):
        logits, *_ = target.run(cache, fed, range(position, position + len(fed)))
        position += len(fed)
        fed = [int(logits[-1].argmax())]
        text += fed
    return text


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        target, draft = export_pair(Path(folder))
        text, passes = generate_with_drafts(target, draft, [5, 17, 3, 88], 60)
        assert text == generate(target, [5, 17, 3, 88], 60)
        print(f"60 tokens in {passes} passes of the target: {text}")
