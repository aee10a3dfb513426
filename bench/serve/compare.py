#!/usr/bin/env python3
"""`kvist serve` beside llama.cpp's llama-server, all alive in one run and asked in turns over HTTP, with the very
same requests (token ids in, a stream out). Prints a section for bench/RESULTS.md; --write puts it between the markers there.

    bench/serve/compare.py --kvist target/release/kvist --llama path/to/llama-server --model a-q8_0.gguf

--llama names a build of llama-server; repeat it for several. Before the rounds, a short trial measures each build with flash
attention on and off: a prompt of --trunk tokens, and 32 tokens after it. The variant with the fastest prompt takes part in the
rounds, and so does the one with the fastest tokens, if it is another. Of two variants, each figure has the better one.

Loads, each with prompts that no earlier round has sent:
  cold        one prompt of --trunk tokens: its time to first token
  hit         the same prompt with another end: its time to first token, and what part of the cold one that is
  fan-out     --branches requests at once that share the trunk, which the server has seen, and differ behind it
  again       the same with other ends: now llama-server has computed the trunk in every slot
  unrelated   as many requests at once that share nothing

A rate is tokens generated per second from the first request's sending to the last token of all; a figure is the
median over --rounds. Another server begins in every round, and those that wait are stopped. Only the standard library is needed.
"""
import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import random
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402
from common import BENCH, Failed  # noqa: E402

RESULTS = BENCH / "RESULTS.md"
BEGIN, END = "<!-- serve {} -->", "<!-- /serve {} -->"


class Server(common.Server):
    def complete(self, prompt, n_tokens):
        """Seconds to the first token and to the last, and how many tokens came."""
        body = {
            "model": "kvist", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        first = last = usage = None
        for event in self.stream("/v1/completions", body):
            usage = event.get("usage") or usage
            if event.get("choices"):
                last = time.monotonic()
                first = first or last
        if not usage or usage["prompt_tokens"] < len(prompt):
            raise Failed(f"{self.name} counted {usage} for a prompt of {len(prompt)} tokens")
        if usage["completion_tokens"] != n_tokens:
            raise Failed(f"{self.name} wrote {usage['completion_tokens']} tokens, {n_tokens} were asked for")
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


def drawing(seed, args):
    """A function that draws so many token ids. The same seed gives the same ones."""
    choice = random.Random(seed)
    return lambda n: [choice.randrange(300, args.vocab) for _ in range(n)]


def kvist(args, cells, logs):
    port = common.free_port()
    return Server("kvist", [
        args.kvist, "serve", "--port", port, "--model", args.model, "--context", cells, "--name", "kvist",
        "--threads", args.threads,
    ], port, log=logs / "serve-kvist.log")


def llama(args, cells, logs, program, flash):
    port = common.free_port()
    # install.sh builds in a folder that is named after the compiler.
    build = next((part.removeprefix("llama-") for part in program.parts if part.startswith("llama-") and part != program.name), str(program))
    return Server(f"llama-server by {build}, -fa {flash}", [
        program, "--host", "127.0.0.1", "--port", port, "-m", args.model, "-c", cells, "--parallel", args.branches,
        "-t", args.threads, "-tb", args.threads, "-fa", flash, "--kv-unified",
    ], port, log=logs / f"serve-llama-{build.replace('/', '-')}-{flash}.log")


def trial(args, start):
    """Those (program, flash) that are the fastest in a prompt, and in the tokens after it."""
    found = {}
    for program in args.llama:
        for flash in ("on", "off"):
            try:
                with start(program, flash) as server:
                    draw = drawing("trial", args)
                    server.complete(draw(args.prompt), 4)  # warms up
                    first, last, n = server.complete(draw(args.trunk), 33)
                    found[program, flash] = args.trunk / first, (n - 1) / max(last - first, 1e-9)
                    print(f"trial: {server.name}: prompt {found[program, flash][0]:.4g} tokens/s, then {found[program, flash][1]:.3g} tokens/s", flush=True)
            except Failed as error:
                print(f"trial: {error}", file=sys.stderr)
    if not found:
        raise Failed("no llama-server could be measured")
    return list(dict.fromkeys(max(found, key=lambda variant: found[variant][at]) for at in (0, 1)))


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvist", required=True)
    parse.add_argument("--llama", required=True, action="append", type=pathlib.Path, help="llama-server; repeat it for several builds")
    parse.add_argument("--model", required=True, type=pathlib.Path)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--trunk", type=int, default=4096)
    parse.add_argument("--branches", type=int, default=8)
    parse.add_argument("--end", type=int, default=32, help="tokens behind the trunk")
    parse.add_argument("--prompt", type=int, default=512, help="tokens of an unrelated prompt")
    parse.add_argument("--generate", type=int, default=64)
    parse.add_argument("--vocab", type=int, default=30000, help="token ids are drawn from 300 to here")
    parse.add_argument("--threads", type=int, default=os.cpu_count())
    parse.add_argument("--write", action="store_true", help="into bench/RESULTS.md, between markers of the model; of 3 rounds at least")
    args = parse.parse_args()
    if args.rounds < 1 or (args.write and args.rounds < 3):
        parse.error(f"--rounds {args.rounds}: 1 at least, and 3 with --write")

    per_request = args.trunk + args.end + args.generate
    # llama-server gives every slot an equal part; kvist shares, so the bound is the same number of cells for both.
    cells = (per_request + 64) * args.branches
    logs = BENCH / "target"
    logs.mkdir(exist_ok=True)
    setting = common.setting(["llama.cpp"], args.kvist)
    variants = trial(args, lambda program, flash: llama(args, cells, logs, program, flash))
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(kvist(args, cells, logs))
        rivals = [stack.enter_context(llama(args, cells, logs, *variant)) for variant in variants]
        servers = [ours, *rivals]
        found = {server: [] for server in servers}
        for server in servers:
            with server.awake():
                server.complete(drawing("warm-up", args)(args.prompt), 4)
        for r in range(args.rounds):
            for i in range(len(servers)):
                server = servers[(r + i) % len(servers)]
                with server.awake():
                    # The same tokens for all servers, and new ones in every round.
                    found[server].append(one_round(server, drawing(r, args), args))
                print(f"round {r + 1}: {server.name}: "
                      + ", ".join(f"{k} {v:.3g}" for k, v in found[server][-1].items()), flush=True)
        named = " and ".join(server.name for server in rivals)

    rows = []
    for figure in found[ours][0]:
        median = lambda server: statistics.median(x[figure] for x in found[server])
        more = "tokens/s" in figure
        mine, theirs = median(ours), (max if more else min)(map(median, rivals))
        rows.append(f"| {figure} | {mine:.3g} | {theirs:.3g} | {mine / theirs if more else theirs / mine:.2f} |")
    text = "\n".join([
        f"{args.model.name}, {args.threads} threads, {setting}", "",
        f"A trunk of {args.trunk} tokens, {args.branches} branches that differ in {args.end}, {args.generate} generated each; unrelated prompts of "
        f"{args.prompt}; f16 cache of {cells} tokens; medians of {args.rounds} rounds in turns. The fastest in a trial: {named}.", "",
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
    return 0


common.script(main)
