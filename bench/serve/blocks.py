#!/usr/bin/env python3
"""Servers whose cache has blocks of 16, 32, 64, 128 and 256 tokens, under the same loads in turns.

    bench/serve/blocks.py --model MODEL [--kvist target/release/kvist] [--sizes 16,64] [--rounds 5]

Per round and server: prompts of 1,536 tokens that are new (prefill, tokens/s), eight answers side by side (decode, tokens/s), and chats: eight
users, a system prompt of 300 tokens that all share, turns of 20 to 120 tokens, answers of 16 to 48. The chats' tokens are twice what the
cache holds. Of the chats: the share of prompt tokens that the cache had, and the 99th percentiles of the time to the first token and of
the time between tokens. All servers live for the whole run, one is asked at a time, and which begins alternates. Figures are medians over
the rounds, and in brackets the median of each round's ratio to the first size. Only the standard library is needed.
"""
import argparse
import contextlib
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--kvist", default="target/release/kvist")
parser.add_argument("--model", required=True, help="with a context of 2,048 tokens at least")
parser.add_argument("--sizes", default="16,32,64,128,256", help="tokens of a block; the first is compared with")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--chats", type=int, default=32, help="chats of a round")
args = parser.parse_args()
SIZES = [int(size) for size in args.sizes.split(",")]
USERS, SYSTEM, TURNS, CONTEXT = 8, 300, 4, 8192


class Server(common.Kvist):
    def __init__(self, block):
        self.config = tempfile.NamedTemporaryFile("w", suffix=".toml")
        self.config.write(f"[cache]\nblock_tokens = {block}\ntokens = {CONTEXT}\n")
        self.config.flush()
        super().__init__(args.kvist, "--config", self.config.name, model=args.model, name=f"kvist serve, blocks of {block}")

    def complete(self, prompt, n):
        """The answer's tokens, when each came, and how many of the prompt's tokens the cache had."""
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True,
                "return_token_ids": True, "stream_options": {"include_usage": True}}
        began, tokens, came, usage = time.perf_counter(), [], [], None
        for event in self.stream("/v1/completions", body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                found = choice.get("token_ids") or []
                tokens += found
                came += [time.perf_counter() - began] * len(found)
        assert usage and usage["completion_tokens"] == n == len(tokens), (usage, len(tokens))
        return tokens, came, usage["prompt_tokens_details"]["cached_tokens"]

    def prefill(self, rng):
        prompt = draw(rng, 1536)
        _, [first], _ = self.complete(prompt, 1)
        return {"prefill, tokens/s": len(prompt) / first}

    def decode(self, rng):
        prompts = [draw(rng, 16) for _ in range(USERS)]
        with ThreadPoolExecutor(USERS) as pool:
            came = [came for _, came, _ in pool.map(lambda prompt: self.complete(prompt, 96), prompts)]
        began, ended = max(times[0] for times in came), min(times[-1] for times in came)
        return {"decode, tokens/s": sum(began < at <= ended for times in came for at in times) / (ended - began)}

    def chats(self, rng):
        system, lock = draw(rng, SYSTEM), threading.Lock()
        plans = [[(draw(rng, rng.randint(20, 120)), rng.randint(16, 48)) for _ in range(TURNS)] for _ in range(args.chats)]
        asked, cached, first, between = 0, 0, [], []
        turns = [(list(system), plan) for plan in plans]

        def user(mine):
            nonlocal asked, cached
            # A user's chats take turns, so that other chats come between the turns of one.
            for turn in range(TURNS):
                for text, plan in mine:
                    words, n = plan[turn]
                    text += words
                    tokens, came, had = self.complete(text, n)
                    with lock:
                        asked, cached = asked + len(text), cached + had
                        first.append(came[0])
                        between.extend(b - a for a, b in zip(came, came[1:]))
                    text += tokens

        with ThreadPoolExecutor(USERS) as pool:
            list(pool.map(user, [turns[i::USERS] for i in range(USERS)]))
        p99 = lambda times: statistics.quantiles(times, n=100)[98] * 1e3
        return {"cached, %": 100 * cached / asked, "TTFT p99, ms": p99(first), "between tokens p99, ms": p99(between)}


def draw(rng, n):
    return [rng.randrange(300, 4000) for _ in range(n)]


def measure():
    """The figures of each server: a list for each name, whose first entry is of the round that warms up."""
    figures = [{} for _ in SIZES]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(size)) for size in SIZES]
        for i in range(-1, args.rounds):  # round -1 warms up
            for load in ("prefill", "decode", "chats"):
                for at in list(range(len(SIZES)))[:: 1 if i % 2 == 0 else -1]:
                    found = getattr(servers[at], load)(random.Random(f"{load} {i}"))
                    for name, figure in found.items():
                        figures[at].setdefault(name, []).append(figure)
    return figures


def main():
    figures = measure()
    names = list(figures[0])
    print(f"| tokens of a block | {' | '.join(names)} |")
    print("|--:|" + "--:|" * len(names))
    for size, of in zip(SIZES, figures):
        def cell(name):
            values, base = of[name][1:], figures[0][name][1:]
            ratio = statistics.median(value / other for value, other in zip(values, base) if other > 0)
            return f"{statistics.median(values):,.1f} ({ratio:.2f})"
        print(f"| {size} | {' | '.join(cell(name) for name in names)} |")


common.script(main)
