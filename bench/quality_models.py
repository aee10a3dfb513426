#!/usr/bin/env python3
"""What quantised caches cost models that people have: a table for each model and context, on stdout.

    bench/quality_models.py TEXT MODEL.gguf... [--contexts 512,1024,4096] [--pairs "f16 f16,t4-o t4"]

TEXT is prose that the models have no reason to know by heart. docs/quality.md has the tables.
"""
import argparse
import json
import os
import pathlib
import subprocess

PAIRS = "f16 f16,q8 q8,q8-rot q8-rot,q8-rot q4-rot,q8-rot t4,q4 q4,q4-rot q4-rot,q4-64-rot q4-64-rot,t4-o t4,t4 t4"
HEAD = """
| K | V | bits per value | KL mean | KL p99 | top-1 agreement |
|---|---|--:|--:|--:|--:|"""
ROOT = pathlib.Path(__file__).parent.parent
KVIST = os.environ.get("KVIST", ROOT / "target/release/kvist")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text")
parser.add_argument("models", nargs="+")
parser.add_argument("--contexts", default="512,1024,4096")
parser.add_argument("--pairs", default=PAIRS)
args = parser.parse_args()

for model in args.models:
    for context in map(int, args.contexts.split(",")):
        tokens = max(context, 2048)
        print(f"\n{pathlib.Path(model).name}, context {context}, {tokens} tokens:\n{HEAD}", flush=True)
        f16 = None
        for k, v in (pair.split() for pair in args.pairs.split(",")):
            command = [KVIST, "eval", "--model", model, "--weights", "f32", "--text", args.text, "--kv", k, "--kv-v", v]
            command += ["--context", str(context), "--limit", str(tokens), "--reference", "f32", "--json", "-q"]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            f16 = f16 or found["kv_bytes_per_token"]
            bits = 16 * found["kv_bytes_per_token"] / f16
            print(f"| {k} | {v} | {bits:.2f} | {found['kl_mean']:.2e} | {found['kl_p99']:.2e} | "
                  f"{100 * found['top1_agreement']:.1f} % |", flush=True)
