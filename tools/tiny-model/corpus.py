"""Corpus of the tiny models: the Rust documentation that ships with the toolchain, and the documentation comments of
the crates that this workspace depends on.

    rustup component add rust-docs
    cargo fetch
    python corpus.py OUT

Writes token ids to OUT, u16, each document between `<|begin_of_text|>` and `<|end_of_text|>`: `prose.bin` (books,
references, the pages of primitive types), `api.bin` (the other pages of `std`, of each its first 12,000 characters),
`tails.bin` (the rest of those pages), `crates.bin`, `passages.bin` (pieces of the prose that begin with a paragraph, as
what people type does), and `val.bin`, which is `val.txt` beside this script. What overlaps `val.txt` is left out and
named.
"""
import argparse
import collections
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import crates

HERE = Path(__file__).parent
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
BEGIN_ID, END_ID = 0, 1
API_PAGE = 12_000       # characters: a few std pages are very long lists
PASSAGE = 2_000         # characters
# A document is left out if it holds this share of the shingles of a held-out one. Shingles are runs of that many words
# or marks; those in more documents than `BOILERPLATE` do not count.
OVERLAP, SHINGLE, BOILERPLATE = 0.5, 13, 20


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
            if "es" in folder.relative_to(root).parts:      # a translation that is half in English
                continue
            for path in sorted(folder.glob("*.html")):
                if path.name not in NO_PAGES:
                    text = page_text(path)
                    if len(text) >= 200:
                        yield text
    yield page_text(root / "releases.html")


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
        text = "\n\n".join(parts)
        for fancy, plain in zip("“”‘’–—", "\"\"''--"):
            text = text.replace(fancy, plain)
        text = "".join(c for c in text.replace("…", "...") if ord(c) < 128)
        text = "\n".join(line.rstrip() for line in text.split("\n") if line.strip() not in CHROME)
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if len(text) >= 400:
            kept.append(text)
    return kept


def shingles(text):
    words = re.findall(r"\w+|[^\w\s]", text)
    return {" ".join(words[i:i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def decontaminate(documents, held_out):
    """The documents that are not, in good part, one of those held out: the page itself, its translation or copy under
    another path, the page of a sister type."""
    targets = [shingles(d) for d in held_out]
    together = set().union(*targets)
    shared = [shingles(d) & together for d in documents]
    often = collections.Counter(s for found in shared for s in found)
    targets = [{s for s in target if often[s] <= BOILERPLATE} for target in targets]
    kept = []
    for document, found in zip(documents, shared):
        if any(len(found & target) >= OVERLAP * max(len(target), 20) for target in targets):
            print("left out:", " ".join(document[:80].split()))
        else:
            kept.append(document)
    return kept


def parts(documents):
    """`prose`, `api` and `tails`."""
    prose, api, tails = [], [], []
    for document in documents:
        if not re.match(r"(std|core|alloc)(::|\n)", document):
            prose.append(document)
        elif len(document) <= API_PAGE + 1000:
            api.append(document)
        else:
            cut = document.rfind("\n\n", API_PAGE // 2, API_PAGE)
            cut = API_PAGE if cut < 0 else cut
            api.append(document[:cut].rstrip())
            tails.append(document[cut:].lstrip())
    return dict(prose=prose, api=api, tails=tails)


def passages(documents):
    """From every few paragraphs on, the text up to `PASSAGE` characters."""
    for document in documents:
        paragraphs, begun, at = document.split("\n\n"), -PASSAGE, 0
        for i, paragraph in enumerate(paragraphs):
            if at - begun > PASSAGE and len(paragraph) >= 120 and re.match(r"[A-Z][a-z']* ", paragraph):
                piece = ""
                for follower in paragraphs[i:]:
                    if len(piece) + len(follower) > PASSAGE and piece:
                        break
                    piece += follower + "\n\n"
                yield piece
                begun = at
            at += len(paragraph) + 2


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

    held_out = (HERE / "val.txt").read_text().split("\0")
    files = parts(decontaminate(clean(list(pages(root))), held_out))
    files["crates"] = decontaminate(clean(list(crates.documents(HERE / "../../Cargo.toml"))), held_out)
    files["passages"] = list(passages(files["prose"]))
    files["val"] = held_out
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    for name, documents in files.items():
        encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
        end = [] if name == "passages" else [END_ID]
        ids = [i for e in encoded for i in (BEGIN_ID, *e.ids, *end)]
        np.array(ids, dtype=np.uint16).tofile(args.out / f"{name}.bin")
        print(f"{name}: {len(documents):,} documents, {len(ids):,} tokens")


if __name__ == "__main__":
    main()
