"""What an engine is asked to do. `run(prompts, n)` generates `n` tokens for each prompt (a list of token ids) at once, and returns
the seconds to the first and to the last token of each.

An engine is a process that loads its model, prints `{"ready": true}`, and then measures each row that a line of its standard
input names. The numbers in a row's name are tokens, so they can be other ones: `decode at 512`.
"""
import json
import random
import sys

draw = random.Random()


def names(depth):
    return ["prefill", f"prefill at {depth}", "decode", f"decode at {depth}", "8 sequences", f"8 on a trunk of {depth}",
            f"cold prompt of {depth + 32}"]


def tokens(n):
    """Prompts are random: no two share a beginning by chance."""
    return [draw.randrange(300, 31000) for _ in range(n)]


def measure(run, row):
    """Tokens per second."""
    kind, _, number = row.rpartition(" ") if row[-1:].isdigit() else (row, "", "0")
    depth = int(number)
    if kind == "prefill":
        ([first], _) = run([tokens(512)], 1)
        return 512 / first
    if kind == "prefill at":  # whose first tokens are cached
        trunk = tokens(depth)
        run([trunk + tokens(1)], 1)
        ([first], _) = run([trunk + tokens(512)], 1)
        return 512 / first
    if kind in ("decode", "decode at"):
        ([first], [last]) = run([tokens(max(1, depth))], 33)
        return 32 / (last - first)
    if kind == "8 sequences":
        (first, last) = run([tokens(16) for _ in range(8)], 64)
        return 8 * 63 / (max(last) - max(first))
    if kind == "8 on a trunk of":
        trunk = tokens(depth)
        run([trunk + tokens(32)], 1)
        (_, last) = run([trunk + tokens(32) for _ in range(8)], 64)
        return 8 * 64 / max(last)
    if kind == "cold prompt of":
        ([first], _) = run([tokens(depth)], 1)
        return depth / first
    raise ValueError(f"no row `{row}`")


def warm_up(run):
    """A prompt that is as long as a step, and a few tokens after it: buffers are filled and kernels are compiled before a row is measured."""
    run([tokens(512)], 4)


def serve(run):
    warm_up(run)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens_per_s": measure(run, line.strip())}), flush=True)
