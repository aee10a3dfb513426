"""Trains a tiny model on what `corpus.py` wrote.

    python train.py --data CORPUS --out RUN                                  # the plain one: 2,826 steps
    python train.py --data CORPUS --out RUN --share 2 --steps 1500           # with cross-layer KV sharing

Saves RUN/checkpoint.pt every few minutes and goes on from it, exactly, when started again. Takes hours on two CPU cores;
bf16 arithmetic, f32 weights.
"""
import argparse
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from model import Shape, TinyLlama

WARM_UP, LOWEST = 200, 0.03     # steps; share of the learning rate that is left at the end
FROM_TRAIN = 0.55               # share of the batches from train.bin, the others are from prose.bin


def learning_rate(step, steps, peak):
    warm = min(1, (step + 1) / WARM_UP)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * warm * (cosine * (1 - LOWEST) + LOWEST)


def loss_of(model, inputs, targets):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().view(-1, model.shape.vocabulary), targets.reshape(-1))


def draw(rng, source, batch, context):
    starts = rng.integers(0, len(source) - context - 1, batch)
    rows = torch.from_numpy(np.stack([source[i:i + context + 1] for i in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def validate(model, tokens):
    """Nats per token, over windows of the whole context."""
    context, losses = model.shape.context, []
    for start in range(0, len(tokens) - context - 1, context):
        row = torch.from_numpy(tokens[start:start + context + 1].astype(np.int64))[None]
        losses.append(loss_of(model, row[:, :-1], row[:, 1:]).item())
    return sum(losses) / len(losses)


def optimizer_of(model, peak):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def save(path, **state):
    """Whole or not at all: an interrupted save leaves the old checkpoint."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of train.bin, prose.bin and val.bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=int, default=1, help="layers that share one K and V (2: every second owns none)")
    parser.add_argument("--steps", type=int, default=2826)
    parser.add_argument("--batch", type=int, default=8, help="rows of 1,024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")
    parser.add_argument("--validate-every", type=int, default=500, help="steps between validations")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)

    train, prose, val = (np.fromfile(args.data / f"{name}.bin", dtype=np.uint16) for name in ("train", "prose", "val"))
    model = TinyLlama(Shape(share=args.share))
    optimizer, rng, step = optimizer_of(model, args.lr), np.random.default_rng(0), 0
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} tokens", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["shape"] != asdict(model.shape):
            raise SystemExit(f"{checkpoint} is of another model: {state['shape']}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.bit_generator.state, step = state["rng"], state["step"]
        print(f"goes on at step {step}", flush=True)

    def keep():
        save(checkpoint, model=model.state_dict(), optimizer=optimizer.state_dict(), rng=rng.bit_generator.state,
             step=step, shape=asdict(model.shape))

    first, started, saved = step, time.time(), time.time()
    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        source = train if rng.random() < FROM_TRAIN else prose
        loss = loss_of(model, *draw(rng, source, args.batch, model.shape.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 or step == args.steps:
            speed = (step - first) * args.batch * model.shape.context / (time.time() - started)
            print(f"{step}: loss {loss.item():.3f}, {speed:.0f} tokens/s", flush=True)
        if step % args.validate_every == 0:
            print(f"{step}: validation {validate(model, val):.3f}", flush=True)
        if time.time() - saved > args.save_every:
            keep()
            saved = time.time()
    keep()
    print(f"done: validation {validate(model, val):.3f} nats per token", flush=True)


if __name__ == "__main__":
    main()
