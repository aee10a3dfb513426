#!/usr/bin/env python3
"""What the importance of tokens costs: processor time of prompts and of decoding with `--keep` and without, in turns.

    bench/keep_cost.py --kvist target/release/kvist --model MODEL.gguf --tokens 4096

The budget is larger than the text, so nothing is removed: all runs attend the same tokens, and what differs is the second pass
over the keys. One thread, and the processor's time instead of the clock's, so that other work on the machine matters little.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile

WAYS = {"no `--keep`": None, "`by=none`": "none", "`by=last`": "last", "`by=attention`": "attention"}


def cpu_seconds(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    report = json.load(process.stdout)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0 and not report.get("removed_tokens"), report
    return usage.ru_utime


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kvist", default="target/release/kvist")
    options.add_argument("--model", required=True)
    options.add_argument("--tokens", type=int, default=4096, help="of the prompt; a random model's tokens are bytes")
    options.add_argument("--decode", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    budget = args.tokens + args.decode + 64
    times = {way: [] for way in WAYS}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("".join(chr(97 + (i * i + i // 7) % 26) for i in range(args.tokens)))
        text.flush()
        run = [args.kvist, "run", "-q", "--raw", "--json", "--greedy", "--ignore-eos", "--threads", "1", "--kind", "cells"]
        run += ["--model", args.model, "--context", str(2 * budget)]
        for _ in range(args.rounds):
            start = cpu_seconds(run + ["-n", "1", "x"])
            for way, by in WAYS.items():
                keep = [] if by is None else ["--keep", f"sinks=4,recent={budget},top=64,by={by}"]
                prompt = cpu_seconds(run + keep + ["-n", "1", "--file", text.name])
                both = cpu_seconds(run + keep + ["-n", str(args.decode + 1), "--file", text.name])
                times[way].append((prompt - start, (both - prompt) / args.decode * 1e3))
    print("| | prompt, s | decode, ms a token |\n|---|--:|--:|")
    first = None
    for way, rounds in times.items():
        prompt, decode = (statistics.median(column) for column in zip(*rounds))
        first = first or (prompt, decode)
        print(f"| {way} | {prompt:.2f} ({100 * (prompt / first[0] - 1):+.0f} %) | {decode:.1f} ({100 * (decode / first[1] - 1):+.0f} %) |")


if __name__ == "__main__":
    main()
