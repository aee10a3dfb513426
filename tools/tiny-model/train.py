"""Trains a tiny model on what `corpus.py` wrote.

    python train.py --data CORPUS --out RUN --init ../../crates/model/embedded/tiny-rust-7m.gguf

Saves RUN/checkpoint.pt every few minutes and goes on from it when started again; RUN/before.pt is what there was before
rows were of the whole context. bf16 arithmetic, f32 weights.
"""
import argparse
from dataclasses import asdict
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from model import Shape, TinyLlama
from repetition import Repetition
from steps import Steps, save
from to_gguf import gguf_name, unpermute

BEGIN_ID = 0
# Share of the rows from each file of `corpus.py`: while rows are half as long as the context, and from then on.
FIRST = {"prose": 0.45, "api": 0.27, "tails": 0.08, "crates": 0.20}
LAST = {"prose": 0.42, "api": 0.38, "tails": 0.08, "crates": 0.02, "passages": 0.10}


class Source:
    """The documents of one file in an order of their own each epoch, cut into windows that come in random order."""

    def __init__(self, path, context, seed):
        self.tokens, self.context, self.seed = np.fromfile(path, dtype=np.uint16), context, seed
        self.documents = np.split(self.tokens, np.flatnonzero(self.tokens == BEGIN_ID)[1:])
        self.begin(epoch=0, taken=0)

    def begin(self, epoch, taken):
        rng = np.random.default_rng([self.seed, self.context, epoch])
        self.epoch, self.taken = epoch, taken
        self.stream = np.concatenate([self.documents[i] for i in rng.permutation(len(self.documents))])
        starts = np.arange(rng.integers(self.context), len(self.stream) - self.context - 1, self.context)
        self.starts = rng.permutation(starts)

    def row(self):
        if self.taken == len(self.starts):
            self.begin(self.epoch + 1, 0)
        start = self.starts[self.taken]
        self.taken += 1
        return self.stream[start:start + self.context + 1].astype(np.int64)


def weights_of(path, model):
    """The parameters in a GGUF file of `to_gguf.py` or in a model.safetensors."""
    if path.suffix != ".gguf":
        return {name.removeprefix("model."): w.float() for name, w in load_file(path).items()}
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    found = {}
    for name, p in model.named_parameters():
        rows = tensors[gguf_name("model." + name)].reshape(p.shape)
        heads = model.shape.heads if ".q_proj." in name else model.shape.kv_heads if ".k_proj." in name else 0
        found[name] = torch.from_numpy((unpermute(rows, heads) if heads else rows).copy())
    return found


def loss_of(model, inputs, targets):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().view(-1, model.shape.vocabulary), targets.reshape(-1))


@torch.no_grad()
def validate(model, tokens):
    """Nats per token as `kvist eval` counts them: windows of the whole context, the first token of each given."""
    total, count = 0.0, 0
    for window in np.split(tokens, range(model.shape.context, len(tokens), model.shape.context)):
        row = torch.from_numpy(window.astype(np.int64))[None]
        total += loss_of(model, row[:, :-1], row[:, 1:]).item() * (len(window) - 1)
        count += len(window) - 1
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of what corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="weights to start from, model.safetensors or GGUF; default: random")
    parser.add_argument("--share", type=int, default=1, help="layers that share a K and V (2: every second owns none)")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--decay-from", type=int, default=100, help="step at which the learning rate begins to fall")
    parser.add_argument("--long-from", type=int, default=3000, help="step from which rows are of the whole context")
    parser.add_argument("--unlikelihood", type=float, default=0,
                        help="weight of training against repetition, every fourth step of whole rows; 0: none")
    parser.add_argument("--tokens", type=int, default=4096, help="of one step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=float, default=300, help="seconds between checkpoints")
    parser.add_argument("--validate-every", type=int, default=200, help="steps between validations")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)

    val = np.fromfile(args.data / "val.bin", dtype=np.uint16)
    model = TinyLlama(Shape(share=args.share))
    if args.init:
        model.load_state_dict(weights_of(args.init, model))
    steps, rng = Steps(model, args, args.decay_from), np.random.default_rng(0)
    places = steps.found.get("places", {})
    if steps.found:
        rng.bit_generator.state = steps.found["rng"]
    loss = torch.compile(loss_of, dynamic=False)

    def sources():
        mix, context = (LAST, model.shape.context) if steps.done >= args.long_from else (FIRST, model.shape.context // 2)
        found = {name: Source(args.data / f"{name}.bin", context, i) for i, name in enumerate(mix)}
        for name, source in found.items():
            epoch, taken, of = places.get(name, (0, 0, context))
            source.begin(epoch, taken) if of == context else source.begin(epoch + 1, 0)
        return mix, context, found

    mix, context, data = sources()
    print(", ".join(f"{name} {len(source.tokens):,} tokens" for name, source in data.items()), flush=True)
    running, repeated, repetition = [], [], Repetition(steps.done)
    while steps.left():
        if steps.done == args.long_from:
            mix, context, data = sources()
            save(args.out / "before.pt", model=model.state_dict(), shape=asdict(model.shape))
        names = rng.choice(list(mix), args.tokens // context, p=list(mix.values()))
        rows = torch.from_numpy(np.stack([data[name].row() for name in names]))
        places = {name: (source.epoch, source.taken, context) for name, source in data.items()}
        value = loss(model, rows[:, :-1], rows[:, 1:])
        value.backward()
        running.append(value.item())
        if args.unlikelihood and steps.done >= args.long_from and steps.done % 4 == 0:
            value, share = repetition.loss(model, data)
            (args.unlikelihood * value).backward()
            repeated.append(share)
        rate = steps.rate()
        steps.take()
        if steps.done % 50 == 0 or not steps.left():
            speed = steps.speed(args.tokens)
            print(f"{steps.done}: loss {np.mean(running):.3f}, rate {rate:.1e}, {speed:.0f} tokens/s"
                  + (f", {np.mean(repeated):.3f} repeated" if repeated else ""), flush=True)
            running, repeated = [], []
        if steps.done % args.validate_every == 0:
            print(f"{steps.done}: validation {validate(model, val):.4f}", flush=True)
        steps.keep(rng=rng.bit_generator.state, places=places)
    print(f"done: validation {validate(model, val):.4f} nats per token", flush=True)


if __name__ == "__main__":
    main()
