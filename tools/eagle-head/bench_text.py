"""A text for `kvist bench speculate` whose parts are chats, one after the other.

    python bench_text.py --questions questions.txt --out chats.txt
    python bench_text.py --held-out DATA --out chats.txt

Each part has exactly `--prompt-tokens` and `--tokens` tokens: a question of QUESTIONS, or an instruction of DATA that
`features.py` held out, and the greedy answer to it, as the server of `answers.py` writes it. The parts follow one another
in whole tokens, so that evenly spaced prompts are their beginnings. Prints the options for `kvist bench speculate`.
"""
import argparse
import json
from pathlib import Path

from answers import ASSISTANT, END, HELD_OUT, SYSTEM, USER, Writer, post
from features import encode


def chats(args):
    """Beginnings of chats, up to where an answer begins."""
    if args.questions:
        for question in args.questions.read_text().splitlines():
            yield SYSTEM + USER + question + END + ASSISTANT
    else:
        for line in map(json.loads, (args.held_out / "answers.jsonl").read_text().splitlines()):
            if line["index"] % HELD_OUT == 0 and line["kind"] == args.kind:
                yield line["prompt"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--questions", type=Path, help="a question on each line")
    source.add_argument("--held-out", type=Path, help="folder of answers.jsonl")
    parser.add_argument("--kind", default="instruction", help="of the texts held out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8431")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--most", type=int, default=16, help="parts")
    args = parser.parse_args()
    writer, whole, ids, count = Writer(args.url, []), "", [], 0
    for prompt in chats(args):
        asked, size = encode(args.url, prompt), args.prompt_tokens + args.tokens
        if count == args.most or len(asked) > args.prompt_tokens:
            continue
        choice, _ = writer.complete(prompt, 0, temperature=0, max_tokens=size)
        part = encode(args.url, prompt + choice["text"])[:size]
        text = prompt + post(f"{args.url}/detokenize", tokens=part[len(asked):])["prompt"]
        # A cut within a word may split in another way.
        if len(part) == size and encode(args.url, whole + text) == ids + part:
            whole, ids, count = whole + text, ids + part, count + 1
    args.out.write_text(whole)
    print(f"--text {args.out} --prompts {count} --prompt-tokens {args.prompt_tokens} --tokens {args.tokens}")


if __name__ == "__main__":
    main()
