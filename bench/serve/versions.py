#!/usr/bin/env python3
"""Two builds of kvist under the same load, in turns: what a change costs a server that does not use it.

    bench/serve/versions.py --before OLD/kvist --after NEW/kvist [--model MODEL] [--rounds 7]

Both servers live for the whole run; one of them is asked at a time, and which begins alternates. A round of each server has three
loads: prompts that are new, with short answers (so blocks are stored and evicted all the time), short prompts with long answers, and
prompts whose beginning is cached. The figures are tokens per second, of prompts and answers, and medians over the rounds; beside them the
median of the rounds' own ratios, which neighbours on the machine disturb less, and the same of the processor time of the servers, which
they disturb least (with `--threads 1`: threads of a step wait for each other, in part by spinning). In brackets: the interval that has the
true median with 95% (by order statistics, so nothing is assumed of how rounds differ; of fewer than 6 rounds it has all of them and
less than 95%). Only the standard library is needed.
"""
import argparse
import json
import math
import pathlib
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--before", required=True)
parser.add_argument("--after", required=True)
parser.add_argument("--model")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--clients", type=int, default=8)
parser.add_argument("--requests", type=int, default=32)
parser.add_argument("--threads", type=int, help="of each server; by default one per core")
parser.add_argument("--load", help="only this load: a part of its name")
parser.add_argument("--json", help="write the figures here")
args = parser.parse_args()

# Tokens of a prompt that are cached, tokens of it that are new, tokens of an answer.
LOADS = {"new prompts": (0, 512, 8), "long answers": (0, 16, 96), "cached prompts": (768, 16, 16)}
LOADS = {load: tokens for load, tokens in LOADS.items() if (args.load or "") in load}


class Server(common.Kvist):
    def complete(self, prompt, n):
        answer = self.post("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == n, answer

    def rate(self, load, seed):
        """Tokens per second, and processor time, of a load whose prompts are drawn from this seed."""
        cached, new, n = LOADS[load]
        rng = random.Random(seed)
        draw = lambda count: [rng.randrange(300, 4000) for _ in range(count)]
        trunk = draw(cached)
        prompts = [trunk + draw(new) for _ in range(args.requests)]
        if cached:
            self.complete(trunk, 1)
        with ThreadPoolExecutor(args.clients) as pool:
            cpu_s, began = self.cpu_s(), time.perf_counter()
            list(pool.map(lambda prompt: self.complete(prompt, n), prompts))
            seconds = time.perf_counter() - began
        return args.requests * (cached + new + n) / seconds, self.cpu_s() - cpu_s


def measure():
    """Tokens per second and processor time: a list for each load and side."""
    rates, cpu_s = ({load: {side: [] for side in ("before", "after")} for load in LOADS} for _ in range(2))
    flags = ["--context", 16384, *(["--threads", args.threads] if args.threads else [])]
    with Server(args.before, *flags, model=args.model, name="before") as before, Server(args.after, *flags, model=args.model, name="after") as after:
        servers = {"before": before, "after": after}
        for load in LOADS:
            for server in servers.values():
                server.rate(load, load)  # warms up
        for i in range(args.rounds):
            for load in LOADS:
                for side in list(servers)[:: 1 if i % 2 == 0 else -1]:
                    rate, cpu = servers[side].rate(load, (load, i).__repr__())
                    rates[load][side].append(rate)
                    cpu_s[load][side].append(cpu)
    return rates, cpu_s


def interval(n):
    """How many of n sorted values to leave out at either end: the median lies between the others with at least 95%."""
    left_out, outside = 0, 2 * 0.5**n
    while (outside := outside + 2 * math.comb(n, left_out + 1) * 0.5**n) <= 0.05:
        left_out += 1
    return left_out


def ratios(sides):
    """The median of the rounds' ratios, and its interval."""
    all = sorted(after / before for before, after in zip(sides["before"], sides["after"]) if before > 0)
    if not all:
        return "too short to measure"
    left_out = interval(len(all))
    return f"{statistics.median(all):.3f} ({all[left_out]:.3f} to {all[-1 - left_out]:.3f})"


def main():
    rates, cpu_s = measure()
    print(
        f"| {args.requests} requests, {args.clients} at a time, {args.rounds} rounds "
        "| before, tokens/s | after, tokens/s | ratio | ratios of the rounds | of processor time |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for load, sides in rates.items():
        before, after = (statistics.median(sides[side]) for side in ("before", "after"))
        print(f"| {load} | {before:,.0f} | {after:,.0f} | {after / before:.3f} | {ratios(sides)} | {ratios(cpu_s[load])} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"tokens_per_s": rates, "cpu_s": cpu_s}, file, indent=1)


common.script(main)
