#!/usr/bin/env python3
"""A load of many clients through the real vllm-router, and the same load through the simulated one: tokens that the caches found.

Requests arrive at random times, on average `--rate` in a second, whether or not others have been answered. Each load is served twice, so
that the difference of the two says what a difference to the simulation can mean. Nothing is fitted to the load: step costs come from `kvist
bench calibrate`, and the time until the router knows what a worker has stored from requests sent one at a time, before the load.

`just bench-fleet` runs it with the environment of tests/fleet. The machine should have nothing else to do.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests/fleet"))
from fleet import MODEL, Router, Worker, cached  # noqa: E402
from test_routers import prefix  # noqa: E402
from test_simulator import cache_of, rendered  # noqa: E402

POLICIES = {"kv_aware": "prefix_aware", "cache_aware": "cache_aware", "round_robin": "round_robin"}
WORKER = ["--max-batch", "32", "--max-batch-tokens", "256"]


def load(seed, args):
    """Arrival, prompt, and length of the answer of each request."""
    draw, at, requests = random.Random(seed), 0.0, []
    for i in range(args.requests):
        at += draw.expovariate(args.rate)
        # Some beginnings are used often, and most seldom.
        n = min(int(draw.paretovariate(0.8)), args.groups) - 1
        requests.append((at, prefix(n, 60 + 10 * (n % 16)) + f" Question {seed} {i}", draw.randint(1, args.answer)))
    return requests


def serve(router, requests):
    """When each request was sent and answered, in seconds, and its usage."""
    began = time.monotonic()

    def ask(prompt, n_tokens):
        sent = time.monotonic() - began
        usage = router.complete(prompt, max_tokens=n_tokens, ignore_eos=True)
        return sent, time.monotonic() - began, usage

    with ThreadPoolExecutor(256) as clients:
        asked = []
        for at, *request in requests:
            time.sleep(max(began + at - time.monotonic(), 0))
            asked.append(clients.submit(ask, *request))
        return [one.result() for one in asked]


def event_delay(router):
    """Median seconds from an answer of one token until the router's log says that it has applied what the worker stored."""
    delays = []
    with open(router.log, "rb") as log:
        for n in range(40):
            # So that answers do not fall into step with the router, which looks every 10 ms.
            time.sleep(0.1 + 0.01 * random.Random(n).random())
            log.seek(0, os.SEEK_END)
            router.complete(prefix(50_000 + n), max_tokens=1)
            answered, seen = time.monotonic(), b""
            while b"sequence advanced" not in seen:
                assert time.monotonic() < answered + 10, seen.decode()
                seen += log.read()
                time.sleep(0.0002)
            delays.append(time.monotonic() - answered)
    return statistics.median(delays)


def run_served(seed, args, folder):
    """Hit tokens, prompt tokens, the trace, what the router learned when, the shape of the caches, and how many requests overlapped."""
    workers, router = [], None
    try:
        for _ in range(3):
            workers.append(Worker(folder, None, "--context", str(args.context), *WORKER))
        router = Router("vllm-router", args.policy, workers, folder)
        delay = event_delay(router) if args.policy == "kv_aware" else None
        shape = cache_of(workers[0])
        requests = load(seed, args)
        ids = [rendered(router, prompt) for _, prompt, _ in requests]
        answers = serve(router, requests)
    finally:
        for process in [*workers, *([router] if router else [])]:
            process.process.kill()
            process.process.wait()
    rows = [{"format": "kvist-trace", "version": 1}]
    order = sorted(range(len(requests)), key=lambda i: answers[i][0])
    for n, i in enumerate(order):
        n_output = requests[i][2]
        # Answers stay in the cache too. No other prompt contains one, so any tokens that nothing else has stand for them.
        answer = range(1_000_000 + 1000 * n, 1_000_000 + 1000 * n + n_output)
        rows.append({"id": n, "arrival_ns": int(answers[i][0] * 1e9), "prompt_tokens": len(ids[i]), "output_tokens": n_output,
                     "tokens": [*ids[i], *answer]})
    trace = folder / "load.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hits = sum(cached(usage) for *_, usage in answers)
    running = [sum(sent < answers[i][0] < done for sent, done, _ in answers) for i in order]
    return {"hits": hits, "tokens": sum(map(len, ids)), "trace": trace, "delay": delay, "shape": shape,
            "latency": statistics.mean(done - sent for sent, done, _ in answers), "running": statistics.mean(running),
            "overlap": sum(n > 0 for n in running) / len(running)}


def simulate(served, delay, costs, args):
    block_tokens, blocks = served["shape"]
    command = [os.environ["KVIST"], "simulate", "-q", "--json", "--trace", served["trace"], "--workers", 3,
               "--routing", POLICIES[args.policy], "--router-delay", f"{delay * 1e3:.3f}ms", "--block-tokens", block_tokens,
               "--capacity-blocks", blocks, "--costs", costs, "--max-batch", 32, "--batch-tokens", 256]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requests"]["finished"] == args.requests
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="kv_aware")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=40, help="requests per second")
    parser.add_argument("--groups", type=int, default=120, help="beginnings of prompts")
    parser.add_argument("--answer", type=int, default=24, help="longest answer, tokens")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each worker's cache")
    parser.add_argument("--costs", type=Path, help="step costs of this machine, measured there if the file does not exist")
    parser.add_argument("--calibrate", type=int, default=36, help="seconds for measuring them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        costs = args.costs or folder / "costs.json"
        if not costs.exists():
            command = [os.environ["KVIST"], "bench", "calibrate", "--threads", "1", *WORKER, "--seconds", str(args.calibrate), "-o", costs]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print("| load | prompt tokens | found, served | served again | simulated | simulated to the mean of both | requests that met "
              "others | mean latency, served | simulated | event delay |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        errors, spreads = [], []
        for seed in range(1, args.seeds + 1):
            both = []
            for again in "ab":
                place = folder / f"{seed}{again}"
                place.mkdir()
                both.append(run_served(seed, args, place))
            # Other policies than kv_aware hear no events, and their simulation has no use for a delay.
            delay = statistics.mean(served["delay"] for served in both) if args.policy == "kv_aware" else 0.0
            reports = [simulate(served, delay, costs, args) for served in both]
            simulated = statistics.mean(report["cache"]["hit_tokens"] for report in reports)
            mean = statistics.mean(served["hits"] for served in both)
            errors.append(simulated / mean - 1)
            spreads.append(both[1]["hits"] / both[0]["hits"] - 1)
            latency = [statistics.mean(served["latency"] for served in both),
                       statistics.mean(report["latency"]["end_to_end_s"]["mean"] for report in reports)]
            overlap = statistics.mean(served["overlap"] for served in both)
            print(f"| {seed} | {both[0]['tokens']:,} | {both[0]['hits']:,} | {both[1]['hits']:,} ({spreads[-1]:+.1%}) | {simulated:,.0f} | "
                  f"{errors[-1]:+.1%} | {overlap:.0%} | {latency[0] * 1e3:.1f} ms | {latency[1] * 1e3:.1f} ms | {f'{delay * 1e3:.1f} ms' if delay else ''} |",
                  flush=True)
        print(f"\nMedian of the errors {statistics.median(errors):+.1%}, largest {max(errors, key=abs):+.1%}; two runs of a load differ by up to "
              f"{max(map(abs, spreads)):.1%}.")


if __name__ == "__main__":
    main()
