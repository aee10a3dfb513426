"""What the trainings of the two drafters share: the embedded model that they learn from, the texts, the steps."""
from pathlib import Path

import numpy as np
import torch

from model import Shape, TinyLlama
from steps import Steps
from train import weights_of

EMBEDDED = Path(__file__).parent / "../../crates/model/embedded/tiny-rust-7m.gguf"
# Share of the rows from each file: what `texts.py` wrote, and what `corpus.py` did.
MIX = {"greedy": 0.30, "sampled": 0.15, "prose": 0.20, "api": 0.20, "passages": 0.05, "crates": 0.10}
LONG_FROM = 0.75        # of the steps: rows are twice as long and half as many from then on
DECAY_FROM = 0.5        # of the steps: the learning rate falls in a line from then on


def target(path=EMBEDDED, shape=Shape()):
    """A model with the weights of its GGUF file, in f32: the embedded one, or any Llama of this shape."""
    model = TinyLlama(shape).eval().requires_grad_(False)
    model.load_state_dict(weights_of(path, model))
    return model


def turns(shape, positions):
    """Cosines and sines for RoPE at these positions."""
    frequencies = 1 / shape.theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def taps(model, tokens, layers=()):
    """The model's hidden states before its final norm, and the residual streams entering `layers`, side by side."""
    cos, sin = turns(model.shape, torch.arange(tokens.shape[1]))
    x, tapped = model.embed_tokens(tokens), []
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    for i, layer in enumerate(model.layers):
        if i in layers:
            tapped.append(x)
        x, _ = layer(x, cos, sin, None)
    return x, torch.cat(tapped, -1) if tapped else None


def rows(args, step):
    """Windows of the training texts, `[count, length]`, drawn by `step` alone."""
    long, folder = step >= LONG_FROM * args.steps, args.data
    count, length = args.rows // (1 + long), 512 * (1 + long)
    rng, found = np.random.default_rng([7, step]), []
    for name in rng.choice(list(MIX), count, p=list(MIX.values())):
        tokens = np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r")
        start = rng.integers(len(tokens) - length)
        found.append(tokens[start:start + length].astype(np.int64))
    return torch.from_numpy(np.stack(found))


def held_out(folder, length):
    """`val.bin` in rows, `[count, length]`."""
    tokens = np.fromfile(folder / "val.bin", dtype=np.uint16).astype(np.int64)
    return torch.from_numpy(tokens[:len(tokens) // length * length].reshape(-1, length))


def arguments(parser, steps):
    parser.add_argument("--data", type=Path, required=True, help="folder of what corpus.py and texts.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint.pt and of what is exported")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rows", type=int, default=8, help="of one step, 512 tokens each")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=180, help="seconds between checkpoints")


def train(student, loss_of, validate, args):
    """Minimises `loss_of(step)`, which also gives the number of tokens it took; saves `checkpoint.pt` and goes on from it."""
    steps, running, counts = Steps(student, args, DECAY_FROM * args.steps), [], []
    while steps.left():
        (loss, count), rate = loss_of(steps.done), steps.rate()
        loss.backward()
        running.append(loss.item())
        counts.append(count)
        steps.take()
        if steps.done % 50 == 0:
            speed = steps.speed(np.mean(counts))
            print(f"{steps.done}: loss {np.mean(running):.4f}, rate {rate:.1e}, {speed:.0f} tokens/s", flush=True)
            running = []
        if steps.done % 250 == 0:
            print(f"{steps.done}: held out, {validate()}", flush=True)
        steps.keep()
    print(f"held out, {validate()}", flush=True)
