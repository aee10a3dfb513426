#!/usr/bin/env python3
"""`kvist serve` beside llama.cpp's llama-server, both alive in one run and asked in turns over HTTP, with the very
same requests (token ids in, a stream out): writes the section of bench/RESULTS.md between the markers.

    bench/serve/compare.py --kvist target/release/kvist --llama path/to/llama-server --model a-q8_0.gguf

Loads, each with prompts that no earlier round has sent:
  cold        one prompt of --trunk tokens: its time to first token
  hit         the same prompt with another end: its time to first token, and what part of the cold one that is
  fan-out     --branches requests at once that share the trunk, which the server has seen, and differ behind it
  again       the same with other ends: now llama-server has computed the trunk in every slot
  unrelated   as many requests at once that share nothing

A rate is tokens generated per second from the first request's sending to the last token of all; a figure is the
median over --rounds. Only the standard library is needed.
"""
import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "RESULTS.md"
BEGIN, END = "<!-- serve {} -->", "<!-- /serve {} -->"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, name, command, port, log):
        self.name, self.port = name, port
        self.log = open(log, "w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 300
        while True:
            if self.process.poll() is not None:
                sys.exit(f"{name} ended with {self.process.returncode}; its output is in {log}")
            try:
                if self.get("/health") == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                sys.exit(f"{name} is not ready after 300 s; its output is in {log}")
            time.sleep(0.2)

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        return connection.getresponse().status

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def complete(self, prompt, n_tokens):
        """Seconds to the first token and to the last, and how many tokens came."""
        body = json.dumps({
            "model": "kvist", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        })
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        started = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"{self.name} answers {response.status}: {response.read()[:500]}")
        first = last = usage = None
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("choices"):
                last = time.monotonic()
                first = first or last
        if not usage or usage["prompt_tokens"] < len(prompt):
            sys.exit(f"{self.name} counted {usage} for a prompt of {len(prompt)} tokens")
        if usage["completion_tokens"] != n_tokens:
            sys.exit(f"{self.name} wrote {usage['completion_tokens']} tokens, {n_tokens} were asked for")
        return first - started, last - started, n_tokens


def together(server, prompts, n_tokens):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        done = list(pool.map(lambda prompt: server.complete(prompt, n_tokens), prompts))
    return sum(n for _, _, n in done) / max(last for _, last, _ in done), statistics.mean(f for f, _, _ in done)


def one_round(server, draw, args):
    trunk = draw(args.trunk)
    cold, _, _ = server.complete(trunk + draw(args.end), 1)
    hit, _, _ = server.complete(trunk + draw(args.end), 1)
    fan_out = lambda: together(server, [trunk + draw(args.end) for _ in range(args.branches)], args.generate)
    (fan_rate, fan_ttft), (again_rate, again_ttft) = fan_out(), fan_out()
    alone_rate, alone_ttft = together(server, [draw(args.prompt) for _ in range(args.branches)], args.generate)
    return {
        "cold TTFT, s": cold, "hit TTFT, s": hit, "hit / cold": hit / cold,
        "fan-out, tokens/s": fan_rate, "fan-out mean TTFT, s": fan_ttft,
        "fan-out again, tokens/s": again_rate, "fan-out again mean TTFT, s": again_ttft,
        "unrelated, tokens/s": alone_rate, "unrelated mean TTFT, s": alone_ttft,
    }


def cpu():
    try:
        return re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.machine()


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvist", required=True)
    parse.add_argument("--llama", required=True, help="llama-server")
    parse.add_argument("--model", required=True, type=pathlib.Path)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--trunk", type=int, default=4096)
    parse.add_argument("--branches", type=int, default=8)
    parse.add_argument("--end", type=int, default=32, help="tokens behind the trunk")
    parse.add_argument("--prompt", type=int, default=512, help="tokens of an unrelated prompt")
    parse.add_argument("--generate", type=int, default=64)
    parse.add_argument("--vocab", type=int, default=30000, help="token ids are drawn from 300 to here")
    parse.add_argument("--threads", type=int, default=os.cpu_count())
    parse.add_argument("--write", action="store_true", help="into bench/RESULTS.md, between markers of the model")
    args = parse.parse_args()

    per_request = args.trunk + args.end + args.generate
    # llama-server gives every slot an equal part; kvist shares, so the bound is the same number of cells for both.
    cells = (per_request + 64) * args.branches
    ports = free_port(), free_port()
    logs = HERE.parent / "target"
    logs.mkdir(exist_ok=True)
    kvist = Server("kvist", [
        args.kvist, "serve", "--port", str(ports[0]), "--model", args.model, "--context", str(cells), "--name", "kvist",
        "--threads", str(args.threads),
    ], ports[0], logs / "serve-kvist.log")
    llama = Server("llama-server", [
        args.llama, "--port", str(ports[1]), "-m", args.model, "-c", str(cells), "--parallel", str(args.branches),
        "-t", str(args.threads), "-tb", str(args.threads), "-fa", "on", "--kv-unified",
    ], ports[1], logs / "serve-llama.log")
    found = {kvist: [], llama: []}
    try:
        for r in range(args.rounds):
            for server in found:
                # The same tokens for both, and new ones in every round.
                choice = random.Random(r)
                found[server].append(one_round(
                    server, lambda n: [choice.randrange(300, args.vocab) for _ in range(n)], args))
                print(f"round {r + 1}: {server.name}: "
                      + ", ".join(f"{k} {v:.3g}" for k, v in found[server][-1].items()), flush=True)
    finally:
        kvist.stop()
        llama.stop()

    rows = []
    for figure in found[kvist][0]:
        ours, theirs = (statistics.median(x[figure] for x in found[server]) for server in (kvist, llama))
        ratio = ours / theirs if "tokens/s" in figure else theirs / ours
        rows.append(f"| {figure} | {ours:.3g} | {theirs:.3g} | {ratio:.2f} |")
    date = datetime.date.today().isoformat()
    text = "\n".join([
        f"{args.model.name}, {args.threads} threads, {cpu()}, {date}; a trunk of {args.trunk} tokens, {args.branches} "
        f"branches that differ in {args.end}, {args.generate} generated each; unrelated prompts of {args.prompt}; f16 "
        f"cache of {cells} tokens; medians of {args.rounds} rounds in turns.", "",
        "| | kvist | llama-server | times as good |", "|---|---:|---:|---:|", *rows, ""])
    print(text)
    if args.write:
        begin, end = BEGIN.format(args.model.name), END.format(args.model.name)
        results = RESULTS.read_text()
        section = f"{begin}\n{text}{end}"
        if begin in results:
            results = results[:results.index(begin)] + section + results[results.index(end) + len(end):]
        else:
            results += f"\n{section}\n"
        RESULTS.write_text(results)


if __name__ == "__main__":
    main()
