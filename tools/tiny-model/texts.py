"""Texts of the embedded model itself, for the training of its drafters: what it writes is what they have to predict.

    python texts.py CORPUS

Continues beginnings drawn from the files of `corpus.py` and adds `greedy.bin` and `sampled.bin` to CORPUS, batch by batch,
until each contains `--tokens`; started again, it goes on.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import torch

from distill import target
from repetition import continuations
from train import BEGIN_ID, Source

PROMPTS = (8, 32, 96, 192)          # tokens, `<|begin_of_text|>` counted
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
BEGINNINGS = {"passages": 0.3, "prose": 0.25, "api": 0.3, "crates": 0.15}
TEXTS, CONTINUATION = 128, 256      # texts of a batch, tokens


def draw(rng, sources):
    """Prompts of one length: two thirds begin a document, the others are from anywhere behind a begin mark."""
    length, prompts = int(rng.choice(PROMPTS)), []
    for i, name in enumerate(rng.choice(list(BEGINNINGS), TEXTS, p=list(BEGINNINGS.values()))):
        source = sources[name]
        text = source.documents[rng.integers(len(source.documents))]
        if i % 3 == 0 or len(text) < length:
            start = rng.integers(len(source.stream) - length)
            text = np.concatenate([[BEGIN_ID], source.stream[start:start + length - 1]])
        prompts.append(text[:length].astype(np.int64))
    return torch.from_numpy(np.stack(prompts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--tokens", type=int, default=1_500_000, help="of each file")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = target().bfloat16()
    sources = {name: Source(args.corpus / f"{name}.bin", 512, i) for i, name in enumerate(BEGINNINGS)}
    paths = {name: args.corpus / f"{name}.bin" for name in TEMPERATURES}
    sizes = {name: path.stat().st_size // 2 if path.exists() else 0 for name, path in paths.items()}
    while min(sizes.values()) < args.tokens:
        name, began = min(sizes, key=sizes.get), time.time()
        torch.manual_seed(sizes[name])
        prompts = draw(np.random.default_rng([sizes[name], len(name)]), sources)
        texts = continuations(model, prompts, CONTINUATION, TEMPERATURES[name])
        with paths[name].open("ab") as file:
            file.write(texts.numpy().astype(np.uint16).tobytes())
        sizes[name] += texts.numel()
        speed = TEXTS * CONTINUATION / (time.time() - began)
        print(f"{name}: {sizes[name]:,} tokens, {speed:.0f} new ones a second", flush=True)


if __name__ == "__main__":
    main()
