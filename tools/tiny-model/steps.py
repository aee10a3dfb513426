"""The steps of a training: optimisers, the learning rate, checkpoints. What `train.py` and `distill.py` share."""
import os
import time
from dataclasses import asdict

import torch

from muon import Muon

WARM_UP = 100       # steps
WEIGHT_DECAY = 0.1


def save(path, **state):
    """Whole or not at all: an interrupted save leaves the old checkpoint."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def optimizers_of(model, peak):
    """Muon for the matrices of the layers, AdamW for embeddings, output rows and vectors."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    vectors = [p for _, p in named if p.dim() < 2]
    ends = [p for name, p in named if p.dim() == 2 and name.startswith(("embed_tokens", "lm_head"))]
    hidden = [p for name, p in named if p.dim() == 2 and not name.startswith(("embed_tokens", "lm_head"))]
    groups = [dict(params=ends, weight_decay=WEIGHT_DECAY), dict(params=vectors, weight_decay=0.0)]
    return [Muon(hidden, lr=peak, weight_decay=WEIGHT_DECAY),
            torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)]


class Steps:
    """The steps of `model`'s training, from those of OUT/checkpoint.pt on. `args` has `out`, `steps`, `lr` (its peak) and
    `save_every`; from step `decay_from` on the learning rate falls in a line."""

    def __init__(self, model, args, decay_from):
        self.model, self.args, self.decay_from = model, args, decay_from
        self.optimizers, self.done, self.found = optimizers_of(model, args.lr), 0, {}
        self.checkpoint = args.out / "checkpoint.pt"
        args.out.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self.found = torch.load(self.checkpoint, weights_only=True)
            if self.found["shape"] != asdict(model.shape):
                raise SystemExit(f"{self.checkpoint} is of another model: {self.found['shape']}")
            model.load_state_dict(self.found["model"])
            for optimizer, saved in zip(self.optimizers, self.found["optimizers"]):
                optimizer.load_state_dict(saved)
            self.done = self.found["step"]
            print(f"goes on at step {self.done}", flush=True)
        print(f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} parameters", flush=True)
        self.first, self.began, self.saved = self.done, time.time(), time.time()

    def left(self):
        return self.done < self.args.steps

    def rate(self):
        left = (self.args.steps - self.done) / (self.args.steps - self.decay_from)
        return self.args.lr * min(1, (self.done + 1) / min(WARM_UP, self.args.steps / 10), left)

    def take(self):
        """Changes the weights by their gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1

    def speed(self, tokens):
        """Tokens per second, with `tokens` in a step."""
        return (self.done - self.first) * tokens / (time.time() - self.began)

    def keep(self, **more):
        """Saves the checkpoint, and `more` in it, where it is time to or the training is over."""
        if self.left() and time.time() - self.saved <= self.args.save_every:
            return
        save(self.checkpoint, model=self.model.state_dict(), optimizers=[o.state_dict() for o in self.optimizers],
             step=self.done, shape=asdict(self.model.shape), **more)
        self.saved = time.time()
