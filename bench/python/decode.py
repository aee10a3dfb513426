#!/usr/bin/env python3
"""Decoding in transformers: a KvistCache with attn_implementation="kvist" beside DynamicCache with SDPA, in turns in one process.

    bench/python/run.sh                                   # makes an environment, then all of it
    bench/python/run.sh --contexts 4096 --dtypes bfloat16

The model is a random Llama of TinyLlama's shape: 22 layers, 32 query heads on 4 KV heads of 64, 1.1 billion parameters. The
context is random K and V that are put into the caches, since only the decoding after it is measured. Each turn is `--steps`
forward passes of one token, after which the cache is cropped to the context again; a figure is the median of all passes of all
turns. It prints what it measured, as a table for bench/RESULTS.md.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time

import kvist
import torch
import transformers
from kvist.transformers import KvistCache
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

SHAPE = dict(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_attention_heads=32, num_key_value_heads=4,
    max_position_embeddings=1 << 17, tie_word_embeddings=False,
)
CHUNK = 1024


def fill(cache, config, tokens, dtype):
    """The context: the same random K and V for every cache."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, config.num_key_value_heads, CHUNK, config.hidden_size // config.num_attention_heads)
    for _ in range(tokens // CHUNK):
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            cache.update(k, v, layer)


class Side:
    """One implementation with its cache, at a context."""

    def __init__(self, name, model, attention, cache, context):
        self.name, self.model, self.attention, self.cache = name, model, attention, cache
        self.milliseconds = []
        self.logits = None
        # As if by a model that attends itself: then the cache only stores.
        model.set_attn_implementation("sdpa")
        fill(cache, model.config, context, model.dtype)
        if isinstance(cache, KvistCache):
            cache._stores = None

    def turn(self, steps):
        self.model.set_attn_implementation(self.attention)
        token = torch.tensor([[7]])
        for _ in range(steps):
            begin = time.perf_counter()
            out = self.model(token, past_key_values=self.cache, use_cache=True)
            self.milliseconds.append((time.perf_counter() - begin) * 1e3)
        self.logits = out.logits[0, -1].float()
        self.cache.crop(-steps)


def cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


@torch.no_grad()
def measure(model, dtype, context, stores, rounds, steps):
    sides = [Side("DynamicCache, sdpa", model, "sdpa", DynamicCache(config=model.config), context)]
    for kv in stores:
        cache = KvistCache(model.config, kv=kv, max_step_tokens=CHUNK)
        sides.append(Side(f"KvistCache, kvist, {kv}", model, "kvist", cache, context))
    for side in sides:
        side.turn(2)
        side.milliseconds.clear()
    for _ in range(rounds):
        for side in sides:
            side.turn(steps)
    theirs = statistics.median(sides[0].milliseconds)
    rows = []
    for side in sides:
        ms = statistics.median(side.milliseconds)
        spread = (min(side.milliseconds), max(side.milliseconds))
        off = ((side.logits - sides[0].logits).abs().max() / sides[0].logits.abs().max()).item()
        rows.append(dict(
            dtype=dtype, context=context, name=side.name, ms=ms, fastest=spread[0], slowest=spread[1], times=theirs / ms, off=off,
        ))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="multiples of 1024")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--stores", nargs="+", default=["f16", "q8"])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json")
    args = parser.parse_args()
    print(
        f"{datetime.date.today()}: {cpu()}, {torch.get_num_threads()} threads; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, kvist {kvist.__version__}; {args.layers} layers, {args.rounds} turns of {args.steps} passes"
    )
    print("\n| model | context | | ms per token, median | fastest to slowest | × | logits off |\n|---|--:|---|--:|--:|--:|--:|", flush=True)
    results = []
    for dtype in args.dtypes:
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPE, num_hidden_layers=args.layers)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=getattr(torch, dtype)).eval()
        for context in args.contexts:
            rows = measure(model, dtype, context, args.stores, args.rounds, args.steps)
            results += rows
            for row in rows:
                print(
                    f"| {row['dtype']} | {row['context']} | {row['name']} | {row['ms']:.1f} | {row['fastest']:.1f} to "
                    f"{row['slowest']:.1f} | {row['times']:.2f} | {row['off']:.1e} |",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
