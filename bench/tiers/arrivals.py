#!/usr/bin/env python3
"""Time to first token of short new prompts while others decode, without a tier and with one that has nothing of them.

What a tier costs a request that gains nothing from it: it is asked first. Programs in turns, each with a fresh server:

    bench/tiers/arrivals.py --model MODEL.gguf --kvist OLD --kvist NEW
"""
import argparse
import contextlib
import pathlib
import random
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402


def complete(server, body, stop=None):
    """Seconds to the first token; with `stop` reads until that is set."""
    took, began = None, time.perf_counter()
    for _ in server.stream("/v1/completions", {**body, "ignore_eos": True, "stream": True}):
        took = took or time.perf_counter() - began
        if stop and stop.is_set():
            return None
    return took


def median_ms(kvist, model, tier, args, seed):
    with common.Kvist(kvist, "--context", "16384", *tier, model=model) as server:
        stop = threading.Event()

        def decode():
            with contextlib.suppress(common.Failed):  # The requests below say if the server has ended.
                while not stop.is_set():
                    complete(server, {"prompt": [1, 2, 3, 4], "max_tokens": 4000}, stop)

        for _ in range(args.decoding):
            threading.Thread(target=decode, daemon=True).start()
        time.sleep(1)
        draw = random.Random(seed)
        times = []
        for _ in range(args.requests):
            prompt = [draw.randrange(1000, 40000) for _ in range(33)]
            times.append(complete(server, {"prompt": prompt, "max_tokens": 1}))
            # Anywhere within a step.
            time.sleep(0.02 * draw.random())
        stop.set()
        return 1000 * statistics.median(times)


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


common.script(main)
