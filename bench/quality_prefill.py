#!/usr/bin/env python3
"""What `--fast-prefill` costs: the logits of a prompt against those of weights decoded to f32.

    bench/quality_prefill.py --kvist target/release/kvist --model MODEL.gguf --text FILE [--tokens 1024]

Prints KL divergence (mean, 99th percentile, largest), the share of positions with the same likeliest token, and perplexity. The
prompt goes through the cache in steps of 512 tokens. Needs numpy.
"""
import argparse
import json
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import common

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--kvist", default="target/release/kvist")
parser.add_argument("--model", required=True)
parser.add_argument("--text", required=True, type=Path)
parser.add_argument("--tokens", type=int, default=1024)
args = parser.parse_args()


def tokenize(text):
    """The ids of a text, from a server that lives as long as this takes."""
    with common.Kvist(args.kvist, "--context", "2048", model=args.model) as server:
        return server.post("/tokenize", {"prompt": text})["tokens"]


def logits(folder, *flags):
    out = folder / "logits.safetensors"
    command = [args.kvist, "logits", "-q", "--model", args.model, "--tokens-file", str(folder / "tokens")]
    subprocess.run(command + ["--out", str(out), "--chunk", "512", *flags], check=True)
    data = out.read_bytes()
    (head,) = struct.unpack("<Q", data[:8])
    tensor = json.loads(data[8 : 8 + head])["logits"]
    first, end = (8 + head + at for at in tensor["data_offsets"])
    return np.frombuffer(data[first:end], "<f4").reshape(tensor["shape"])


def log_softmax(rows):
    rows = rows.astype(np.float64)
    rows = rows - rows.max(1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(1, keepdims=True))


def compare(reference, found, tokens):
    kl, loss = [], []
    for at in range(0, len(found), 64):  # a vocabulary of f64 per token is large
        a, b = log_softmax(reference[at : at + 64]), log_softmax(found[at : at + 64])
        kl.extend((np.exp(a) * (a - b)).sum(1))
        loss.extend(-row[token] for row, token in zip(b, tokens[at + 1 : at + 65]))
    same = (reference.argmax(1) == found.argmax(1)).mean()
    return f"{np.mean(kl):.2e} | {np.quantile(kl, 0.99):.2e} | {max(kl):.3f} | {same:.1%} | {np.exp(np.mean(loss)):.2f}"


def main():
    tokens = tokenize(args.text.read_text()[: 16 * args.tokens])[: args.tokens]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "tokens").write_text(",".join(map(str, tokens)))
        reference = logits(folder, "--weights", "f32", "--kv", "f32")
        print("| | KL mean | KL p99 | KL max | top-1 agreement | perplexity |\n|---|--:|--:|--:|--:|--:|")
        print("| weights decoded to f32, K and V in f32 |", compare(reference, reference, tokens), "|")
        alone = logits(folder, "--weights", "f32", "--kv", "f32", "--fast-prefill")
        print("| the same, --fast-prefill (attention alone) |", compare(reference, alone, tokens), "|", flush=True)
        for flags in (["--kv", "f32"], ["--kv", "q8"]):
            for fast in ([], ["--fast-prefill"]):
                line = compare(reference, logits(folder, *flags, *fast), tokens)
                print("|", " ".join(flags + fast), "|", line, "|", flush=True)


common.script(main)
