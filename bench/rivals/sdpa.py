"""torch on the same shapes: scaled_dot_product_attention over caches of several layers, and the prefill of a
whole model as plain torch modules would run it. One JSON line per measurement, medians in ms.

    python sdpa.py attention --shape a --tokens 4096 --queries 1 --dtype bf16
    python sdpa.py prefill --tokens 512 --dtype bf16
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = {
    "a": dict(layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ff=2048, vocab=32000),
    "b": dict(layers=22, hidden=2048, heads=32, kv_heads=4, head_dim=64, ff=5632, vocab=32000),
}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def median_ms(step, runs):
    for _ in range(2):
        step()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def causal_mask(queries, tokens, dtype):
    """Additive, made once and not measured: `is_causal` counts from the first key, here the queries are the last
    tokens."""
    hidden = torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries + 1)
    return torch.zeros(queries, tokens, dtype=dtype).masked_fill(hidden, float("-inf"))


def grouped(q, k, v, mask, way):
    """The ways torch offers to share KV heads; the caller takes the fastest."""
    if way == "enable_gqa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    if way == "expand":
        groups = q.shape[1] // k.shape[1]
        many = lambda x: x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)
        return F.scaled_dot_product_attention(q, many(k), many(v), attn_mask=mask)
    # The queries of a group as rows of one head: for a single query no mask is needed.
    b, heads, queries, dim = q.shape
    rows = q.reshape(b, k.shape[1], -1, dim)
    return F.scaled_dot_product_attention(rows, k, v).reshape(b, heads, queries, dim)


def ways(shape, queries):
    if shape["heads"] == shape["kv_heads"]:
        return ["plain"] if queries == 1 else ["expand"]
    return ["enable_gqa", "expand"] + (["plain"] if queries == 1 else [])


def attention(args):
    shape, dtype = SHAPES[args.shape], DTYPES[args.dtype]
    some = lambda heads, tokens: torch.randn(1, heads, tokens, shape["head_dim"]).to(dtype)
    layers = [
        (some(shape["heads"], args.queries), some(shape["kv_heads"], args.tokens), some(shape["kv_heads"], args.tokens))
        for _ in range(shape["layers"])
    ]
    mask = causal_mask(args.queries, args.tokens, dtype) if args.queries > 1 else None
    took = {}
    for way in ways(shape, args.queries):
        took[way] = median_ms(lambda: [grouped(q, k, v, mask, way) for q, k, v in layers], args.runs)
    way = min(took, key=took.get)
    return {"tokens": args.tokens, "queries": args.queries, "way": way, "median_ms": took[way]}


class Llama:
    def __init__(self, shape, dtype, tokens):
        self.shape = shape
        q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
        one = lambda rows, columns: (torch.randn(rows, columns) / columns**0.5).to(dtype)
        h, ff = shape["hidden"], shape["ff"]
        sizes = dict(q=(q, h), k=(kv, h), v=(kv, h), o=(h, q), gate=(ff, h), up=(ff, h), down=(h, ff))
        first = {name: one(*size) for name, size in sizes.items()}
        # Every layer in memory of its own.
        self.layers = [{name: w.clone() for name, w in first.items()} for _ in range(shape["layers"])]
        self.embed, self.head = one(shape["vocab"], h), one(shape["vocab"], h)
        self.norm = torch.ones(h, dtype=dtype)
        angles = torch.outer(
            torch.arange(tokens).float(), 10000.0 ** (-torch.arange(0, shape["head_dim"], 2) / shape["head_dim"])
        ).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rope(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def __call__(self, tokens, way):
        s = self.shape
        x = F.embedding(tokens, self.embed)
        heads = lambda x: x.view(1, tokens.shape[1], -1, s["head_dim"]).transpose(1, 2)
        for w in self.layers:
            y = F.rms_norm(x, x.shape[-1:], self.norm, 1e-5)
            q, k, v = (heads(F.linear(y, w[name])) for name in "qkv")
            q, k = self.rope(q), self.rope(k)
            if way == "enable_gqa":
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                groups = s["heads"] // s["kv_heads"]
                k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(y.transpose(1, 2).flatten(2), w["o"])
            y = F.rms_norm(x, x.shape[-1:], self.norm, 1e-5)
            x = x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])
        # Logits of the last token, as llama.cpp and kvist compute in a prefill.
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], self.norm, 1e-5), self.head)


def prefill(args):
    shape = SHAPES[args.shape]
    model = Llama(shape, DTYPES[args.dtype], args.tokens)
    tokens = torch.randint(shape["vocab"], (1, args.tokens))
    took = {way: median_ms(lambda: model(tokens, way), args.runs) for way in ("enable_gqa", "expand")}
    way = min(took, key=took.get)
    return {"prefill": args.tokens, "way": way, "median_ms": took[way], "tokens_per_s": args.tokens * 1e3 / took[way]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "prefill"])
    parser.add_argument("--shape", choices=SHAPES, default="b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        result = {"attention": attention, "prefill": prefill}[args.what](args)
    print(json.dumps({"torch": torch.__version__, "dtype": args.dtype, "threads": args.threads, **result}))


if __name__ == "__main__":
    main()
