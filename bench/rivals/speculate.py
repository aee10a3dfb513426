#!/usr/bin/env python3
"""Speculation in kvist and in llama.cpp, in turns: the same model, the same prompts, greedy, 2 threads.

    bench/rivals/speculate.py --kvist target/release/kvist --model MODEL.gguf --text FILE [--large MODEL.f32.gguf]

llama.cpp's `speculative-simple` is built from the sources that install.sh unpacked, against its libraries. Its drafters
are those of --spec-type: n-grams of the prompt and the answer (ngram-simple, ngram-map-k, ngram-cache; with lookups of
3 tokens and drafts of 8, since its defaults of 12 and 48 hardly ever draft here) and a draft model (draft-simple). With
--large the model drafts for a larger file of the same model. Every program starts anew for each prompt and reports the
speed of decoding alone; a row is the median over rounds of the tokens of all prompts over their time. The rest of a
program's texts may differ from another's after a few tokens, as rounding does, so tokens per pass are shown beside."""
import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
RIVALS = os.path.join(HERE, "..", "target", "rivals")
# It decodes plainly only by a lookup that never finds anything.
PLAIN = ["--spec-ngram-simple-size-n", "1000"]
NGRAM = {
    "ngram-simple": ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"],
    "ngram-map-k": ["--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8"],
    "ngram-cache": ["--spec-draft-n-max", "8"],
}


def build():
    """Compiles speculative-simple against the first llama.cpp that install.sh built."""
    built = sorted(d for d in os.listdir(RIVALS) if d.startswith("llama-") and os.path.isdir(f"{RIVALS}/{d}/build/bin"))
    if not built:
        raise SystemExit("speculate.py: run bench/rivals/install.sh first")
    libraries, source = os.path.realpath(f"{RIVALS}/{built[0]}/build/bin"), f"{RIVALS}/src/vendor/llama.cpp"
    program = f"{RIVALS}/{built[0]}/speculative-simple"
    if not os.path.exists(program):
        includes = [f"-I{source}/{d}" for d in ("include", "common", "ggml/include", "vendor")]
        libs = ["-lllama-common", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu"]
        main = f"{source}/examples/speculative-simple/speculative-simple.cpp"
        compiler = "clang++" if "clang" in built[0] else "g++"
        subprocess.run([compiler, "-O2", "-std=c++17", *includes, main, "-o", program, f"-L{libraries}", *libs,
                        f"-Wl,-rpath,{libraries}"], check=True)
    return program


def kvist(args, model, prompt, mode, draft=None):
    command = [args.kvist, "run", "--raw", "--no-echo", "--json", "--greedy", "--ignore-eos", "-n", str(args.tokens),
               "--threads", str(args.threads), "-m", model, "-f", prompt, "--speculate", mode]
    if mode == "draft":
        command += ["--draft-model", draft, "--draft-width", "1", "--draft-depth", "6"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def llama(args, program, model, prompt, mode, extra):
    kind, extra = ("ngram-simple", PLAIN) if mode == "none" else (mode, extra)
    command = [program, "-m", model, "-f", prompt, "--spec-type", kind, *extra, "-n", str(args.tokens), "--ignore-eos",
               "-t", str(args.threads), "--temp", "0"]
    log = subprocess.run(command, check=True, capture_output=True, text=True)
    log = log.stdout + log.stderr
    number = lambda pattern: float(re.search(pattern, log).group(1))
    tokens = number(r"decoded\s+(\d+) tokens")
    return tokens, number(r"decoded\s+\d+ tokens in\s+([\d.]+) seconds"), number(r"n_drafted\s*=\s*(\d+)"), number(
        r"n_accept\s*=\s*(\d+)")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kvist", required=True)
    arguments.add_argument("--model", required=True, help="a GGUF file")
    arguments.add_argument("--large", help="a larger GGUF file for which --model drafts")
    arguments.add_argument("--text", required=True, help="prompts are cut from it, evenly spaced")
    arguments.add_argument("--prompts", type=int, default=3)
    arguments.add_argument("--prompt-bytes", type=int, default=1500)
    arguments.add_argument("--tokens", type=int, default=192)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=os.cpu_count())
    args = arguments.parse_args()
    program = build()
    text = open(args.text, encoding="utf-8", errors="ignore").read().replace("\0", "")
    step = max(1, (len(text) - args.prompt_bytes) // args.prompts)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        prompts = []
        for i in range(args.prompts):
            prompts.append(f"{folder}/{i}.txt")
            with open(prompts[-1], "w") as f:
                f.write(text[i * step : i * step + args.prompt_bytes])
        models = [("", args.model, None)] + ([("large ", args.large, args.model)] if args.large else [])
        for _ in range(args.rounds):
            for label, model, draft in models:
                ours = ["off", "draft"] if draft else ["off", "ngram", "suffix", "auto"]
                theirs = {"none": [], "draft-simple": ["-md", draft, "--spec-draft-n-max", "4"]} if draft else {
                    "none": [], **NGRAM}
                for mode in ours:
                    tokens = seconds = passes = 0
                    for prompt in prompts:
                        done = kvist(args, model, prompt, mode, draft)
                        tokens += len(done["tokens"]) - 1
                        seconds += done["decode_seconds"]
                        passes += (done.get("speculation") or {}).get("target_passes", len(done["tokens"]) - 1)
                    rows.setdefault((label, "kvist " + mode), []).append((tokens / seconds, tokens / passes))
                for mode, extra in theirs.items():
                    tokens = seconds = accepted = 0
                    for prompt in prompts:
                        n, s, _, accept = llama(args, program, model, prompt, mode, extra)
                        tokens, seconds, accepted = tokens + n, seconds + s, accepted + accept
                    rows.setdefault((label, "llama.cpp " + mode), []).append(
                        (tokens / seconds, tokens / max(1, tokens - accepted)))
    print("| model | program and drafter | tokens/s | × its plain decoding | tokens per pass |\n|---|---|--:|--:|--:|")
    for (label, name), runs in rows.items():
        plain = rows[(label, "kvist off" if name.startswith("kvist") else "llama.cpp none")]
        ratios = [mine[0] / its[0] for mine, its in zip(runs, plain)]
        print(f"| {label}{os.path.basename(args.large if label else args.model)} | {name} | "
              f"{statistics.median(r[0] for r in runs):.0f} | {statistics.median(ratios):.2f} | "
              f"{statistics.median(r[1] for r in runs):.2f} |", flush=True)


if __name__ == "__main__":
    main()
