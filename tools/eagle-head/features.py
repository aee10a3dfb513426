"""What the head learns from: the target's hidden states and distributions over the texts of `answers.py`.

    python features.py DATA --model MODEL.gguf --url http://127.0.0.1:8431

Reads DATA/answers.jsonl and has the server of `answers.py` split the texts. Adds to DATA/train and DATA/held_out, for each
token: `tokens` u16, `texts` i32 (the number of its text), `wrote` u8 (1 in an answer), `features` f16 (the residual streams
that enter the tapped layers), `last` f16 (what the target's output layer reads), `norms` f32 (logarithm of the sum of the
exponentials of all logits) and `best` u16 (the likeliest next token). Goes on where it stopped. bf16 arithmetic.
"""
import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from answers import HELD_OUT, post
from smollm2 import LAYERS, SHAPE
from distill import taps, target  # noqa: E402

LONGEST, AT_ONCE = 512, 48      # tokens of a text, texts


def encode(url, text):
    return post(f"{url}/tokenize", prompt=text, add_special_tokens=False)["tokens"]


@torch.no_grad()
def states(model, rows):
    """Of each row of tokens: (features, last, norms, best)."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, :len(row)] = torch.tensor(row)
    hidden, features = taps(model, tokens, LAYERS)
    hidden = model.norm(hidden)
    for i, row in enumerate(rows):
        logits = F.linear(hidden[i, :len(row)], model.embed_tokens.weight).float()
        yield (features[i, :len(row)].half(), hidden[i, :len(row)].half(), logits.logsumexp(-1), logits.argmax(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the target, a GGUF file")
    parser.add_argument("--url", default="http://127.0.0.1:8431")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    done = args.data / "features_done"
    first, began, total = int(done.read_text()) if done.exists() else 0, time.time(), 0
    model = target(args.model, SHAPE).bfloat16()
    lines = (args.data / "answers.jsonl").read_text().splitlines()
    for folder in ("train", "held_out"):
        (args.data / folder).mkdir(exist_ok=True)
    for at in range(first, len(lines), AT_ONCE):
        texts = []
        for number, line in enumerate(map(json.loads, lines[at:at + AT_ONCE]), at):
            asked, whole = encode(args.url, line["prompt"]), encode(args.url, line["prompt"] + line["answer"])
            texts.append((number, line["index"] % HELD_OUT == 0, len(asked), whole[:LONGEST]))
        texts.sort(key=lambda text: len(text[3]))
        for group in (texts[i:i + 8] for i in range(0, len(texts), 8)):
            for (number, held_out, asked, row), found in zip(group, states(model, [text[3] for text in group])):
                features, last, norms, best = (t.numpy() for t in found)
                arrays = dict(tokens=np.array(row, np.uint16), texts=np.full(len(row), number, np.int32),
                              wrote=(np.arange(len(row)) >= asked).astype(np.uint8), features=features, last=last,
                              norms=norms, best=best.astype(np.uint16))
                for name, array in arrays.items():
                    with (args.data / ("held_out" if held_out else "train") / f"{name}.bin").open("ab") as file:
                        file.write(array.tobytes())
                total += len(row)
        done.write_text(str(at + len(texts)))
        print(f"{at + len(texts)} of {len(lines)} texts, {total / (time.time() - began):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
