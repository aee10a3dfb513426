#!/usr/bin/env bash
# What drafters gain, each in turns with plain decoding: the tables of "Speculation" in bench/RESULTS.md.
#
#     bench/speculate.sh                                  the embedded model alone
#     bench/speculate.sh SmolLM2-135M-Instruct.Q4_1.gguf  this model too
#     DENSE=1.1b-q8_0.gguf bench/speculate.sh             the cost of passes over 16 rows; any weights will do
#     RUNS=10 bench/speculate.sh ...                      rounds of each comparison
set -euo pipefail
model=${1:+$(realpath "$1")}
dense=${DENSE:+$(realpath "$DENSE")}
cd "$(dirname "$0")/.."
source bench/kvist.sh
find_kvist
runs=${RUNS:-10}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compare() { "$KVIST" bench speculate -q --runs "$runs" "$@"; }
# Tokens of a file: those of a prompt whose answer is not generated.
tokens() { "$KVIST" run -q --raw --json -n 1 --speculate off --model "$model" -f "$1" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["prompt_tokens"])'; }

echo "== embedded model, continues its held-out text"
compare --text tools/tiny-model/val.txt --modes ngram,suffix,eagle,auto
compare --text tools/tiny-model/val.txt --modes draft

if [ -n "$model" ]; then
    echo "== $(basename "$model"), continues documentation"
    compare --model "$model" --text tools/tiny-model/val.txt --prompts 3 --modes ngram,suffix,auto
    echo "== a drafter that is right with a given probability: chains, then trees of 16"
    compare --model "$model" --text tools/tiny-model/val.txt --prompts 3 --draft-width 1 \
        --modes oracle=0.5,oracle=0.7,oracle=0.9
    compare --model "$model" --text tools/tiny-model/val.txt --prompts 3 --draft-width 2 \
        --modes oracle=0.5,oracle=0.7,oracle=0.9

    echo "== an edit of a file that is in the prompt, followed"
    head -c 3000 crates/scheduler/src/drafts.rs > "$work/file"
    { cat "$work/file"; echo "// Now with Proposal instead of Draft:"; } > "$work/prompt"
    sed 's/Drafts/Proposals/g; s/parents/ancestors/g' "$work/file" > "$work/answer"
    cat "$work/prompt" "$work/answer" > "$work/text"
    follow() {
        local n all
        n=$(tokens "$work/prompt") all=$(tokens "$work/text")
        compare --model "$model" --text "$work/text" --follow --prompts 1 --prompt-tokens "$n" \
            --tokens $((all - n - 2)) --modes ngram,suffix,auto
    }
    follow

    echo "== packages of Cargo.lock as JSON, followed"
    python3 - "$work" <<'PY'
import json, pathlib, sys, tomllib
work = pathlib.Path(sys.argv[1])
lock = pathlib.Path("Cargo.lock").read_text()
blocks = [block for block in lock.split("\n\n") if "dependencies" in block and "checksum" in block][:12]
packages = [tomllib.loads(block)["package"][0] for block in blocks]
wanted = [{key: package[key] for key in ("name", "version", "dependencies")} for package in packages]
prompt = "\n\n".join(blocks) + "\n\nName, version and dependencies of each package as JSON:\n"
(work / "prompt").write_text(prompt)
(work / "text").write_text(prompt + json.dumps(wanted, indent=1) + "\n")
PY
    follow
fi
if [ -n "$dense" ]; then
    echo "== $(basename "$dense"): passes over 16 rows, and a drafter that is right with a given probability"
    for width in 1 2; do
        compare --model "$dense" --text tools/tiny-model/val.txt --prompts 2 --prompt-tokens 32 --tokens 64 \
            --draft-tokens 15 --draft-depth 15 --draft-width $width --modes oracle=0.5,oracle=0.7,oracle=0.9
    done
fi
