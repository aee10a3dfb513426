#!/usr/bin/env python3
"""Time to first token of short new prompts while others decode, without a tier and with one that has nothing of them.

What a tier costs a request that gains nothing from it: it is asked first. Programs in turns, each with a fresh server:

    bench/tiers/arrivals.py --model MODEL.gguf --kvist OLD --kvist NEW
"""
import argparse
import json
import random
import re
import statistics
import subprocess
import threading
import time
import urllib.request


def complete(url, body, stop=None):
    """Seconds to the first token; with `stop` reads until that is set."""
    body = json.dumps({**body, "ignore_eos": True, "stream": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data:"):
                if stop is None:
                    took = time.perf_counter() - began
                    answer.read()
                    return took
                if stop.is_set():
                    return None
    return None


def median_ms(kvist, model, tier, args, seed):
    command = [kvist, "serve", "--quiet", "--port", "0", "--model", model, "--context", "16384", *tier]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", server.stdout.readline()).group(0)
        stop = threading.Event()

        def decode():
            while not stop.is_set():
                complete(url, {"prompt": [1, 2, 3, 4], "max_tokens": 4000}, stop)

        for _ in range(args.decoding):
            threading.Thread(target=decode, daemon=True).start()
        time.sleep(1)
        draw = random.Random(seed)
        times = []
        for _ in range(args.requests):
            prompt = [draw.randrange(1000, 40000) for _ in range(33)]
            times.append(complete(url, {"prompt": prompt, "max_tokens": 1}))
            # Anywhere within a step.
            time.sleep(0.02 * draw.random())
        stop.set()
        return 1000 * statistics.median(times)
    finally:
        server.kill()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="with a vocabulary of 40,000 tokens or more")
    parser.add_argument("--kvist", action="append", required=True, help="a program; repeat it to compare several")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--decoding", type=int, default=6, help="how many others decode")
    args = parser.parse_args()
    cases = [(kvist, tier) for kvist in args.kvist for tier in ([], ["--tier-ram", "256MiB"])]
    rounds = []
    for seed in range(args.rounds):
        rounds.append([median_ms(kvist, args.model, tier, args, seed) for kvist, tier in cases])
    for (kvist, tier), values in zip(cases, zip(*rounds)):
        name = " ".join(tier) or "no tier"
        print(f"{kvist}, {name}: {statistics.median(values):.1f} ms ({', '.join(f'{value:.1f}' for value in values)})")


if __name__ == "__main__":
    main()
