#!/usr/bin/env python3
"""Two builds of kvist under the same load, in turns: what a change costs a server that does not use it.

    bench/serve/versions.py --before OLD/kvist --after NEW/kvist [--model MODEL] [--rounds 7]

Both servers live for the whole run; one of them is asked at a time, and who begins alternates. A round of each server has three
loads: prompts that are new, with short answers (so blocks are stored and evicted all the time), short prompts with long answers, and
prompts whose beginning is cached. The figures are tokens per second, of prompts and answers, and medians over the rounds; beside them the
median of the rounds' own ratios, which neighbours on the machine disturb less. Only the standard library is needed.
"""
import argparse
import http.client
import json
import random
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--before", required=True)
parser.add_argument("--after", required=True)
parser.add_argument("--model")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--clients", type=int, default=8)
parser.add_argument("--requests", type=int, default=32)
parser.add_argument("--json", help="write the figures here")
args = parser.parse_args()

# Tokens of a prompt that are cached, tokens of it that are new, tokens of an answer.
LOADS = {"new prompts": (0, 512, 8), "long answers": (0, 16, 96), "cached prompts": (768, 16, 16)}


class Server:
    def __init__(self, kvist):
        command = [kvist, "serve", "--port", "0", "-q", "--context", "16384"]
        command += ["--model", args.model] if args.model else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().split()[-1].removeprefix("http://")

    def ask(self, prompt, n):
        connection = http.client.HTTPConnection(self.address, timeout=600)
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert answer["usage"]["completion_tokens"] == n, answer

    def rate(self, load, seed):
        """Tokens per second of a load whose prompts are drawn from this seed."""
        cached, new, n = LOADS[load]
        rng = random.Random(seed)
        draw = lambda count: [rng.randrange(300, 4000) for _ in range(count)]
        common = draw(cached)
        prompts = [common + draw(new) for _ in range(args.requests)]
        if cached:
            self.ask(common, 1)
        with ThreadPoolExecutor(args.clients) as pool:
            began = time.perf_counter()
            list(pool.map(lambda prompt: self.ask(prompt, n), prompts))
            seconds = time.perf_counter() - began
        return args.requests * (cached + new + n) / seconds


servers = {"before": Server(args.before), "after": Server(args.after)}
rates = {load: {side: [] for side in servers} for load in LOADS}
try:
    for load in LOADS:
        for server in servers.values():
            server.rate(load, load)  # warm up
    for i in range(args.rounds):
        for load in LOADS:
            for side in list(servers)[:: 1 if i % 2 == 0 else -1]:
                rates[load][side].append(servers[side].rate(load, (load, i).__repr__()))
finally:
    for server in servers.values():
        server.process.terminate()
print(f"| {args.requests} requests, {args.clients} at a time, {args.rounds} rounds | before, tokens/s | after, tokens/s | ratio | ratios of the rounds |")
print("|---|--:|--:|--:|--:|")
for load, sides in rates.items():
    before, after = (statistics.median(sides[side]) for side in ("before", "after"))
    ratios = sorted(b / a for a, b in zip(sides["before"], sides["after"]))
    spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    print(f"| {load} | {before:,.0f} | {after:,.0f} | {after / before:.3f} | {spread} |")
if args.json:
    with open(args.json, "w") as file:
        json.dump(rates, file, indent=1)
