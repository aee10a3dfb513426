"""The documentation comments of crates, as text that looks like the pages `rustdoc` makes of them.

Read from the sources that cargo keeps, so nothing has to be built. Only crates whose licence lets one choose MIT or
Apache-2.0.
"""
import json
import re
import subprocess
from pathlib import Path

ITEM = re.compile(r"(?:pub(?:\([^)]*\))? )?(?:default |const |async |unsafe |extern \"[^\"]*\" )*"
                  r"(fn|struct|enum|trait|union|type|mod|macro_rules!|const|static|macro) *\w+")
PAGE = {"struct": "Struct", "enum": "Enum", "trait": "Trait", "union": "Union", "macro_rules!": "Macro",
        "macro": "Macro"}
LONGEST = 12_000    # characters of one document


def is_free(licence):
    """Does an SPDX expression (or cargo's old `A/B`) offer MIT or Apache-2.0 by itself?"""
    if not licence or " AND " in licence:
        return False
    return bool({"MIT", "Apache-2.0"} & {name.strip("() ") for name in re.split(r" OR |/", licence)})


def packages(manifest):
    """(name, version, folder) of each crate of the workspace's dependency tree that may be used."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--offline",
               "--filter-platform", "x86_64-unknown-linux-gnu", "--manifest-path", str(manifest)]
    for package in json.loads(subprocess.check_output(command, text=True))["packages"]:
        if package["source"] and is_free(package["license"]):
            yield package["name"], package["version"], Path(package["manifest_path"]).parent


def plain(markdown):
    """Markdown as a page's text: paragraphs on one line, without links and marks; code as it is."""
    out, code, hidden = [], False, False
    for line in markdown:
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            if not code:
                hidden = False
            code = not code
            out.append("```")
        elif code:
            if not re.match(r"\s*#( |$)", line):
                out.append(line.rstrip())
        elif re.match(r"\[[^\]]+\]: |!?\[!\[|<!--|\|[-: |]+\|$", stripped):
            continue
        else:
            heading = re.match(r"#+ +(.*)", stripped)
            text = heading.group(1) if heading else stripped
            text = re.sub(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])?", r"\1", text)
            text = re.sub(r"</?\w[^>]*>", "", text) if "`" not in text else text
            text = text.replace("`", "").replace("**", "")
            text = re.sub(r"^[*+] ", "- ", text)
            starts = heading or re.match(r"- |\d+\. |\|", text)
            if text and not starts and out and out[-1] not in ("", "```"):
                out[-1] += " " + text
            else:
                out += ["", text, ""] if heading else [text]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def signature(lines, at):
    """The declaration that starts at line `at`, up to its body."""
    text = ""
    for line in lines[at:at + 12]:
        text += line.strip() + " "
        if re.search(r"[{;]|=>", line):
            break
    text = re.split(r"\{|;| = |=>", text)[0].strip().rstrip(",")
    return re.sub(r"\s+", " ", text)


def file_text(path, title):
    """Pages of one source file: what its module is, then each item that has documentation."""
    lines = path.read_text(encoding="utf8", errors="replace").splitlines()
    about = [re.sub(r"^ ?", "", line.strip()[3:]) for line in lines if line.strip().startswith("//!")]
    parts, docs, at = [], [], 0
    if about:
        parts.append(plain(about))
    while at < len(lines):
        line = lines[at].strip()
        if line.startswith("///") and not line.startswith("////"):
            docs.append(re.sub(r"^ ", "", line[3:]))
        elif docs and line.startswith("#["):
            while at < len(lines) and lines[at].count("]") < lines[at].count("["):
                at += 1
        elif docs and line:
            item, text = ITEM.match(line), plain(docs)
            if item and item.group(1) in PAGE:
                name = f"# {PAGE[item.group(1)]} {item.group(0).split()[-1]}"
                parts.append(f"{name}\n\n```\n{signature(lines, at)}\n```\n\n{text}")
            elif item:
                parts.append(f"#### {signature(lines, at)}\n\n{text}")
            elif not re.search("[{(]", line) or re.match(r"\w+(\(|,| \{)", line):
                parts.append(f"{line.rstrip('{(, ')}\n\n{text}")
            docs = []
        at += 1
    page = ""
    for part in parts:
        if page and len(page) + len(part) > LONGEST:
            yield page
            page = ""
        page += ("\n\n" if page else title + "\n\n") + part
    if page:
        yield page


def documents(manifest):
    for name, _, folder in sorted(packages(manifest)):
        for path in sorted(folder.glob("README*.md")):
            yield plain(path.read_text(encoding="utf8", errors="replace").splitlines())
        source = folder / "src"
        for path in sorted(source.rglob("*.rs")):
            module = [p for p in path.relative_to(source).with_suffix("").parts if p not in ("lib", "mod", "main")]
            yield from file_text(path, "::".join([name.replace("-", "_"), *module]))
