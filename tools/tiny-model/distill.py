"""What the trainings of the two drafters share: the embedded model that they learn from, the texts, the steps."""
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from model import Shape, TinyLlama
from muon import Muon
from train import WARM_UP, WEIGHT_DECAY, save, weights_of

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
    """Minimises `loss_of(step)`, which also gives the number of tokens it took; saves `checkpoint.pt` and goes on from it.
    Muon for matrices of the layers, AdamW for embeddings, output rows and norms."""
    checkpoint, step = args.out / "checkpoint.pt", 0
    args.out.mkdir(parents=True, exist_ok=True)
    named = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.dim() == 2 and not name.startswith(("embed_tokens", "lm_head"))]
    ends = [p for name, p in named if p.dim() == 2 and name.startswith(("embed_tokens", "lm_head"))]
    norms = [p for _, p in named if p.dim() < 2]
    optimizers = [Muon(hidden, lr=args.lr, weight_decay=WEIGHT_DECAY),
                  torch.optim.AdamW([dict(params=ends, weight_decay=WEIGHT_DECAY), dict(params=norms, weight_decay=0.0)],
                                    lr=args.lr, betas=(0.9, 0.95), fused=True)]
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        student.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        step = state["step"]
        print(f"goes on at step {step}", flush=True)
    print(f"{sum(p.numel() for _, p in named):,} parameters", flush=True)
    began = saved_at = time.time()
    tokens, running = 0, []
    while step < args.steps:
        rate = args.lr * min(1, (step + 1) / min(WARM_UP, args.steps / 10), (args.steps - step) / (args.steps * (1 - DECAY_FROM)))
        loss, count = loss_of(step)
        loss.backward()
        tokens += count
        running.append(loss.item())
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            speed = tokens / (time.time() - began)
            print(f"{step}: loss {np.mean(running):.4f}, rate {rate:.1e}, {speed:.0f} tokens/s", flush=True)
            running = []
        if step % 250 == 0:
            print(f"{step}: held out, {validate()}", flush=True)
        if step == args.steps or time.time() - saved_at > args.save_every:
            save(checkpoint, model=student.state_dict(), optimizers=[o.state_dict() for o in optimizers], step=step,
                 shape=asdict(student.shape))
            saved_at = time.time()
    print(f"held out, {validate()}", flush=True)
