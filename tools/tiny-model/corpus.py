"""Corpus and tokenizer of the tiny models, from the Rust documentation that ships with the toolchain.

    rustup component add rust-docs
    python corpus.py OUT

Writes to OUT: `tokenizer.json` (byte-level BPE of 4,096 tokens), `val.txt` (the held-out documents, a NUL byte
between two), and the token ids `train.bin`, `prose.bin` (the books without the API pages) and `val.bin`: u16,
`<|end_of_text|>` after each document.
"""
import argparse
import collections
import random
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOOKS = ("book reference rust-by-example nomicon cargo rustc edition-guide unstable-book clippy embedded-book "
         "style-guide rustdoc error_codes std").split()
NO_PAGES = {"print.html", "toc.html", "searchindex.html", "all.html", "404.html"}
# Elements without text of their own, and those that stand on a line of their own.
SKIP = set("script style nav noscript svg button title head template rustdoc-toolbar rustdoc-topbar".split())
BLOCK = set("p div section h1 h2 h3 h4 h5 li tr pre summary details blockquote table ul ol dt dd br".split())
# Lines that every page of a book repeats.
CHROME = {"-", "#", "##", "###", "####", "Skip to main content", "Expand description", "Source",
          "Press S or / to search in the book", "Press ? to show this help", "Press Esc to hide this help",
          "Press  or  to navigate between chapters", "## Keyboard shortcuts", "# Rust By Example",
          "# The Rust Programming Language", "# The Rust Reference", "# The Cargo Book"}
BEGIN, END, END_ID = "<|begin_of_text|>", "<|end_of_text|>", 1
VOCABULARY = 4096
# The pre-tokenizer that llama.cpp calls "qwen2".
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
MAX_API_PAGE = 12_000   # characters: a few std pages are very long lists
VALIDATION = 25         # documents of each kind


class Text(HTMLParser):
    """The text of a page, with Markdown's marks for headings, items and code."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.skip, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in SKIP:
            self.skip += 1
        if tag == "pre":
            self.pre += 1
            self.out.append("\n```\n")
        elif tag in ("h1", "h2", "h3", "h4"):
            self.out.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag == "li":
            self.out.append("\n- ")
        elif tag in BLOCK:
            self.out.append("\n")

    def handle_endtag(self, tag):
        if tag in SKIP and self.skip:
            self.skip -= 1
        if tag == "pre" and self.pre:
            self.pre -= 1
            self.out.append("\n```\n")
        elif tag in BLOCK:
            self.out.append("\n")

    def handle_data(self, data):
        if not self.skip:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def page_text(path):
    parser = Text()
    parser.feed(path.read_text(encoding="utf8", errors="replace"))
    text = "".join(parser.out).replace("\xa0", " ").replace("§", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def pages(root):
    for book in BOOKS:
        # Folder by folder, each folder's own pages first.
        folders = sorted({p.parent for p in (root / book).rglob("*.html")}, key=lambda p: p.parts)
        for folder in folders:
            for path in sorted(folder.glob("*.html")):
                if path.name not in NO_PAGES:
                    text = page_text(path)
                    if len(text) >= 200:
                        yield text


def clean(documents):
    """ASCII only, no translations, no boilerplate, nothing short."""
    def paragraphs(document):
        return re.split(r"\n\n+", document)

    often = collections.Counter(p for d in documents for p in set(paragraphs(d)))
    seen, kept = collections.Counter(), []
    for document in documents:
        if sum(ord(c) > 127 for c in document) > 0.02 * len(document):
            continue
        parts = []
        for part in paragraphs(document):
            if len(part) > 60 and often[part] > 3:
                seen[part] += 1
                if seen[part] > 2:
                    continue
            parts.append(part)
        lines = "\n\n".join(parts).split("\n")
        text = "\n".join(line.rstrip() for line in lines if line.strip() not in CHROME)
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        for fancy, plain in zip("“”‘’–—", "\"\"''--"):
            text = text.replace(fancy, plain)
        text = "".join(c for c in text.replace("…", "...") if ord(c) < 128)
        if len(text) >= 400:
            kept.append(text)
    return kept


def split(documents):
    """Training and validation documents, and those of the former that are no API pages."""
    def is_api(text):
        return re.match(r"^(std|core|alloc)(::|\n)", text) is not None

    api = [d[:MAX_API_PAGE] for d in documents if is_api(d)]
    prose = [d for d in documents if not is_api(d)]
    rng = random.Random(7)
    rng.shuffle(api)
    rng.shuffle(prose)
    validation = prose[:VALIDATION] + api[:VALIDATION]
    prose, api = prose[VALIDATION:], api[VALIDATION:]
    training = prose + api
    rng.shuffle(training)
    return training, prose, validation


def train_tokenizer(documents):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BEGIN, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--docs", type=Path, help="share/doc/rust/html of a toolchain; default: the one in use")
    args = parser.parse_args()
    root = args.docs
    if root is None:
        sysroot = subprocess.check_output(["rustc", "--print", "sysroot"], text=True).strip()
        root = Path(sysroot) / "share" / "doc" / "rust" / "html"
    if not root.is_dir():
        raise SystemExit(f"{root} is not there: rustup component add rust-docs")
    args.out.mkdir(parents=True, exist_ok=True)

    training, prose, validation = split(clean(list(pages(root))))
    tokenizer = train_tokenizer(training + prose)
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "val.txt").write_text("\0".join(validation))
    for name, documents in (("train", training), ("prose", prose), ("val", validation)):
        ids = [i for d in documents for i in [*tokenizer.encode(d).ids, END_ID]]
        np.array(ids, dtype=np.uint16).tofile(args.out / f"{name}.bin")
        print(f"{name}: {len(documents):,} documents, {len(ids):,} tokens")


if __name__ == "__main__":
    main()
