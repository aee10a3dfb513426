"""How much a model repeats itself: the share of the runs of four tokens that came before in the same text, over greedy
continuations of 200 tokens.

    python repeats.py ../../target/release/kvist [--model FILE.gguf] [--show]
"""
import argparse
import subprocess
from pathlib import Path

from tokenizers import Tokenizer

PROMPTS = ["The borrow checker", "A vector is", "To create a new project", "Ownership means", "An iterator",
           "The main function", "A trait", "Lifetimes are", "Error handling in Rust", "Pattern matching",
           "To read a file", "The String type", "A closure", "Cargo is", "Generic types", "An enum", "Threads",
           "A hash map", "Unsafe code", "The Option type"]
RUN, NEW = 4, 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvist", type=Path)
    parser.add_argument("--model", type=Path, help="default: the embedded one")
    parser.add_argument("--show", action="store_true", help="print the texts")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
    model = ["--model", str(args.model)] if args.model else []
    repeated = runs = 0
    for prompt in PROMPTS:
        command = [args.kvist, "run", prompt, "--greedy", "--quiet", "--no-echo", "-n", str(NEW), *model]
        text = subprocess.check_output(command, text=True)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found = [tuple(ids[i:i + RUN]) for i in range(len(ids) - RUN + 1)]
        repeated, runs = repeated + len(found) - len(set(found)), runs + len(found)
        print(f"{1 - len(set(found)) / max(1, len(found)):.2f} of {len(found):3}: {prompt}")
        if args.show:
            print(text + "\n")
    print(f"{repeated / runs:.3f} of {runs} runs of {RUN} tokens are repeated")


if __name__ == "__main__":
    main()
