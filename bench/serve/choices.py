#!/usr/bin/env python3
"""What choosing tokens costs a running server: streams at once with plain sampling, a JSON schema, a penalty and log-probabilities, and
prompts whose tokens are scored.

    kvist serve --model M.gguf & bench/serve/choices.py [--url http://127.0.0.1:8080] [--streams 1,8] [--runs 3]

Milliseconds per token of a stream after its first one, the median of all streams and runs; for prompts the time of a request with one
new token. Needs Python alone."""
import argparse
import json
import pathlib
import random
import statistics
import sys
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402

TEXT = {"type": "string"}
ADDRESS = {"type": "object", "properties": {"street": TEXT, "city": TEXT}, "required": ["street", "city"], "additionalProperties": False}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer"}, "tags": {"type": "array", "items": TEXT}, "address": ADDRESS},
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CHOICES = {
    "plain": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "penalty": {"frequency_penalty": 0.5},
    "5 log-probabilities": {"logprobs": True, "top_logprobs": 5},
}
SCORES = {"plain": {}, "scored": {"echo": True, "logprobs": 5}}
WORDS = "the a of borrow checker owns value moves type trait lifetime reference mutable shared string".split()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return common.open_url(request)


def stream(url, model, i, choice, out):
    """Appends the stream's milliseconds per token to `out`."""
    ask = f"Invent person number {i} with a long name, many tags and a long address, as JSON."
    body = {"model": model, "messages": [{"role": "user", "content": ask}], "max_tokens": 96, "temperature": 0.8, "seed": i}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | choice
    first, tokens = None, 0
    with post(f"{url}/v1/chat/completions", body) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if first is None and event["choices"] and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter()
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if first is None or tokens < 2:
        raise SystemExit(f"stream {i} gave {tokens} tokens")
    out.append(1e3 * (time.perf_counter() - first) / (tokens - 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with common.open_url(f"{args.url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    for n in map(int, args.streams.split(",")):
        found = {name: [] for name in CHOICES}
        for _ in range(args.runs):
            for name, choice in CHOICES.items():
                threads = [threading.Thread(target=stream, args=(args.url, model, i, choice, found[name])) for i in range(n)]
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]
        for name, times in found.items():
            if len(times) < n * args.runs:
                raise SystemExit(f"{name}: {n * args.runs - len(times)} streams failed")
            print(f"{n} streams, {name}: {statistics.median(times):.2f} ms per token")
    found, tokens = {name: [] for name in SCORES}, 0
    for run in range(args.runs):
        for i, (name, choice) in enumerate(SCORES.items()):
            random.seed(2 * run + i)  # no prompt is in the cache
            prompt = " ".join(random.choice(WORDS) for _ in range(700))
            began = time.perf_counter()
            with post(f"{args.url}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0} | choice) as response:
                tokens = json.load(response)["usage"]["prompt_tokens"]
            found[name].append(time.perf_counter() - began)
    for name, times in found.items():
        print(f"a prompt of some {tokens} tokens, {name}: {1e3 * statistics.median(times):.0f} ms")


if __name__ == "__main__":
    main()
