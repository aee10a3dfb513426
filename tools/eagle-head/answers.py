"""What an instruction-tuned model answers, as text for the training of its draft head.

    kvist serve --model MODEL.gguf --max-batch 48 --context 64k --port 8431 &
    python answers.py DATA --url http://127.0.0.1:8431

Asks the server for answers to instructions that the model itself makes up (it continues the beginning of a user's turn:
Magpie, arXiv 2406.08464), to tasks about passages of crates' documentation, and for continuations of such passages.
Appends a line of JSON for each to DATA/answers.jsonl until the answers hold `--tokens`; can be stopped, and goes on.
"""
import argparse
import json
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tiny-model"))
from crates import documents  # noqa: E402
from corpus import clean  # noqa: E402

# A chat's beginning, as the model's template writes it.
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
KINDS = {"instruction": 0.6, "turns": 0.1, "task": 0.2, "continuation": 0.1}
GREEDY = 0.75           # of the answers; the others are sampled as below
SAMPLED = dict(temperature=0.7, top_p=0.95)
INSTRUCTIONS = dict(temperature=1.0, top_p=0.98, max_tokens=160)
ANSWER = 256            # tokens at most
HELD_OUT = 20           # one answer in so many is for validation: `features.py` leaves it out
TASKS = ["Summarize this text:\n\n{}", "Explain this to a beginner:\n\n{}", "{}\n\nWhat are the main points?",
         "Rewrite this text in simpler words:\n\n{}", "List the key terms of this text and what they mean.\n\n{}",
         "Write three questions about this text:\n\n{}", "Continue this text:\n\n{}", "{}\n\nGive an example.",
         "Correct the grammar of this text:\n\n{}", "Write a short program that uses what is described here:\n\n{}",
         "Translate the idea of this text into a story for children:\n\n{}", "{}\n\nWhy does this matter?",
         "Turn this text into a bulleted list:\n\n{}", "Write an email to a colleague about this:\n\n{}",
         "What is wrong or missing here?\n\n{}", "Give this text a title and a summary in one sentence.\n\n{}"]


def passages():
    """Pieces of documentation that begin with a paragraph."""
    for document in clean(list(documents(HERE / "../../Cargo.toml"))):
        paragraphs = document.split("\n\n")
        for i in range(0, len(paragraphs), 4):
            piece = "\n\n".join(paragraphs[i:i + 4])[:900]
            if len(piece) >= 200:
                yield piece


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


class Writer:
    def __init__(self, url, texts):
        self.url, self.texts = url, texts

    def complete(self, prompt, seed, **options):
        answer = post(f"{self.url}/v1/completions", prompt=prompt, seed=seed, **options)
        return answer["choices"][0], answer["usage"]["completion_tokens"]

    def instruction(self, before, seed):
        """A user's turn as the model imagines it; None if it does not end or is hardly one."""
        choice, _ = self.complete(before + USER, seed, **INSTRUCTIONS)
        text = choice["text"].strip()
        return text if choice["finish_reason"] == "stop" and 15 <= len(text) else None

    def answer(self, index):
        """The answer of this number: the same each time."""
        rng = random.Random(index)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        greedy, text, prompt = rng.random() < GREEDY, rng.choice(self.texts), SYSTEM
        if kind == "continuation":
            prompt = text[:rng.randrange(80, len(text))].rstrip()
        elif kind == "task":
            prompt += USER + rng.choice(TASKS).format(text) + END + ASSISTANT
        else:
            for turn in range(1 + (kind == "turns")):
                asked = self.instruction(prompt, index * 2 + turn)
                if asked is None:
                    return None
                prompt += USER + asked + END + ASSISTANT
                if kind == "turns" and turn == 0:
                    choice, _ = self.complete(prompt, index, temperature=0, max_tokens=ANSWER)
                    prompt += choice["text"] + END
        options = dict(temperature=0) if greedy else SAMPLED
        choice, tokens = self.complete(prompt, index, max_tokens=ANSWER, **options)
        ended = END if choice["finish_reason"] == "stop" and kind != "continuation" else ""
        return dict(index=index, kind=kind, greedy=greedy, prompt=prompt, answer=choice["text"] + ended, tokens=tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8431")
    parser.add_argument("--tokens", type=int, default=400_000, help="of the answers together")
    parser.add_argument("--at-once", type=int, default=48, help="requests")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    path = args.data / "answers.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    total, index = sum(line["tokens"] for line in old), max((line["index"] for line in old), default=-1) + 1
    writer, began, before = Writer(args.url, list(passages())), time.time(), total
    with path.open("a") as file, ThreadPoolExecutor(args.at_once) as pool:
        waiting = []
        while total < args.tokens:
            while len(waiting) < 2 * args.at_once:
                waiting.append(pool.submit(writer.answer, index))
                index += 1
            line = waiting.pop(0).result()
            if line is None:
                continue
            file.write(json.dumps(line) + "\n")
            file.flush()
            total += line["tokens"]
            if line["index"] % 100 == 0:
                print(f"{total:,} tokens, {(total - before) / (time.time() - began):.0f} a second", flush=True)
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
