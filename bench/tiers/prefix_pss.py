#!/usr/bin/env python3
"""What N servers over one frozen prefix take: the pages of the file, of which they share one copy. Needs Linux.

    bench/tiers/prefix_pss.py --kvist target/release/kvist --model MODEL.gguf --tokens 4096 --servers 1,2,4

Every server answers one request that begins with the prefix, so that it has read all of it. Rss counts a shared page for each
process, Pss divides it among them: N times the Pss is what the machine has in memory for the file.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common  # noqa: E402


def of_mapping(pid, path):
    """Rss, Pss and private bytes of a process's mappings of a file."""
    sums, inside = {"Rss": 0, "Pss": 0, "Private": 0}, False
    with open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.rstrip().endswith(path)
            elif inside:
                name, value = line.split()[0].rstrip(":"), line.split()[1]
                name = "Private" if name in ("Private_Clean", "Private_Dirty") else name
                if name in sums:
                    sums[name] += int(value) * 1024
    return sums


def ask(server, prompt, tokens):
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kvist", default="target/release/kvist")
    options.add_argument("--model", required=True)
    options.add_argument("--tokens", type=int, default=4096, help="of the prefix; a random model's tokens are bytes")
    options.add_argument("--servers", default="1,2,4")
    args = options.parse_args()
    kvist, context = os.path.abspath(args.kvist), str(args.tokens + 1024)
    with tempfile.TemporaryDirectory() as folder:
        text, file = os.path.join(folder, "prefix.txt"), os.path.join(folder, "prefix.kvp")
        prefix = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(args.tokens))
        with open(text, "w") as out:
            out.write(prefix)
        freeze = [kvist, "prefix", "freeze", "--raw", "--json", "--model", args.model, "--context", context, "--text", text, "--out", file]
        report = json.loads(common.output(freeze))
        print(f"the prefix has {report['tokens']} tokens, its file {report['bytes'] / 2**20:.1f} MiB\n")
        print("| servers | file in memory, each: Rss | Pss | private | all together |")
        print("|--:|--:|--:|--:|--:|")
        for n in map(int, args.servers.split(",")):
            with contextlib.ExitStack() as stack:
                servers = []
                for _ in range(n):
                    server = stack.enter_context(common.Kvist(kvist, "--context", context, "--prefix", file, model=args.model))
                    servers.append(server)
                    cached = ask(server, prefix + "and", 4)
                    assert cached >= report["tokens"] // 16 * 16 - 16, cached
                sums = [of_mapping(server.process.pid, file) for server in servers]
                mean = {name: sum(one[name] for one in sums) / n / 2**20 for name in sums[0]}
                total = sum(one["Pss"] for one in sums) / 2**20
                print(f"| {n} | {mean['Rss']:.1f} MiB | {mean['Pss']:.1f} MiB | {mean['Private']:.1f} MiB | {total:.1f} MiB |", flush=True)


common.script(main)
