#!/usr/bin/env python3
"""torch as a peer of `kvist bench decode` and `kvist bench prefill` on a GPU: a Llama decoder with random weights in bf16,
over cuBLAS and scaled_dot_product_attention. Prints tables of Markdown, as bench/gpu/run.sh does, which calls it.

    python3 bench/gpu/torch_steps.py --sizes "1.1b 8b" --depth 0,8192 --prompts 512,2048 --attention

Decoding: K and V lie in a cache of fixed size, and a step of one token is one CUDA graph, so Python costs nothing. A graph
has fixed shapes: attention reads all `depth + tokens` cells, also those not yet written. That is 64 cells of 8192 more
than a step reads on average, and the text that comes out means nothing. The logits of every token are copied to the host
before the next one starts, as kvist and llama-bench do. Prompts: one causal pass, launch by launch, logits of the last token.

Attention alone: one layer of a Llama 3 8B in f16 beside the copy bandwidth, as crates/cuda/examples/attention.rs has it.

Needs torch 2.5 or newer. `--device cpu --smoke` tries the script on a tiny model without a GPU.
"""
import argparse
import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

SHAPES = {
    "tiny": dict(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ff=96, vocab=300),
    "134m": dict(layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ff=2048, vocab=32000),
    "1.1b": dict(layers=22, hidden=2048, heads=32, kv_heads=4, head_dim=64, ff=5632, vocab=32000),
    "8b": dict(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ff=14336, vocab=32000),
}
REPEATS = 20


def attend_heads(q, k, v, causal=False):
    """torch shares the KV heads itself."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def attend_rows(q, k, v):
    """The queries of a KV head as rows of one head. Only for a single token, which sees every cell."""
    _, heads, _, dim = q.shape
    rows = q.reshape(1, k.shape[1], heads // k.shape[1], dim)
    return F.scaled_dot_product_attention(rows, k, v).reshape(1, heads, 1, dim)


# Neither is faster on every GPU and in every version of torch: attention alone is measured both ways, and the better one counts.
WAYS = {"enable_gqa": attend_heads, "queries as rows": attend_rows}


class Llama:
    def __init__(self, shape, dtype, device, cells):
        self.shape, self.device = shape, device
        heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        hidden, ff = shape["hidden"], shape["ff"]
        matrix = lambda rows, columns: torch.empty(rows, columns, dtype=dtype, device=device).normal_(0, columns**-0.5)
        cache = lambda: torch.empty(1, kv_heads, cells, dim, dtype=dtype, device=device).normal_()
        self.layers = [
            dict(
                qkv=matrix((heads + 2 * kv_heads) * dim, hidden),
                o=matrix(hidden, heads * dim),
                gate_up=matrix(2 * ff, hidden),
                down=matrix(hidden, ff),
                k=cache(),
                v=cache(),
            )
            for _ in range(shape["layers"])
        ]
        self.embed, self.head = matrix(shape["vocab"], hidden), matrix(shape["vocab"], hidden)
        self.norm = torch.ones(hidden, dtype=dtype, device=device)
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(cells, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.text = torch.randint(shape["vocab"], (cells,), device=device)

    def normed(self, x):
        return F.rms_norm(x, x.shape[-1:], self.norm, 1e-5)

    def pass_through(self, tokens, cos, sin, attend):
        """Logits of the last token. `attend` stores K and V in the layer's cache and returns attention over it."""
        n = tokens.shape[0]
        heads, kv_heads, dim = self.shape["heads"], self.shape["kv_heads"], self.shape["head_dim"]
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            qkv = F.linear(self.normed(x), layer["qkv"]).view(n, heads + 2 * kv_heads, dim).transpose(0, 1)
            qk, v = qkv[: heads + kv_heads], qkv[heads + kv_heads :]
            a, b = qk.chunk(2, -1)
            qk = qk * cos + torch.cat((-b, a), -1) * sin
            y = attend(layer, qk[:heads].unsqueeze(0), qk[heads:].unsqueeze(0), v.unsqueeze(0))
            x = x + F.linear(y.transpose(1, 2).reshape(n, heads * dim), layer["o"])
            gate, up = F.linear(self.normed(x), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(self.normed(x[-1:]), self.head).float()

    def step(self, position, cells, way):
        """One token. `position` is a tensor, so the same launches serve every step; the number of cells is fixed."""

        def attend(layer, q, k, v):
            layer["k"].index_copy_(2, position, k)
            layer["v"].index_copy_(2, position, v)
            return WAYS[way](q, layer["k"][:, :, :cells], layer["v"][:, :, :cells])

        cos, sin = (table.index_select(0, position) for table in (self.cos, self.sin))
        return self.pass_through(self.text.index_select(0, position), cos, sin, attend)

    def prompt(self, n):
        def attend(layer, q, k, v):
            layer["k"][:, :, :n].copy_(k)
            layer["v"][:, :, :n].copy_(v)
            return attend_heads(q, k, v, causal=True)

        return self.pass_through(self.text[:n], self.cos[:n], self.sin[:n], attend)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_of(device, launches):
    """What runs `launches` again, as one CUDA graph; and their result, always the same tensor."""
    if device.type != "cuda":
        return launches, None
    # Handles, workspaces and compiled kernels have to exist before the capture.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            launches()
    torch.cuda.current_stream(device).wait_stream(side)
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launches()
    return graph.replay, result


def decode_rate(model, depth, tokens, runs, way):
    """Tokens per second: the median of the runs after one that does not count."""
    device = model.device
    position = torch.full((1,), depth, dtype=torch.int64, device=device)
    replay, logits = graph_of(device, lambda: model.step(position, depth + tokens, way))
    host = torch.empty(1, model.shape["vocab"], pin_memory=device.type == "cuda")
    rates = []
    for _ in range(runs + 1):
        position.fill_(depth)
        wait(device)
        start = time.perf_counter()
        for _ in range(tokens):
            result = replay()
            host.copy_(result if logits is None else logits, non_blocking=True)
            position.add_(1)
            wait(device)
        rates.append(tokens / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def prompt_rate(model, tokens, runs):
    rates = []
    for _ in range(runs + 2):
        wait(model.device)
        start = time.perf_counter()
        model.prompt(tokens).cpu()
        rates.append(tokens / (time.perf_counter() - start))
    return statistics.median(rates[2:])


def seconds(device, launches):
    """Of all the launches, by the GPU's own clock: the median of 9 times, each from a mark before them to one after."""
    replay, _ = graph_of(device, launches)
    times = []
    for _ in range(10):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            replay()
            last.record()
            wait(device)
            times.append(first.elapsed_time(last) / 1e3)
        else:
            start = time.perf_counter()
            replay()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def faster_way(q, k, v):
    """The better of the ways for these shapes, and its seconds."""

    def repeat(attend):
        for _ in range(REPEATS):
            attend(q, k, v)

    took = {way: seconds(q.device, partial(repeat, attend)) / REPEATS for way, attend in WAYS.items()}
    return min(took.items(), key=lambda item: item[1])


def way_of(model, cells):
    layer, shape = model.layers[0], model.shape
    q = torch.empty(1, shape["heads"], 1, shape["head_dim"], dtype=layer["k"].dtype, device=model.device).normal_()
    return faster_way(q, layer["k"][:, :, :cells], layer["v"][:, :, :cells])[0]


def attention(device, tokens, copy_bytes):
    """A row as examples/attention.rs prints it."""
    heads, kv_heads, dim = 32, 8, 128
    random = lambda heads, tokens: torch.empty(1, heads, tokens, dim, dtype=torch.float16, device=device).normal_()
    q, k, v = random(heads, 1), random(kv_heads, tokens), random(kv_heads, tokens)
    way, took = faster_way(q, k, v)
    rate = 2 * k.numel() * k.element_size() / took
    a, b = (torch.empty(copy_bytes, dtype=torch.uint8, device=device).fill_(i) for i in (1, 2))

    def copies():
        for _ in range(REPEATS):
            b.copy_(a)

    copy = 2 * copy_bytes * REPEATS / seconds(device, copies)
    return (
        f"| {backend(device)}, {way} | {tokens} | f16 | f16 | 1 | {took * 1e6:.1f} µs | {rate / 1e9:.0f} GB/s "
        f"| {copy / 1e9:.0f} GB/s | {100 * rate / copy:.0f} % |"
    )


def backend(device):
    return f"torch {torch.__version__} on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'the CPU'}"


def check(device):
    """Steps over exactly the cells that are written give the logits of the prompt: no measurement, a proof of the model."""
    n = 12
    model = Llama(SHAPES["tiny"], torch.float32, device, n)
    expected = model.prompt(n)
    for way in WAYS:
        for layer in model.layers:
            layer["k"].fill_(torch.nan)
            layer["v"].fill_(torch.nan)
        for i in range(n):
            logits = model.step(torch.full((1,), i, dtype=torch.int64, device=device), i + 1, way)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def table(columns, aligned):
    print(f"\n| {' | '.join(columns)} |\n|{'|'.join(aligned)}|", flush=True)


def main():
    numbers = lambda text: [int(part) for part in text.replace(",", " ").split()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1.1b 8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--depth", type=numbers, default=[0, 8192], help="tokens before the decoded ones")
    parser.add_argument("--tokens", type=int, default=128, help="decoded tokens of a run")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens of the prompts")
    parser.add_argument("--runs", type=int, default=5, help="the median counts")
    parser.add_argument("--attention", action="store_true", help="attention alone and the copy bandwidth, too")
    parser.add_argument("--attention-tokens", type=int, default=32768)
    parser.add_argument("--copy-bytes", type=int, default=1 << 30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, short contexts, one run")
    args = parser.parse_args()
    if args.smoke:
        args.sizes, args.depth, args.tokens, args.prompts, args.runs = "tiny", [0, 32], 8, [16, 64], 1
        args.attention, args.attention_tokens, args.copy_bytes = True, 256, 1 << 20
    sizes = args.sizes.split()
    if unknown := [size for size in sizes if size not in SHAPES]:
        parser.error(f"--sizes are of {', '.join(SHAPES)}, not {unknown[0]}")
    device = torch.device(args.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("torch finds no NVIDIA GPU")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    check(device)

    decoding, prompts, failed = [], [], False
    for size in sizes:
        start = f"| {size} | bf16 | torch {torch.__version__}"
        try:
            cells = max([depth + args.tokens for depth in args.depth] + args.prompts)
            model = Llama(SHAPES[size], torch.bfloat16, device, cells)
            for depth in args.depth:
                way = way_of(model, depth + args.tokens)
                rate = decode_rate(model, depth, args.tokens, args.runs, way)
                decoding.append(f"{start}, {way} | bf16 | {depth} | {rate:.1f} |")
            for tokens in args.prompts:
                prompts.append(f"{start} | bf16 | {tokens} | {prompt_rate(model, tokens, args.runs):.1f} |")
        except RuntimeError as error:
            failed = True
            decoding.append(f"{start} | bf16 | | failed: {str(error).splitlines()[0]} |")
        model = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
    table(["model", "weights", "backend", "K and V", "tokens before", "tokens/s"], ["---"] * 4 + ["--:"] * 2)
    print("\n".join(decoding))
    if prompts:
        table(["model", "weights", "backend", "K and V", "tokens of the prompt", "tokens/s"], ["---"] * 4 + ["--:"] * 2)
        print("\n".join(prompts))
    if args.attention:
        columns = ["GPU", "tokens", "K", "V", "branches", "attention", "K and V read", "copy (read and written)", "share"]
        table(columns, ["---", "--:", "---", "---"] + ["--:"] * 5)
        print(attention(device, args.attention_tokens, args.copy_bytes), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
