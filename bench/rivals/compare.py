#!/usr/bin/env python3
"""kvist beside llama.cpp and torch, in turns on the same machine, as a table.

    bench/rivals/compare.py                    # every row
    bench/rivals/compare.py --only decode      # rows whose name contains it
    bench/rivals/compare.py --resume           # rows not yet measured
    bench/rivals/compare.py --list
    bench/rivals/compare.py --resume --write   # puts all rows into bench/RESULTS.md once they are measured

--write replaces the section of bench/RESULTS.md between the markers, and bench/rivals.json beside it, which `kvist bench rivals`
draws. It does so after the last row, and only if no published row would be lost.

Every round measures kvist and then each rival once; a figure is the median over the rounds. Of llama.cpp's ways
(flash attention on or off, each compiler it was built with) the fastest counts. Measured rows are kept in
bench/target/rivals/results.json until they are measured again.
"""
import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common import BENCH, RIVALS, Failed, busy, llama_builds, machine, script, versions  # noqa: E402

SHAPES = {
    "a": ["--layers", "12", "--heads", "12", "--kv-heads", "12", "--head-dim", "64"],
    "b": ["--layers", "22", "--heads", "32", "--kv-heads", "4", "--head-dim", "64"],
}
KVIST_STORAGE = {"f16": "f16", "q8_0": "q8", "q4_0": "q4"}
BEGIN, END = "<!-- rivals -->", "<!-- /rivals -->"


def last_with(text, key):
    """The last JSON object of an output that has `key`: a whole document, or one object per line."""
    found = None
    documents = [text] if text.lstrip().startswith(("{", "[")) else []
    for part in documents + text.splitlines():
        try:
            value = json.loads(part)
        except ValueError:
            continue
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict) and key in entry:
                found = float(entry[key])
    if found is None:
        raise Failed(f"no `{key}` in the output")
    return found


class Once:
    """A program that measures and ends."""

    def __init__(self, command, key):
        self.command, self.key = [str(part) for part in command], key

    def measure(self):
        done = subprocess.run(self.command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise Failed(f"{' '.join(self.command)}: {lines[0]}")
        return last_with(done.stdout, self.key)

    def close(self):
        pass


class Stays:
    """A program that keeps a filled cache and measures when asked to."""

    def __init__(self, command, request):
        self.command, self.request, self.process = [str(part) for part in command], request, None

    def measure(self):
        if self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True)
            self.line("ready")
            self.ask()  # warms up
        return self.ask()

    def ask(self):
        try:
            self.process.stdin.write(self.request + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failed(f"{' '.join(self.command)}: {error}") from error
        return self.line("tokens_per_s")

    def line(self, key):
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{' '.join(self.command)}: ended")
        return last_with(line, key)

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


class Row:
    def __init__(self, name, title, unit, kvist, rivals):
        self.name, self.title, self.unit = name, title, unit
        self.kvist, self.rivals = kvist, rivals  # rivals: (column, way) -> what measures it

    def measure(self, rounds):
        contestants = {("kvist", ""): self.kvist, **self.rivals}
        values, errors = {}, {}
        try:
            for _ in range(rounds):
                for key, contestant in contestants.items():
                    if key in errors:
                        continue
                    try:
                        values.setdefault(key, []).append(contestant.measure())
                    except (Failed, OSError) as error:
                        errors[key] = str(error)
                        print(f"{self.name}: {' '.join(key)}: {error}", file=sys.stderr)
        finally:
            for contestant in contestants.values():
                contestant.close()
        columns = {}
        for (column, way), all_values in values.items():
            if (column, way) in errors:
                continue
            entry = {"value": statistics.median(all_values), "rounds": all_values, "way": way}
            columns.setdefault(column, []).append(entry)
        return {column: sorted(entries, key=self.order) for column, entries in columns.items()}

    def order(self, entry):
        return entry["value"] if self.unit == "ms" else -entry["value"]

    def ratio(self, kvist, rival):
        """How many times as fast kvist is."""
        return rival / kvist if self.unit == "ms" else kvist / rival


def thousands(tokens):
    return f"{tokens // 1024}k" if tokens else "0"


def rows(args):
    threads = ["--threads", args.threads]
    builds = {path.name.removeprefix("llama-"): path for path in llama_builds(args.rivals)}
    if not builds:
        sys.exit(f"compare.py: no llama.cpp in {args.rivals}; run bench/rivals/install.sh")
    torch = [args.rivals / "venv/bin/python", HERE / "sdpa.py"]
    kvist = [args.kvist, "bench"]
    states = args.rivals / "states"
    states.mkdir(exist_ok=True)
    every = []

    def attention(shape, kind, tokens, queries, dtypes, runs):
        name = f"attention-{shape}-{kind}-{thousands(tokens)}" if queries == 1 else f"attention-{shape}-prefill"
        sizes = ["--tokens", tokens, "--queries", queries]
        rivals = {}
        for compiler, path in builds.items():
            for mode in ["flash", "plain"] if kind == "f16" else ["flash"]:
                command = [path / "attention", *SHAPES[shape], *sizes, "--type", kind, "--mode", mode, *threads]
                rivals["llama.cpp", f"{mode}, {compiler}"] = Once([*command, "--runs", runs], "median_ms")
        for dtype in dtypes:
            command = [*torch, "attention", "--shape", shape, *sizes, "--dtype", dtype, *threads, "--runs", runs]
            rivals[f"torch {dtype}", ""] = Once(command, "median_ms")
        own = KVIST_STORAGE[kind]
        command = [*kvist, "attention", "--shape", shape, *sizes, "--k", own, "--v", own, *threads, "--runs", runs]
        what = "one query" if queries == 1 else f"{queries} queries"
        title = f"attention ({shape}), {what}, {tokens} tokens, {kind}"
        every.append(Row(name, title, "ms", Once([*command, "--json"], "median_ms"), rivals))

    for tokens in (4096, 16384, 32768):
        attention("a", "f16", tokens, 1, ["bf16", "f32"], 15)
    for tokens in (4096, 16384):
        attention("b", "f16", tokens, 1, ["bf16", "f32"], 15)
    for kind in ("q8_0", "q4_0"):
        attention("a", kind, 16384, 1, [], 15)
    attention("a", "f16", 4608, 512, ["bf16", "f32"], 3)

    def steps(file, depth, request):
        for compiler, path in builds.items():
            for flash in ("on", "off"):
                # The content of the cache does not matter, only its layout: one file for all compilers.
                state = states / f"{file.stem}-{depth}-flash-{flash}"
                command = [path / "steps", "--model", file, "--flash", flash, "--depth", depth, *threads]
                way = "flash" if flash == "on" else "plain"
                yield ("llama.cpp", f"{way}, {compiler}"), Stays([*command, "--state", state], request)

    cache = ["--k", "f16", "--v", "f16"]
    for model, depth in (("b-q8_0", 0), ("b-q8_0", 4096), ("b-q8_0", 16384), ("b-q4_0", 0)):
        file = args.models / f"{model}.gguf"
        command = [*kvist, "decode", "--model", file, "--depth", depth, *cache, *threads]
        title = f"decode (b) {model[2:]} at depth {depth}"
        own = Once([*command, "--json"], "tokens_per_s")
        rivals = dict(steps(file, depth, "decode 32"))
        every.append(Row(f"decode-{model}-{thousands(depth)}", title, "tokens/s", own, rivals))

    def prefill(file, title, name, rivals):
        command = [*kvist, "prefill", "--model", args.models / file, "--tokens", 512, *threads, "--json"]
        every.append(Row(name, title, "tokens/s", Once(command, "tokens_per_s"), rivals))

    prefill("b-q8_0.gguf", "prefill 512 (b) q8_0", "prefill-b-q8_0", dict(steps(args.models / "b-q8_0.gguf", 0, "prefill 512")))
    command = [*torch, "prefill", "--shape", "b", "--tokens", 512, "--dtype", "bf16", *threads, "--runs", 3]
    whole = {("torch bf16", ""): Once(command, "tokens_per_s")}
    prefill("b-bf16", "prefill 512 (b) bf16", "prefill-b-bf16", whole)

    # Files that people have, where tests/real-models has fetched them.
    for file in sorted(args.real_models.glob("*.gguf")):
        if file.stem.endswith(".f32"):
            continue
        model = "-".join(file.stem.lower().split("-")[:2])  # smollm2-135m, gemma-3
        for depth in (0, 1024):
            command = [*kvist, "decode", "--model", file, "--depth", depth, *cache, *threads, "--json"]
            rivals = dict(steps(file, depth, "decode 32"))
            own = Once(command, "tokens_per_s")
            title = f"decode {file.stem} at depth {depth}"
            every.append(Row(f"decode-{model}-{thousands(depth)}", title, "tokens/s", own, rivals))
        prefill(file, f"prefill 512 {file.stem}", f"prefill-{model}", dict(steps(file, 0, "prefill 512")))
    return every


def shown(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(every, results, args):
    columns = ["llama.cpp", "torch bf16", "torch f32"]
    lines = ["| | unit | kvist | " + " | ".join(f"{column} | ×" for column in columns) + " | measured |"]
    lines.append("|---|---|--:|" + "--:|--:|" * len(columns) + "---|")
    for row in every:
        kept = results["rows"].get(row.name)
        if kept is None:
            continue
        best = {column: entries[0] for column, entries in kept["columns"].items()}
        own = best.get("kvist")
        # Not hidden: such a row is to be measured again.
        measured = kept["date"] + (f", {kept['busy']:.0%} busy" if kept["busy"] > 0.1 else "")
        cells = [row.title, row.unit, shown(own["value"]) if own else "–"]
        for column in columns:
            rival = best.get(column)
            if rival is None:
                cells += ["", ""]
                continue
            way = f" ({rival['way']})" if rival["way"] else ""
            cells.append(shown(rival["value"]) + way)
            cells.append(f"{row.ratio(own['value'], rival['value']):.2f}" if own else "–")
        lines.append("| " + " | ".join(cells + [measured]) + " |")
    return "\n".join(lines)


def ratios(every, results):
    """For `kvist bench rivals`: how many times as fast as each rival kvist is."""
    rows = []
    for row in every:
        columns = results["rows"].get(row.name, {}).get("columns", {})
        if "kvist" not in columns:
            continue
        own = columns["kvist"][0]["value"]
        times = {
            column: round(row.ratio(own, entries[0]["value"]), 2)
            for column, entries in columns.items()
            if column != "kvist"
        }
        rows.append({"title": row.title, "times_as_fast": times})
    return json.dumps(rows, indent=1) + "\n"


def section(every, results, args):
    return f"""{BEGIN}
## Beside llama.cpp and torch

By `just rivals --write`. {results["machine"]}; {args.threads} threads. {results["versions"]}.

× says how many times as fast as the rival kvist is. Figures are medians over rounds in which all took turns.
(a) has 12 layers of 12 heads with a KV head each, (b) 22 layers of 32 heads on 4 KV heads, heads of 64; the models are
random ones of [tools/random-model](../tools/random-model/README.md). Attention is that of all layers together, without
the matrices; llama.cpp's caches are f16 unless the row says otherwise, kvist's q8 and q4 stand against q8_0 and q4_0.
Of llama.cpp's ways (flash attention or plain, compilers) the fastest is shown. A row says if the machine was
busy with other work when its turn came.

{table(every, results, args)}
{END}
"""


def published(path):
    """The titles of the rows that a file has between the markers."""
    text = path.read_text() if path.exists() else ""
    if BEGIN not in text or END not in text:
        return []
    lines = text.split(BEGIN, 1)[1].split(END, 1)[0].splitlines()
    titles = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    return [title for title in titles if title]


def write(path, text):
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def replace_section(path, new):
    old = path.read_text() if path.exists() else "# Results\n"
    if BEGIN in old:
        before, rest = old.split(BEGIN, 1)
        if END not in rest:
            sys.exit(f"compare.py: {path} has {BEGIN} without {END}")
        after = rest.split(END, 1)[1].lstrip("\n")
    else:
        before, after = old.rstrip("\n") + "\n\n", ""
    write(path, before + new + ("\n" + after if after else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows whose name contains this; several with commas")
    parser.add_argument("--resume", action="store_true", help="skip rows that are measured already")
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--write", action="store_true", help="into the section of --out, and rivals.json beside it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kvist", type=pathlib.Path, default=BENCH.parent / "target/release/kvist")
    parser.add_argument("--models", type=pathlib.Path, default=BENCH / "target/models")
    parser.add_argument("--rivals", type=pathlib.Path, default=RIVALS)
    parser.add_argument("--real-models", type=pathlib.Path, default=BENCH.parent / "tests/real-models/.cache")
    parser.add_argument("--out", type=pathlib.Path, default=BENCH / "RESULTS.md")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads are 1 at least")
    every = rows(args)
    wanted = args.only.split(",") if args.only else [""]
    chosen = [row for row in every if any(part in row.name for part in wanted)]
    if args.list or not chosen:
        print("\n".join(row.name for row in every))
        sys.exit(0 if args.list else f"compare.py: no row has `{args.only}` in its name")

    kept = args.rivals / "results.json"
    now = {"machine": machine(), "versions": versions(["llama.cpp", "torch"], rivals=args.rivals), "rows": {}}
    results = json.loads(kept.read_text()) if kept.exists() else now
    if any(results[key] != now[key] for key in ("machine", "versions")):
        print("another machine or other rivals than last time: starting anew", file=sys.stderr)
        results = now
    for row in chosen:
        if args.resume and "kvist" in results["rows"].get(row.name, {}).get("columns", {}):
            continue
        others = busy(2)
        if others > 0.1:
            print(f"{row.name}: others take {others:.0%} of the cores: the figures will be off", file=sys.stderr)
        columns = row.measure(args.rounds)
        others = max(others, busy(2))  # work may have begun in between
        if not columns:
            continue
        date = datetime.date.today().isoformat()
        results["rows"][row.name] = {"date": date, "busy": others, "columns": columns}
        # After every row, so that a run can be ended at any time, and --resume goes on.
        write(kept, json.dumps(results, indent=1))
        for column, entries in columns.items():
            for entry in entries:
                print(f"{row.name}: {column} {entry['way']}: {entry['value']:.3f} {row.unit}", flush=True)
    print(f"\n{results['machine']}; {args.threads} threads. {results['versions']}.\n\n{table(chosen, results, args)}")
    if not args.write:
        return 0
    measured = [row.title for row in every if "kvist" in results["rows"].get(row.name, {}).get("columns", {})]
    if lost := [title for title in published(args.out) if title not in measured]:
        raise Failed(f"{args.out} is as it was, because it has rows that this machine has not measured (--resume measures what is missing): " + "; ".join(lost))
    replace_section(args.out, section(every, results, args))
    write(args.out.with_name("rivals.json"), ratios(every, results))
    return 0


script(main)
