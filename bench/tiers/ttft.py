#!/usr/bin/env python3
"""Time to first token of a long prompt from every place that can have it: computed, from the cache, from tiers in RAM, on a
disk and in Redis, and from a frozen prefix.

    bench/tiers/ttft.py --kvist target/release/kvist --model b-q8_0.gguf

A prompt has --tokens tokens in whole blocks, which can be found, and one more, which is always computed: so a prompt that is
found costs its way and one step. `kvist` has to be built with `--features tiers`. Redis is left out if `redis-server` is not installed. The cache has room for one
prompt alone, so that two prompts that take turns are never found there. The figure is the median over --rounds. Beside it stands
the time of one decode step at that depth, and, for the disk, what direct reads of as many bytes of the same files take in the
same run.

The store reads its files through the page cache, so there are two rows of the disk: `disk, cold` after the files have left the page
cache, which is what direct reads compare with, and `disk, warm` when each prompt has been loaded once since. The first load of a new
process, which touches memory for the first time, is a row of its own, with warm files. Only the standard library is needed.
"""
import argparse
import contextlib
import ctypes
import json
import mmap
import os
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402


class Server(common.Kvist):
    def __init__(self, kvist, model, tokens, *args):
        super().__init__(kvist, "--context", tokens + 512, "--request-timeout", "3600", *args, model=model, name=f"kvist serve {' '.join(args)}")

    def complete(self, prompt, max_tokens=1):
        """Seconds to the first token, seconds per further token, cached tokens, and the tokens that came from tiers."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}, "kvist": {"explain": True}}
        began = time.perf_counter()
        first = last = usage = None
        loaded = {}
        for chunk in self.stream("/v1/completions", body):
            usage = chunk.get("usage") or usage
            for prompt_ in chunk.get("kvist", {}).get("prompts", []):
                loaded = prompt_.get("loaded_tokens", loaded)
            if chunk["choices"]:
                last = time.perf_counter()
                first = first or last
        if first is None:
            raise common.Failed("no token came")
        step = (last - first) / (max_tokens - 1) if max_tokens > 1 else None
        return first - began, step, usage["prompt_tokens_details"]["cached_tokens"], loaded

    def tokens(self, text):
        return self.post("/tokenize", {"prompt": text})["tokens"]

    def text(self, rng, n_tokens):
        """Letters of exactly so many tokens, and a letter that adds one more."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        text = ""
        while (missing := n_tokens - len(self.tokens(text) if text else [])) > 0:
            text += "".join(rng.choices(letters, k=missing))
        while len(self.tokens(text)) > n_tokens:
            text = text[:-1]
        tokens = self.tokens(text)
        more = next((letter for letter in letters if self.tokens(text + letter)[:-1] == tokens), None)
        if len(tokens) != n_tokens or more is None:
            return self.text(rng, n_tokens)
        return text, more

    def settle(self):
        while self.metric("kvist_tier_store_bytes") > 0:
            time.sleep(0.05)


def store_files(folder):
    return sorted(p for p in pathlib.Path(folder).iterdir() if p.name.startswith("foyer"))


def in_page_cache(folder):
    """The share of the store's files that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found = pages = 0
    for path in store_files(folder):
        size = path.stat().st_size
        state = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        handle = os.open(path, os.O_RDONLY)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        os.close(handle)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"cannot map {path}")
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), state) != 0:
            raise OSError(ctypes.get_errno(), f"cannot look at the pages of {path}")
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        found += sum(page & 1 for page in state)
        pages += len(state)
    return found / pages


def leave_page_cache(folder):
    """Writes the store's files out, and drops them from the page cache."""
    for path in store_files(folder):
        handle = os.open(path, os.O_RDWR)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    if (share := in_page_cache(folder)) > 0.01:
        raise common.Failed(f"{share:.0%} of the files in {folder} stay in the page cache: give --dir on a disk, not on a tmpfs")


def direct_read(folder, n_bytes, n_chunk=8 << 20):
    """Seconds for n_bytes of the store's files, read directly, several at a time as the store does."""
    buffer = mmap.mmap(-1, n_chunk)
    began, left = time.perf_counter(), n_bytes
    for path in store_files(folder):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            at = 0
            while left > 0 and at + n_chunk <= path.stat().st_size:
                at += os.preadv(handle, [buffer], at)
                left -= n_chunk
        finally:
            os.close(handle)
        if left <= 0:
            break
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kvist", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where the disk's store is made; default: the system's temporary folder")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    rng = random.Random(1)
    plan = json.loads(common.output([args.kvist, "serve", "--model", args.model, "--context", args.tokens, "--dry-run", "--json"]))
    token_bytes = plan["bound"]["kv_cache"] / plan["cache_tokens"]
    figures = {}

    def note(name, seconds, cached, source):
        figures.setdefault(name, []).append(seconds)
        print(f"{name:14} {seconds:8.3f} s   {cached} of {args.tokens} tokens cached {source or ''}", flush=True)

    with tempfile.TemporaryDirectory(dir=args.dir) as folder, contextlib.ExitStack() as stack:
        disk = ["--tier-disk", folder + "/blocks", "--tier-disk-size", "4GiB"]
        redis = None
        if shutil.which("redis-server"):
            port = common.free_port()
            command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", folder]
            store = stack.enter_context(common.Group("redis-server", command, talks=True))
            while "Ready to accept connections" not in store.line(time.monotonic() + 30, "it was ready"):
                pass
            redis = f"redis://127.0.0.1:{port}/bench"
        tiers = ["--tier-ram", "4GiB", *disk] + (["--tier-store", redis] if redis else [])
        with Server(args.kvist, args.model, args.tokens, *tiers) as server:
            texts = [server.text(rng, args.tokens) for _ in range(2)]
            prompts = [text + letter for text, letter in texts]
            for prompt in prompts:
                seconds, step, cached, source = server.complete(prompt, 9)
                note("computed", seconds, cached, source)
                note("one step", step, cached, "")
                server.settle()
            for i in range(args.rounds):
                seconds, step, cached, source = server.complete(prompts[i % 2], 9)
                note("tier: RAM", seconds, cached, source)
                note("one step", step, cached, "")
                seconds, _, cached, source = server.complete(prompts[i % 2])
                note("cache", seconds, cached, source)
        with Server(args.kvist, args.model, args.tokens, *disk) as server:
            seconds, _, cached, source = server.complete(prompts[1])
            note("disk, first", seconds, cached, source)
            for _ in range((args.rounds + 1) // 2):
                leave_page_cache(folder + "/blocks")
                for row in ("disk, cold", "disk, warm"):
                    for prompt in prompts:
                        seconds, _, cached, source = server.complete(prompt)
                        note(row, seconds, cached, source)
                leave_page_cache(folder + "/blocks")
                note("direct reads", direct_read(folder + "/blocks", cached * token_bytes), cached, "")
        if redis:
            with Server(args.kvist, args.model, args.tokens, "--tier-store", redis) as server:
                for i in range(args.rounds):
                    seconds, _, cached, source = server.complete(prompts[i % 2])
                    note("tier: Redis", seconds, cached, source)
        text, frozen = folder + "/prefix.txt", folder + "/prefix.kvp"
        pathlib.Path(text).write_text(texts[0][0])
        freeze = [args.kvist, "prefix", "freeze", "--raw", "--quiet", "--model", args.model, "--text", text, "--out", frozen]
        common.output(freeze)
        for _ in range(args.rounds):
            # A new process each time: its first prompt.
            with Server(args.kvist, args.model, args.tokens, "--prefix", frozen) as server:
                seconds, _, cached, source = server.complete(prompts[0])
                note("frozen prefix", seconds, cached, source)
        medians = {name: statistics.median(values) for name, values in figures.items()}
        step, direct = medians["one step"], medians["direct reads"]
        print(f"\n{args.tokens} tokens of {token_bytes:.0f} bytes; medians")
        for name, seconds in medians.items():
            print(f"{name:14} {seconds * 1e3:9.1f} ms  {medians['computed'] / seconds:8.1f} x computed   "
                  f"{seconds / step:6.2f} steps")
        bound = step + 1.4 * direct
        for row in ("disk, cold", "disk, warm"):
            print(f"{row}: {medians[row] / bound:.2f} of one step + 1.4 x direct reads")
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps({"figures": figures, "token_bytes": token_bytes}, indent=1))


common.script(main)
