#!/usr/bin/env python3
"""kvist beside vLLM on CPU, OpenVINO GenAI, CTranslate2, ik_llama.cpp and llama.cpp: every row in turns, on stdout as a table of
tokens per second and of how many times as fast kvist is.

    bench/rivals/engines/install.sh && bench/rivals/engines/compare.py [--rounds 3] [--only prefill,decode] [--weights q4_0]
    bench/rivals/engines/compare.py --readme --rounds 10        # the rows that the README shows

All have the same model: random, 1.1B parameters, TinyLlama's shape. vLLM reads it as W8A8 (int8), CTranslate2 in its own int8, the
others as q8_0. kvist has four columns: q8_0 and int8, each without and with --fast-prefill. vLLM keeps K and V in 16 bits, OpenVINO
in 8; kvist is measured with the same as each rival. With other --weights than q8_0, the rivals are those that read such a file:
vLLM does for bf16 alone. vLLM runs without torch.compile, unless --vllm-compiled adds it as another rival. llama.cpp is there if bench/rivals/install.sh has built it; the fastest of its builds counts. An engine that waits
is stopped (SIGSTOP), because idle engines spin on the cores. The table has medians over the rounds. x is the median of the rounds'
own ratios, with the second smallest and the second largest of them in brackets (of fewer than four rounds the smallest and the
largest): kvist beside the rival whose median is highest. With one column and one rival the two are measured directly after each
other, in alternating order. The load average stands beside each row. Every contestant computes a prompt of 512 tokens before it is
measured.
"""
import argparse
import http.client
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import common  # noqa: E402
import rows  # noqa: E402
from common import ENGINES, MODELS, Failed, python, run  # noqa: E402

IK = ENGINES / "ik/build/bin"
# What measures the rows that the README shows: prompts and batches beside vLLM and OpenVINO, then one sequence beside ik_llama.cpp.
README = [
    ["--rivals", "vllm", "--columns", "int8 fast,int8", "--only", "prefill", "--depth", "512"],
    ["--rivals", "vllm,openvino", "--columns", "int8 fast,int8,q8_0 fast", "--only", "prefill at,cold,8 ", "--depth", "4096"],
    *(["--rivals", "ik", "--weights", weights, "--columns", weights, "--only", "decode", "--depth", "512"] for weights in ("q8_0", "q4_0", "q4_k")),
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--kvist", default=common.ROOT / "target/release/kvist")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--only", default="", help="rows whose name contains one of these, with commas")
parser.add_argument("--rivals", default="", help="rivals whose name contains one of these, with commas")
parser.add_argument("--weights", default="q8_0", choices=["q8_0", "q4_0", "q4_k", "q6_k", "bf16"], help="what kvist's and the rivals' files have")
parser.add_argument("--columns", help="kvist's columns; without it: `q8_0,q8_0 fast,int8,int8 fast`, with other --weights `WEIGHTS,WEIGHTS fast`")
parser.add_argument("--depth", type=int, default=4096, help="tokens before those that are measured")
parser.add_argument("--timeout", type=float, default=600, help="seconds that an engine has for a row, or to start")
parser.add_argument("--ik", type=lambda path: pathlib.Path(path).resolve(), default=IK, help="folder of ik_llama.cpp's programs")
parser.add_argument("--vllm-compiled", action="store_true", help="vLLM with torch.compile, too: it starts minutes later")
parser.add_argument("--readme", action="store_true", help="measure the rows that the README shows, by several runs of this script")
parser.add_argument("--json", type=pathlib.Path, help="every single figure into this file")
args = parser.parse_args()
if args.readme and args.json:
    parser.error("--readme is several runs, and --json keeps one")
COLUMNS = [args.weights, f"{args.weights} fast"] + (["int8", "int8 fast"] if args.weights == "q8_0" else [])


class Engine(common.Group):
    """A rival in a process of its own, which measures rows as rows.py says."""

    def __init__(self, name, command):
        env = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
        super().__init__(name, command, ENGINES / f"{name}.log", env, HERE, talks=True)
        try:
            self.until("ready", "it was ready")
        except BaseException:
            self.close()
            raise
        self.signal(signal.SIGSTOP)

    def until(self, key, what):
        deadline = time.monotonic() + args.timeout
        while True:
            try:
                found = json.loads(self.line(deadline, what))
            except ValueError:
                continue  # engines print other things, too
            if isinstance(found, dict) and key in found:
                return found[key]

    def measure(self, row):
        with self.awake():
            try:
                self.process.stdin.write(row + "\n")
                self.process.stdin.flush()
            except OSError as error:
                raise Failed(f"{self.name} has ended: {error}; {common.end_of(self.log)}") from error
            return self.until("tokens_per_s", f"`{row}` was measured")


class Kvist:
    """`kvist bench` for single sequences, `kvist serve` for the others."""

    def __init__(self, model, kv, fast):
        self.model, self.kv, self.fast = model, kv, ["--fast-prefill"] if fast else []

    def measure(self, row):
        if row.startswith(("prefill", "decode")):
            what, _, depth = row.partition(" at ")
            tokens = ["--tokens", 512] if what == "prefill" else ["--tokens", 32]
            text = run([args.kvist, "bench", what, "-m", self.model, "--depth", depth or 0, "--k", self.kv, "--v", self.kv, *tokens,
                        "--threads", args.threads, "--runs", 2 if depth else 5, "--json", *self.fast])
            found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            return next(entry["tokens_per_s"] for entry in found if "tokens_per_s" in entry)
        flags = ["--threads", args.threads, "--name", "kvist", "--kv", self.kv, "--context", "40000", "--max-batch", "16",
                 "--max-batch-tokens", "512", *self.fast]
        with common.Kvist(args.kvist, *flags, model=self.model, timeout=args.timeout) as server:
            rows.warm_up(lambda prompts, n: self.ask(server, prompts, n))
            return rows.measure(lambda prompts, n: self.ask(server, prompts, n), row)

    def ask(self, server, prompts, n):
        first, last, began = [None] * len(prompts), [0.0] * len(prompts), time.monotonic()
        errors = []

        def one(i):
            body = {"model": "kvist", "prompt": prompts[i], "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True}
            try:
                connection = server.connect(args.timeout)
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    raise OSError(f"{response.status} {response.read(500).decode(errors='replace')}")
                for line in response:
                    if line.startswith(b"data: {") and b'"choices":[{' in line:
                        last[i] = time.monotonic() - began
                        first[i] = first[i] or last[i]
            except (OSError, http.client.HTTPException) as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=[i]) for i in range(len(prompts))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if errors or None in first:
            raise Failed(f"kvist serve: {errors[0] if errors else 'an answer without text'}; {common.end_of(server.log)}")
        return first, last


class Ik:
    """ik_llama.cpp, which repacks weights at run time."""

    def __init__(self, model, kv):
        self.model, self.kv = model, kv

    def measure(self, row):
        options = ["-m", self.model, "-b", 512, "-ub", 512, "-t", args.threads, "-fa", "on", "-rtr"]
        # llama-batched-bench warms up by itself.
        if row == "8 sequences":
            text = run([args.ik / "llama-batched-bench", *options, "-c", 2048, "-npp", 16, "-ntg", 32, "-npl", 8], cwd=ENGINES)
            lines = [line for line in text.splitlines() if re.match(r"\|\s+16 \|\s+32 \|\s+8 \|", line)]
            if not lines:
                raise Failed("llama-batched-bench printed no row of 8 sequences")
            return float(lines[-1].split("|")[8])
        if not row.startswith(("prefill", "decode")):
            raise Failed("not measured")
        depth = int((row.partition(" at ")[2]) or 0)
        # It computes a batch of 512 tokens before it measures. Its other warm-up, a single token, would take a cell that this batch needs.
        options += ["--warmup-batch", "--no-warmup"]
        text = run([args.ik / "llama-sweep-bench", *options, "-c", depth + 512, "-n", 32, "-ctk", self.kv, "-ctv", self.kv, "--output-format", "jsonl"],
                   cwd=ENGINES)  # which writes a log where it runs
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        entry = next((entry for entry in found if entry.get("n_kv") == depth), None)
        if entry is None:
            raise Failed(f"llama-sweep-bench printed no row at {depth}: --depth must be a multiple of 512")
        return entry["speed_pp" if row.startswith("prefill") else "speed_tg"]


class Llama:
    """llama.cpp, as bench/rivals/install.sh builds it, with flash attention."""

    def __init__(self, programs, model, kv):
        self.programs, self.model, self.kv = programs, model, kv

    def measure(self, row):
        depth = int((row.partition(" at ")[2]) or 0)
        tokens = ["-p", 512, "-n", 0] if row.startswith("prefill") else ["-p", 0, "-n", 32]
        options = ["-m", self.model, *tokens, "-d", depth, "-t", args.threads, "-fa", 1, "-ctk", self.kv, "-ctv", self.kv, "-r", 2]
        return max(self.speed([program, *options, "-o", "jsonl"]) for program in self.programs)

    def speed(self, command):
        found = [json.loads(line) for line in run(command).splitlines() if line.startswith("{")]
        if not found:
            raise Failed(f"{command[0]} printed no figure")
        return found[-1]["avg_ts"]


def model(dtype, form=None):
    return common.model(dtype, args.kvist, form)


def ctranslate2():
    folder = MODELS / "b-ctranslate2"
    if not folder.exists():
        converter = python("ctranslate2").with_name("ct2-transformers-converter")
        run([converter, "--model", model("bf16"), "--quantization", "int8", "--output_dir", folder])
    return Engine("ctranslate2", [python("ctranslate2"), HERE / "on_ctranslate2.py", folder, args.threads])


def rivals():
    """(name, bits of K and V, what it measures, how it is made) of each that is there."""
    every, weights = rows.names(args.depth), args.weights
    if python("vllm") and weights in ("q8_0", "bf16"):
        own = "int8" if weights == "q8_0" else weights
        command = [python("vllm"), HERE / "on_vllm.py", model(own), args.depth]
        yield f"vLLM {own}", 16, every, lambda: Engine("vllm", command)
        if args.vllm_compiled:
            yield f"vLLM {own}, compiled", 16, every, lambda: Engine("vllm-compiled", [*command, "compiled"])
    if python("openvino") and weights != "bf16":
        yield f"OpenVINO {weights}", 8, every, lambda: Engine("openvino", [python("openvino"), HERE / "on_openvino.py", model(weights), args.threads])
    if python("ctranslate2") and weights == "q8_0":
        few = [row for row in every if not row.startswith(("prefill at", "8 on a trunk"))]
        yield "CTranslate2 int8", 16, few, ctranslate2
    if (args.ik / "llama-sweep-bench").exists():
        few = [row for row in every if row.startswith(("prefill", "decode", "8 seq"))]
        yield f"ik_llama.cpp {weights}", 16, few, lambda: Ik(model(weights, "gguf"), "f16")
        yield f"ik_llama.cpp {weights}, 8-bit KV", 8, [row for row in few if " at " in row], lambda: Ik(model(weights, "gguf"), "q8_0")
    if programs := [path / "build/bin/llama-bench" for path in common.llama_builds()]:
        few = [row for row in every if row.startswith(("prefill", "decode"))]
        yield f"llama.cpp {weights}", 16, few, lambda: Llama(programs, model(weights, "gguf"), "f16")
        yield f"llama.cpp {weights}, 8-bit KV", 8, [row for row in few if " at " in row], lambda: Llama(programs, model(weights, "gguf"), "q8_0")


def readme():
    """Runs this script once for each part of the README, with the same program, threads and rounds. A part that fails does not end the others."""
    rest = ["--kvist", args.kvist, "--rounds", args.rounds, "--threads", args.threads, "--timeout", args.timeout, "--ik", args.ik]
    failed = 0
    for options in README:
        print("\ncompare.py " + " ".join(f'"{part}"' if " " in part else part for part in options) + "\n", flush=True)
        child = subprocess.Popen([sys.executable, __file__, *options, *common.strings(rest)])
        try:
            failed |= child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    return failed


def main():
    if args.readme:
        return readme()
    every = rows.names(args.depth)
    wanted = [row for row in every if any(part in row for part in args.only.split(","))]
    columns = args.columns.split(",") if args.columns else COLUMNS
    if set(columns) - set(COLUMNS):
        parser.error(f"--columns {args.columns}: these are {', '.join(COLUMNS)}, with commas")
    if not wanted:
        sys.exit(f"compare.py: no row has `{args.only}` in its name; there are: {', '.join(every)}")
    there, asked = list(rivals()), args.rivals.lower().split(",")
    for part in asked:
        if not any(part in rival[0].lower() for rival in there):
            names = ", ".join(rival[0] for rival in there) or "none"
            sys.exit(f"compare.py: no engine{part and f' for `{part}`'} in {ENGINES}; there are: {names}. bench/rivals/engines/install.sh makes them")
    chosen = [rival for rival in there if any(part in rival[0].lower() for part in asked)]
    named = dict.fromkeys(rival[0].split()[0] for rival in chosen)
    setting = common.setting([name for name in named if name != "ik_llama.cpp" or args.ik == IK], args.kvist)
    if "ik_llama.cpp" in named and args.ik != IK:
        setting += f" ik_llama.cpp in {args.ik}."
    others = common.busy()
    contestants = {}  # (name, bits of K and V) -> (rows, contestant)
    for bits, kv in ((16, "f16"), (8, "q8")):
        if any(entry[1] == bits for entry in chosen):
            for column in columns:
                dtype, _, fast = column.partition(" ")
                own = [row for row in every if not fast or not row.startswith("decode")]
                contestants[f"kvist {column}", bits] = (own, Kvist(model(dtype), kv, bool(fast)))
    values, engines = {}, []
    try:
        for name, bits, measured, make in chosen:
            try:
                contestants[name, bits] = (measured, make())
            except Failed as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            engines.append(contestants[name, bits][1])
        print(f"others take {others:.0%} of the cores", file=sys.stderr)
        for turn in range(args.rounds):
            for row in wanted:
                for key in in_turns([key for key, (measured, _) in contestants.items() if row in measured], turn):
                    try:
                        found = contestants[key][1].measure(row)
                    except Failed as error:
                        print(f"{row}: {key[0]}: {error}", file=sys.stderr)
                        continue
                    load = os.getloadavg()[0]
                    values.setdefault(row, {}).setdefault(key, {})[turn] = (found, load)
                    print(f"{row}: {key[0]}, KV of {key[1]} bits: {found:.1f}, load {load:.1f}", file=sys.stderr, flush=True)
    finally:
        for engine in engines:
            if isinstance(engine, Engine):
                engine.close()
        if args.json:
            plain = {row: {f"{name}, {bits}": list(found.values()) for (name, bits), found in columns.items()} for row, columns in values.items()}
            settings = {key: str(value) for key, value in vars(args).items()}
            args.json.write_text(json.dumps({"setting": setting, "settings": settings, "rows": plain}, indent=1) + "\n")
    print(setting)
    table(values, columns)
    return 0


def in_turns(keys, turn):
    """The contestants of a row, those with the same bits of K and V one after the other; another one is first in every turn."""
    for bits in (16, 8):
        same = [key for key in keys if key[1] == bits]
        for i in range(len(same)):
            yield same[(turn + i) % len(same)]


def median(found):
    return statistics.median(value for value, _ in found.values())


def ratio(own, rival):
    """The median of the rounds' own ratios, and how far they lie apart."""
    ratios = sorted(own[turn][0] / rival[turn][0] for turn in own.keys() & rival.keys())
    if not ratios:
        return ""
    edge = 1 if len(ratios) > 3 else 0
    spread = f" ({ratios[edge]:.2f}, {ratios[-1 - edge]:.2f})" if len(ratios) > 1 else ""
    pairs = f", {len(ratios)} of {args.rounds} rounds" if len(ratios) < args.rounds else ""
    return f"{statistics.median(ratios):.2f}{spread}{pairs}"


def table(values, columns):
    print(f"tokens/s, medians of {args.rounds} rounds in turns, {args.threads} threads; x: how many times as fast kvist is as the fastest rival, the median of the rounds' own ratios\n")
    print("| row | KV | " + "".join(f"kvist {column} | x | " for column in columns) + "rivals | load |")
    print("|---|--:|" + "--:|--:|" * len(columns) + "---|--:|")
    for row, every in values.items():
        for bits in (16, 8):
            found = {name: found for (name, of), found in every.items() if of == bits}
            rivals = {name: found for name, found in found.items() if not name.startswith("kvist")}
            if not rivals:
                continue
            best = max(rivals.values(), key=median)
            cells = []
            for own in (f"kvist {column}" for column in columns):
                cells += [f"{median(found[own]):.1f}", ratio(found[own], best)] if own in found else ["", ""]
            load = max(load for rounds in found.values() for _, load in rounds.values())
            named = ", ".join(f"{name} {median(rounds):.1f}" for name, rounds in rivals.items())
            print(f"| {row} | {bits} | {' | '.join(cells)} | {named} | {load:.1f} |")


common.script(main)
