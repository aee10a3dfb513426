#!/usr/bin/env bash
# What a disk is worth: the same load, whose working set is five times the cache, without and with a disk, served and simulated.
# Six to twelve minutes a rate on two cores, which nothing else should use. Steps are measured anew before each rate.
#     bench/tiers/goodput.sh MODEL.gguf [FOLDER-ON-THE-DISK]     MODEL: embedded is the one that is built in
#     QUICK=1 BUSY="0.3 0.6" bench/tiers/goodput.sh embedded     tries the script itself, in a minute a rate; its figures mean nothing
# The load is chats, or with TRACE=conversation_trace.jsonl conversations of Mooncake's trace that have three turns or more
# (conversations.py; https://github.com/kvcache-ai/Mooncake), one token for 64 of its own. DISK=192MiB is a disk that the chats of
# a model like SmolLM2 135M fill (23 KiB a token), so that it is overwritten: every rate begins with a line that says so. BUSY has the shares of the time that the machine is to be busy with the disk, one for each rate: BUSY="0.3 0.5 0.75".
# A configuration is worth the best goodput that it reaches at any of them, with first tokens within the bound; the last lines compare those
# of both. KVIST names another program than the one that cargo builds; it needs `--features tiers`.
set -euo pipefail
cd "$(dirname "$0")/../.."
model=(--model "${1:?give a model: bench/tiers/goodput.sh MODEL.gguf}")
[[ $1 != embedded ]] || model=()
folder=$(mktemp -d "${2:-/tmp}/kvist-goodput.XXXXXX")
trap 'rm -rf "$folder"' EXIT
source bench/kvist.sh
find_kvist tiers
seconds=${QUICK:+10} requests=${QUICK:+20}
calibrate=(--max-batch 8 --max-batch-tokens 256 --context 1536 --seconds "${seconds:-120}")
rates=${BUSY:-0.75}
load=(--requests "${requests:-90}" --seed 2 --chats 4s --context 3072 --slo-ttft 3s --tier-disk-size "${DISK:-1GiB}")
if [[ -n ${TRACE:-} ]]; then
    # An id of the trace stands for 512 tokens, of which 8 are left: a block. The working set are 1,614 ids, the cache has 323.
    python3 bench/tiers/conversations.py "$TRACE" --turns 3 --conversations 390 --output "$folder/conversations.jsonl"
    calibrate=(--max-batch 8 --max-batch-tokens 256 --context 2584 --block-tokens 8 --seconds "${seconds:-135}")
    rates=${BUSY:-0.6}
    load=(${requests:+--requests "$requests"} --load "$folder/conversations.jsonl" --scale-tokens 1/64 --context 2584 --slo-ttft 2s --tier-disk-size 6GiB)
fi
token_bytes=$("$KVIST" plan "${model[@]}" --kv f16 --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["kv_bytes_per_token"])')
for busy in $rates; do
    "$KVIST" bench calibrate "${model[@]}" "${calibrate[@]}" -o "$folder/costs.json"
    rm -rf "$folder/blocks"
    "$KVIST" bench predict "${model[@]}" --costs "$folder/costs.json" "${load[@]}" --busy "$busy" --tier-disk "$folder/blocks" --json \
        > "$folder/$busy.json"
    python3 - "$folder/$busy.json" "$token_bytes" <<'PYTHON'
import json, sys
with open(sys.argv[1]) as file:
    run = json.load(file)
takes, disk = run["distinct_tokens"] * int(sys.argv[2]) / 2**20, run["disk"]["capacity_bytes"] / 2**20
print(f"{run['load']}: different blocks take {takes:.0f} MiB, the disk has {disk:.0f} and is {'' if takes > disk else 'not '}overwritten")
for name, figures in (("without the disk", run["without_tier"]), ("with the disk", run["figures"])):
    for figure in figures:
        print(f"  {name:17} {figure['figure']:24} served {figure['served']:10.3f}  simulated {figure['simulated']:10.3f} {figure['unit']}")
PYTHON
done
python3 - "$folder"/[0-9]*.json <<'PYTHON'
import json, sys

def goodput(figures):
    figure = next(figure for figure in figures if figure["figure"] == "goodput")
    return figure["served"], figure["simulated"]

runs = []
for name in sys.argv[1:]:
    with open(name) as file:
        runs.append(json.load(file))
bound = runs[0]["slo_ttft_s"]
without = [max(values) for values in zip(*(goodput(run["without_tier"]) for run in runs))]
with_disk = [max(values) for values in zip(*(goodput(run["figures"]) for run in runs))]
print(f"best goodput of {len(runs)} rates, first token within {bound:g} s:")
for at, of in enumerate(("served", "simulated")):
    ratio = f"{with_disk[at] / without[at]:.2f}" if without[at] > 0 else "without bound"
    print(f"  {of:9} {without[at]:.3f}/s without the disk, {with_disk[at]:.3f}/s with it: ratio {ratio}")
PYTHON
