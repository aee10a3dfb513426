#!/usr/bin/env python3
"""Takes conversations out of Mooncake's conversation trace (https://github.com/kvcache-ai/Mooncake), as a trace of its own.

    bench/tiers/conversations.py conversation_trace.jsonl --turns 3 --conversations 390 -o conversations.jsonl

The trace lists requests. Two of them are turns of one conversation when one continues ids that the other has and that fewer than 200
requests share (what more requests share are system prompts). Seven in ten conversations of the trace have one turn: no cache can help
those. This picks conversations of at least --turns turns at random and keeps the time of every turn.

Prints the working set: at each request, the ids that an earlier request had and a later one will ask for again; its mean and peak, in
ids of 512 tokens.
"""

import argparse
import collections
import json
import random
import sys


def conversations(requests):
    """Indices of requests by conversation, in order of their first turns."""
    shared = collections.Counter(i for r in requests for i in set(r["hash_ids"]))
    own = [[i for i in r["hash_ids"] if shared[i] < 200] for r in requests]
    owner, found = {}, collections.defaultdict(list)
    for n, ids in enumerate(own):
        conversation = next((owner[i] for i in reversed(ids) if i in owner), n)
        owner.update((i, conversation) for i in ids)
        found[conversation].append(n)
    return list(found.values())


def working_set(requests):
    """Mean and peak number of ids that are still to be asked for again."""
    last = {i: n for n, r in enumerate(requests) for i in r["hash_ids"]}
    live, sizes = set(), []
    for n, r in enumerate(requests):
        for i in r["hash_ids"]:
            (live.discard if last[i] == n else live.add)(i)
        sizes.append(len(live))
    return sum(sizes) / len(sizes), max(sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--turns", type=int, default=3, help="the fewest turns of a conversation (3)")
    parser.add_argument("--conversations", type=int, default=390, help="how many conversations to pick (390)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", required=True)
    args = parser.parse_args()
    with open(args.trace) as file:
        requests = [json.loads(line) for line in file if line.strip()]
    long = [c for c in conversations(requests) if len(c) >= args.turns]
    if len(long) < args.conversations:
        sys.exit(f"{args.trace} has {len(long)} conversations of {args.turns} turns or more: ask for fewer than {args.conversations}")
    picked = random.Random(args.seed).sample(long, args.conversations)
    chosen = [requests[n] for n in sorted(n for c in picked for n in c)]
    with open(args.output, "w") as file:
        file.writelines(json.dumps(r) + "\n" for r in chosen)
    mean, peak = working_set(chosen)
    print(
        json.dumps(
            {
                "requests": len(chosen),
                "ids": sum(len(r["hash_ids"]) for r in chosen),
                "different_ids": len({i for r in chosen for i in r["hash_ids"]}),
                "working_set_mean": round(mean),
                "working_set_peak": peak,
                "longest_prompt": max(len(r["hash_ids"]) for r in chosen),
                "longest_request_tokens": max(r["input_length"] + r["output_length"] for r in chosen),
            }
        )
    )


main()
