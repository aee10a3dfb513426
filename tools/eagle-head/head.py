"""An EAGLE-3 head for SmolLM2-135M-Instruct: trains it on what `features.py` wrote, and writes it in the spelling of vLLM's
`speculators`.

    python head.py --data DATA --model MODEL.gguf --out RUN

Goes on from RUN/checkpoint.pt; at the end, or when `--steps` was reached before, writes RUN/model.safetensors (f16) and
RUN/config.json.
"""
import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from smollm2 import LAYERS, LICENCE, MARKS, NAME, SHAPE
from distill import arguments, target, train
from eagle3 import DISCOUNT, Head, unroll, write

HEAD = replace(SHAPE, layers=1, kv_heads=9, intermediate=1024)
DRAFT_VOCABULARY = 8192
UNROLLED = 3            # steps of training-time test
ROW = 512               # tokens
WIDTHS = dict(tokens=(np.uint16, 1), texts=(np.int32, 1), wrote=(np.uint8, 1), features=(np.float16, 3 * SHAPE.hidden),
              last=(np.float16, SHAPE.hidden), norms=(np.float32, 1), best=(np.uint16, 1))


def arrays(folder):
    """What `features.py` wrote so far, by name, all of one length."""
    found = {name: np.memmap(folder / f"{name}.bin", dtype, mode="r") for name, (dtype, _) in WIDTHS.items()}
    length = min(len(found[name]) // width for name, (_, width) in WIDTHS.items())
    return {name: a[:length * WIDTHS[name][1]].reshape(length, WIDTHS[name][1]) for name, a in found.items()}


def windows(data, starts):
    """Rows that begin at `starts`: tensors `[rows, ROW, width]`, or without width where it is 1."""
    def tensor(name, array):
        rows = np.stack([array[start:start + ROW] for start in starts])
        wide = WIDTHS[name][1] > 1 or rows.dtype.kind == "f"
        rows = torch.from_numpy(rows if wide else rows.astype(np.int64))
        return rows if WIDTHS[name][1] > 1 else rows[..., 0]
    return {name: tensor(name, array) for name, array in data.items()}


def most_frequent(data, count):
    """The tokens that the texts hold most of, those of answers counted thrice, then in the order of their ids."""
    often = np.bincount(data["tokens"][:, 0], 1 + 2.0 * data["wrote"][:, 0], minlength=SHAPE.vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-often, kind="stable")[:count]))


@torch.no_grad()
def regress(head, data, rows=60_000, ridge=1e-2):
    """Begins `fc` as the linear map from the features of a token to what the output layer reads at the next one: better than
    hundreds of steps from random weights."""
    texts, last = data["texts"][:, 0], len(data["texts"]) - 1
    at = np.random.default_rng(3).permutation(np.flatnonzero(texts[:last] == texts[1:last + 1]))[:rows]
    x = torch.from_numpy(data["features"][np.sort(at)]).float()
    y = torch.from_numpy(data["last"][np.sort(at) + 1]).float() / head.norm.weight
    scale = x.square().mean(0).sqrt()
    x /= scale
    found = torch.linalg.solve(x.T @ x + ridge * len(x) * torch.eye(x.shape[1]), x.T @ y)
    head.fc.weight.copy_((found / scale[:, None]).T)
    head.norm.weight *= (x @ found).square().mean(-1).sqrt().mean()     # what it leaves unexplained makes it less sure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, steps=800)
    parser.add_argument("--model", type=Path, required=True, help="the target, a GGUF file")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model, head = target(args.model, SHAPE), Head(HEAD, len(LAYERS), DRAFT_VOCABULARY)
    data = arrays(args.data / "train")
    head.begin_as(model, most_frequent(data, DRAFT_VOCABULARY))
    regress(head, data)
    table, output = model.embed_tokens.weight.bfloat16(), model.embed_tokens.weight[head.draft_ids].bfloat16()
    del model

    def guesses(batch):
        """Of each step: the logits of the rows that predict a token of an answer, and the positions before these tokens."""
        texts, length = batch["texts"], ROW - UNROLLED - 1
        apart = (texts[:, :length, None] != texts[:, None, :length])[:, None]
        with torch.autocast("cpu", torch.bfloat16):
            states = unroll(head, table[batch["tokens"][:, :-1]], batch["features"][:, :-1].bfloat16(), UNROLLED, apart)
            for s, hidden in enumerate(states):
                after = slice(s + 2, s + 2 + length)
                chosen = (batch["wrote"][:, after] == 1) & (texts[:, :length] == texts[:, after])
                rows, columns = chosen.nonzero(as_tuple=True)
                yield head.logits(hidden[rows, columns]), (rows, columns + s + 1)

    def loss_of(step):
        """Cross-entropy of each step with the target's distribution, as far as the draft vocabulary goes."""
        data, rng = arrays(args.data / "train"), np.random.default_rng([11, step])
        batch = windows(data, rng.integers(len(data["tokens"]) - ROW, size=args.rows))
        total = 0.0
        for s, (logits, at) in enumerate(guesses(batch)):
            wanted = torch.exp((batch["last"][at].bfloat16() @ output.T).float() - batch["norms"][at][:, None])
            loss = -(wanted * torch.log_softmax(logits.float(), -1)).sum(-1).mean()
            total = total + DISCOUNT ** s * loss
        return total, batch["tokens"].numel()

    @torch.no_grad()
    def validate():
        """Where the head's likeliest token is the target's, in answers held out."""
        data, right, count = arrays(args.data / "held_out"), torch.zeros(UNROLLED), torch.zeros(UNROLLED)
        starts = np.arange(0, len(data["tokens"]) - ROW, ROW)[:32]
        for part in np.array_split(starts, max(1, len(starts) // 4)):
            batch = windows(data, part)
            for s, (logits, at) in enumerate(guesses(batch)):
                right[s] += (head.draft_ids[logits.argmax(-1)] == batch["best"][at]).sum()
                count[s] += len(logits)
        return "agrees at each step: " + " ".join(f"{share:.3f}" for share in right / count)

    train(head, loss_of, validate, args)
    write(head, args.out, LAYERS, NAME, MARKS, LICENCE)


if __name__ == "__main__":
    main()
