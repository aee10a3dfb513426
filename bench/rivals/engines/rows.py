"""What an engine is asked to do. `run(prompts, n)` generates `n` tokens for each prompt (a list of token ids) at once, and returns
the seconds to the first and to the last token of each.

An engine is a process that loads its model, prints `{"ready": true}`, and then measures each row that a line of its standard
input names.
"""
import json
import random
import sys

ROWS = ["prefill", "prefill at 4096", "decode", "decode at 4096", "8 sequences", "8 on a trunk of 4096", "cold prompt of 4128"]
draw = random.Random()


def tokens(n):
    """Prompts are random: no two share a beginning by chance."""
    return [draw.randrange(300, 31000) for _ in range(n)]


def measure(run, row):
    """Tokens per second."""
    if row == "prefill":
        ([first], _) = run([tokens(512)], 1)
        return 512 / first
    if row == "prefill at 4096":  # whose first tokens are cached
        trunk = tokens(4096)
        run([trunk + tokens(1)], 1)
        ([first], _) = run([trunk + tokens(512)], 1)
        return 512 / first
    if row in ("decode", "decode at 4096"):
        ([first], [last]) = run([tokens(1 if row == "decode" else 4096)], 33)
        return 32 / (last - first)
    if row == "8 sequences":
        (first, last) = run([tokens(16) for _ in range(8)], 64)
        return 8 * 63 / (max(last) - max(first))
    if row == "8 on a trunk of 4096":
        trunk = tokens(4096)
        run([trunk + tokens(32)], 1)
        (_, last) = run([trunk + tokens(32) for _ in range(8)], 64)
        return 8 * 64 / max(last)
    if row == "cold prompt of 4128":
        ([first], _) = run([tokens(4128)], 1)
        return 4128 / first
    raise ValueError(f"no row `{row}`")


def serve(run):
    run([tokens(64)], 4)  # warms up
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens_per_s": measure(run, line.strip())}), flush=True)
