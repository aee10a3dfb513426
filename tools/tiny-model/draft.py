"""A draft model for the embedded model: a smaller Llama of the same tokens that learns its distributions.

    python draft.py --data CORPUS --out RUN
    python export.py RUN/checkpoint.pt --out RUN/folder
    python to_gguf.py RUN/folder RUN/draft.gguf --type q4_0

CORPUS contains what `corpus.py` and `texts.py` wrote. The second half of the training computes with weights rounded as q4_0
rounds them, so that four bits cost little.
"""
import argparse

import torch
from torch.func import functional_call
from torch.nn import functional as F

from distill import DECAY_FROM, arguments, held_out, rows, taps, target, train
from model import Shape, TinyLlama

SHAPE = Shape(hidden=96, layers=2, heads=3, kv_heads=1, head_dim=32, intermediate=192)
BLOCK = 32


def as_q4_0(weights):
    """What q4_0 keeps of a matrix; the gradient passes as if nothing were lost."""
    blocks = weights.detach().reshape(-1, BLOCK)
    scale = (blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8).half().float()
    steps = torch.floor(blocks / scale.where(scale != 0, 1.0) + 8.5).clamp(0, 15) - 8
    return weights + ((steps * scale).view_as(weights) - weights).detach()


def begin_as(student, model):
    """Before training: the target's embedding, projected on its main directions."""
    with torch.no_grad():
        rows = model.embed_tokens.weight
        _, _, directions = torch.linalg.svd(rows, full_matrices=False)
        rows = rows @ directions[:student.shape.hidden].T
        student.embed_tokens.weight.copy_(rows * (0.03 / rows.std()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, steps=2640)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model, student = target(), TinyLlama(SHAPE)
    begin_as(student, model)
    model = model.bfloat16()

    @torch.no_grad()
    def teach(tokens):
        hidden, _ = taps(model, tokens)
        return F.linear(model.norm(hidden), model.embed_tokens.weight)

    def distance(tokens, wanted, rounded):
        """The student's mean cross-entropy with the target's distributions."""
        weights = dict(student.named_parameters())
        if rounded:
            weights = {name: as_q4_0(w) if w.dim() == 2 else w for name, w in weights.items()}
        with torch.autocast("cpu", torch.bfloat16):
            logits = functional_call(student, weights, (tokens,))
        wanted = torch.softmax(wanted.float(), -1)
        return -(wanted * torch.log_softmax(logits.float(), -1)).sum(-1).mean()

    teach, distance = torch.compile(teach, dynamic=False), torch.compile(distance, dynamic=False)

    def loss_of(step):
        tokens = rows(args, step)
        return distance(tokens, teach(tokens), step >= DECAY_FROM * args.steps), tokens.numel()

    @torch.no_grad()
    def validate():
        weights = {name: as_q4_0(w) if w.dim() == 2 else w for name, w in student.named_parameters()}
        agree, batches = 0.0, held_out(args.data, 512)[:48].split(args.rows)
        for tokens in batches:
            best = functional_call(student, weights, (tokens,)).argmax(-1)
            agree += (best == teach(tokens).argmax(-1)).float().mean().item()
        return f"agrees, in q4_0: {agree / len(batches):.3f}"

    train(student, loss_of, validate, args)


if __name__ == "__main__":
    main()
