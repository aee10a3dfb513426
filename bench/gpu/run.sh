#!/usr/bin/env bash
# What needs a real GPU: the tests on it, decode attention beside the copy bandwidth, branches of one trunk, linear layers, decoding
# and prompts with random models over every backend of the GPU in turns with llama.cpp and torch, transfers beside the link. Writes
# tables, how many times as fast as the rivals kvist is, and what that says about the goals.
#
#   bench/gpu/run.sh (`just gpu-bench`)      builds everything, on the first NVIDIA GPU, over CUDA and over wgpu
#   KVIST=./kvist bench/gpu/run.sh           takes programs that were built elsewhere: needs neither cargo nor the network
#
# Programs, with KVIST: what is not given is left out, and the table says so.
#   KVIST=PATH            kvist, built with --features cuda,wgpu
#   ATTENTION=PATH        cargo build --release -p kvist-cuda --example attention
#   LINEAR=PATH           the same with --example linear
#   RANDOM_MODEL=PATH     the program of tools/random-model; without it models must lie in MODELS
#   TESTS="PATH …"        test programs of `cargo test --no-run`; they run in crates/cuda
#   KVIST_NVRTC=PATH      libnvrtc.so, if the system has none
#   LLAMA_BENCH=PATH      llama.cpp's llama-bench, built for this GPU: decodes the same files, and evaluates prompts
#   TORCH=python3         a Python with torch for CUDA: decodes models of the same sizes in bf16 (bench/gpu/torch_steps.py)
# What to measure:
#   BACKENDS="cuda:0 wgpu:0"   as `kvist devices` lists them; GPU=1 is short for the second GPU over CUDA
#   MODELS=FOLDER         1.1b-q8_0.gguf and 8b-q8_0.gguf are made there (10 GB) unless they exist
#   SIZES="1.1b 8b"       WEIGHTS="q8_0"       KV="f16 q8"       DEPTHS=0,8192       TOKENS=32768
#   ROUNDS=3              of every model: each side is measured once in a round, and another one begins in the next
#   PROMPTS=512,2048      tokens of the prompts; PROMPTS= leaves them out. CHUNK=512: tokens of a step of a prompt
#   LOCK_CLOCKS=0         leaves the GPU's clocks alone; otherwise they are locked while this runs, where that is permitted
#   OUT=FILE.md           SMOKE=1 takes a model of 134M, short contexts and one run: does this script work here?
set -euo pipefail
cd "$(dirname "$0")/../.."
gpu=${GPU:-0}
target=${CARGO_TARGET_DIR:-target}
say() { echo "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }
absolute() { if [[ -n $1 ]]; then realpath "$1"; fi; }

if [[ -n ${SMOKE:-} ]]; then
    SIZES=${SIZES:-134m} DEPTHS=${DEPTHS:-0,32} TOKENS=${TOKENS:-2048} PROMPTS=${PROMPTS-32} ROUNDS=${ROUNDS:-1} runs=1 new_tokens=8 copy_bytes=1048576
else
    SIZES=${SIZES:-1.1b 8b} DEPTHS=${DEPTHS:-0,8192} TOKENS=${TOKENS:-32768} PROMPTS=${PROMPTS-512,2048} ROUNDS=${ROUNDS:-3} runs=3 new_tokens=128 copy_bytes=1073741824
fi
WEIGHTS=${WEIGHTS:-q8_0}
KV=${KV:-f16 q8}
CHUNK=${CHUNK:-512}
models=${MODELS:-$target/gpu-models}

# The NVIDIA GPU, if there is one; another GPU is measured over wgpu alone.
name=
if have nvidia-smi; then name=$(nvidia-smi --id="$gpu" --query-gpu=name --format=csv,noheader 2>/dev/null) || name=; fi
if [[ -z $name && -z ${BACKENDS:-} ]]; then
    say "nvidia-smi finds no GPU $gpu: give BACKENDS, for instance BACKENDS=wgpu:0 (\`kvist devices\` lists them)"
    exit 1
fi

if [[ -n ${KVIST:-} ]]; then
    kvist=$(absolute "$KVIST") attention=$(absolute "${ATTENTION:-}") linear=$(absolute "${LINEAR:-}")
    random_model=$(absolute "${RANDOM_MODEL:-}")
else
    have cargo || { say "cargo is needed to build kvist (install Rust with rustup), or KVIST=PATH of a kvist that was built elsewhere"; exit 1; }
    features=wgpu
    if [[ -n $name ]]; then features=wgpu,cuda; fi
    cargo build --release -p kvist --features $features
    cargo build --release --manifest-path tools/random-model/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}"
    kvist=$target/release/kvist random_model=$target/release/random-model attention= linear=
    if [[ -n $name ]]; then
        cargo build --release -p kvist-cuda --example attention --example linear
        attention=$target/release/examples/attention linear=$target/release/examples/linear
    fi
fi
"$kvist" --version >/dev/null || { say "$kvist does not run here"; exit 1; }
# Over wgpu the adapter of the same name: its first adapter may be another GPU, or none at all but a program on the CPU.
if [[ -z ${BACKENDS:-} ]]; then
    wgpu=$("$kvist" devices 2>/dev/null | grep -F -- "$name" | grep -m 1 -o '^wgpu:[0-9]*') || wgpu=
    [[ -n $wgpu ]] || say "no adapter of wgpu is called $name: it is measured over CUDA only"
    BACKENDS="cuda:$gpu $wgpu"
fi
if [[ $BACKENDS == *cuda* && -z ${KVIST_NVRTC:-} ]] && ! ldconfig -p | grep -q 'libnvrtc\.so'; then
    source bench/gpu/nvrtc.sh # from PyPI: the newest that the driver supports
fi
devices=$("$kvist" devices 2>/dev/null)
if [[ -z $name ]]; then name=$(grep -m 1 "^${BACKENDS%% *}" <<<"$devices" | sed 's/^[^ ]* *//'); fi
[[ -n $name ]] || { say "kvist finds no ${BACKENDS%% *}:"; say "$devices"; exit 1; }
out=${OUT:-bench/gpu/results-$(tr -cs 'A-Za-z0-9' '-' <<<"$name" | sed 's/-$//').md}
say "$name, over $BACKENDS"
failed=0

# Clocks are locked where that is permitted, unless they are to be left alone.
locked=no
if [[ ${LOCK_CLOCKS:-1} != 0 ]] && have nvidia-smi && nvidia-smi --id="$gpu" --lock-gpu-clocks=tdp,tdp >/dev/null 2>&1; then
    locked=yes
fi
work=$(mktemp -d)
trap 'rm -rf "$work"; [[ $locked == no ]] || nvidia-smi --id="$gpu" --reset-gpu-clocks >/dev/null' EXIT
: >"$work/goals"
{
    echo "# $name"
    echo
    if have nvidia-smi; then nvidia-smi --id="$gpu" --query-gpu=driver_version,compute_cap,memory.total,clocks.max.sm --format=csv,noheader || true; fi
    echo "Clocks locked: $locked. $("$kvist" --version), $(git rev-parse --short HEAD 2>/dev/null || echo 'of no commit')."
    if [[ -n ${SMOKE:-} ]]; then echo "A run of SMOKE=1: the figures only show that this script works."; fi
    echo
    echo '```'
    echo "$devices"
    echo '```'
} >"$out"

say "== tests"
# One at a time: some compare what the driver says is allocated before and after.
tests() {
    if [[ -n ${TESTS:-} ]]; then
        local test
        for test in $TESTS; do
            test=$(absolute "$test")
            (cd crates/cuda && KVIST_CUDA=$gpu KVIST_REQUIRE_CUDA=1 "$test" --nocapture --test-threads=1) >&2 || return 1
        done
    elif [[ -z ${KVIST:-} && $BACKENDS == *cuda* ]]; then
        export KVIST_CUDA=$gpu KVIST_REQUIRE_CUDA=1
        cargo test --release -p kvist-cuda --test device --test driver -- operations:: linear:: gemm:: conformance:: sharing:: long:: store:: graphs:: --nocapture --test-threads=1 >&2 || return 1
        cargo test --release -p kvist-engine --features cuda --test cuda -- --skip serving:: --nocapture --test-threads=1 >&2 || return 1
    else
        return 2
    fi
}
status=0
tests || status=$?
case $status in
    0) said="The tests on the GPU passed." ;;
    2) said="No tests were run: give TESTS." ;;
    *) said="**Tests on the GPU failed.**" failed=1 ;;
esac
{ echo; echo "$said"; } | tee -a "$out"

# A field of a JSON document.
field() { sed -n "s/.*\"$1\": *\([0-9.eE+-]*\).*/\1/p"; }
# What a goal asks for, what was measured, and whether that is enough.
goal() { # text, value, at-least or at-most, bound
    awk -v text="$1" -v value="$2" -v how="$3" -v bound="$4" 'BEGIN {
        if (value == "") { printf "- %s: not measured\n", text; exit }
        met = how == "at-least" ? value + 0 >= bound + 0 : value + 0 <= bound + 0
        printf "- %s: %.2f, goal %s %s: %s\n", text, value, how, bound, met ? "met" : "missed" }' >>"$work/goals"
}

say "== attention"
if [[ $BACKENDS != *cuda* ]]; then
    { echo; echo "Decode attention by the GPU's clock was not measured: that is of CUDA."; } >>"$out"
elif [[ -z $attention ]]; then
    { echo; echo "Decode attention by the GPU's clock was not measured: give ATTENTION."; } >>"$out"
else
    {
        echo
        echo "Attention of one decode step: one layer of a Llama 3 8B, by the GPU's clock."
        echo
        echo "| GPU | tokens | K | V | branches | attention | K and V read | copy (read and written) | share |"
        echo "|---|--:|---|---|--:|--:|--:|--:|--:|"
    } >>"$out"
    for storage in f16 q8 bf16 f32 q4; do
        alone=
        for branches in 1 8; do
            args=(--gpu "$gpu" --tokens "$TOKENS" --k $storage --v $storage --branches $branches --copy-bytes $copy_bytes)
            if row=$("$attention" "${args[@]}" 2>&1); then
                microseconds=$(awk -F'|' '{ print $7 + 0 }' <<<"$row") share=$(awk -F'|' '{ print $10 + 0 }' <<<"$row")
                if [[ $branches == 1 ]]; then
                    alone=$microseconds
                    if [[ $storage == f16 || $storage == q8 ]]; then
                        goal "attention over $storage, % of the copy bandwidth" "$share" at-least 85
                    fi
                elif [[ -n $alone ]]; then
                    goal "$branches branches beside one, over $storage" \
                        "$(awk -v a="$microseconds" -v b="$alone" 'BEGIN { if (b > 0) print a / b }')" at-most 1.3
                fi
            else
                failed=1 row="| $name | $TOKENS | $storage | $storage | $branches | $(tail -n 1 <<<"$row") | | | |"
            fi
            tee -a "$out" <<<"$row"
        done
    done
fi

say "== linear layers"
if [[ $BACKENDS == *cuda* && -z $linear ]]; then
    { echo; echo "Linear layers by the GPU's clock were not measured: give LINEAR."; } >>"$out"
elif [[ $BACKENDS == *cuda* ]]; then
    {
        echo
        echo "Linear layers, of the sizes of a Llama 3 8B, by the GPU's clock."
        echo
        echo "| GPU | weights | inputs x outputs | tokens | a layer | weights read | copy (read and written) | share | operations |"
        echo "|---|---|---|--:|--:|--:|--:|--:|--:|"
    } >>"$out"
    for dtype in $WEIGHTS; do
        for layer in "4096 4096" "4096 14336" "14336 4096"; do
            read -r inputs outputs <<<"$layer"
            args=(--gpu "$gpu" --encoding "$dtype" --inputs "$inputs" --outputs "$outputs" --tokens 1,8,64,512,2048)
            "$linear" "${args[@]}" --copy-bytes $copy_bytes ${SMOKE:+--bytes 1048576} 2>"$work/error" | tee -a "$out" || {
                failed=1
                echo "| $name | $dtype | ${inputs}x$outputs | | $(tail -n 1 "$work/error") | | | | |" | tee -a "$out"
            }
        done
    done
fi

mkdir -p "$models"
make_model() { # size, dtype, file
    local sizes
    case $1 in
        134m) sizes=(--preset a) ;;
        1.1b) sizes=(--preset b) ;;
        8b) sizes=(--preset b --hidden 4096 --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --ff 14336) ;;
        *) say "SIZES are 134m, 1.1b and 8b, not $1"; return 1 ;;
    esac
    # Under another name until it is whole.
    "$random_model" "${sizes[@]}" --dtype "$2" "$3.part.gguf" >&2 && mv "$3.part.gguf" "$3"
}
# A figure of a round: tokens per second of a side, in a file of lines that the table is made of.
note() { # decode or prompt, tokens before it or of it, side, tokens/s
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$round" "$size" "$dtype" "$1" "$2" "$3" "$4" >>"$work/figures"
    say "round $round: $size $dtype, $3, $1 $2: $4 tokens/s"
}
fault() { # side
    failed=1
    echo "- round $round: $size $dtype, $1 failed: $(tail -n 1 "$work/error")" | tee -a "$work/faults" >&2
}
measure_kvist() { # backend, storage of K and V
    local rows row
    local args=(--quiet --json --model "$file" --backend "$1" --k "$2" --v "$2" --runs $runs)
    if rows=$("$kvist" bench decode "${args[@]}" --depth "$DEPTHS" --tokens $new_tokens 2>"$work/error"); then
        while read -r row; do note decode "$(field depth <<<"$row")" "kvist $1 $2" "$(field tokens_per_s <<<"$row")"; done <<<"$rows"
    else
        fault "kvist $1 $2"
    fi
    [[ -n $PROMPTS ]] || return 0
    if rows=$("$kvist" bench prefill "${args[@]}" --tokens "$PROMPTS" --chunk "$CHUNK" 2>"$work/error"); then
        while read -r row; do note prompt "$(field tokens <<<"$row")" "kvist $1 $2" "$(field tokens_per_s <<<"$row")"; done <<<"$rows"
    else
        fault "kvist $1 $2"
    fi
}
# With flash attention and without: the table takes the better figure of each round.
measure_llama() {
    local rows row
    local args=(-m "$file" -ngl 99 -fa 0,1 -r $runs -o jsonl)
    if rows=$("$LLAMA_BENCH" "${args[@]}" -p 0 -n $new_tokens -d "$DEPTHS" 2>"$work/error"); then
        while read -r row; do note decode "$(field n_depth <<<"$row")" llama.cpp "$(field avg_ts <<<"$row")"; done <<<"$rows"
    else
        fault llama.cpp
    fi
    [[ -n $PROMPTS ]] || return 0
    if rows=$("$LLAMA_BENCH" "${args[@]}" -p "$PROMPTS" -n 0 2>"$work/error"); then
        while read -r row; do note prompt "$(field n_prompt <<<"$row")" llama.cpp "$(field avg_ts <<<"$row")"; done <<<"$rows"
    else
        fault llama.cpp
    fi
}
measure_torch() {
    local what rows tokens rate
    for what in decode ${PROMPTS:+prompt}; do
        local args=("${torch[@]}" --sizes "$size" --tokens $new_tokens --runs $runs --depth "$DEPTHS" --prompts "")
        if [[ $what == prompt ]]; then args+=(--depth "" --prompts "$PROMPTS"); fi
        if rows=$("${args[@]}" 2>"$work/error"); then
            while read -r tokens rate; do note $what "$tokens" torch "$rate"; done < <(awk -F'|' '$2 !~ /model/ && $7 + 0 > 0 { print $6 + 0, $7 + 0 }' <<<"$rows")
        else
            grep -o 'failed: .*' <<<"$rows" >>"$work/error" || true
            fault torch
        fi
    done
}

sides=()
for backend in $BACKENDS; do
    for kv in $KV; do sides+=("measure_kvist $backend $kv"); done
done
if [[ -n ${LLAMA_BENCH:-} ]]; then sides+=(measure_llama); fi
torch=()
if [[ -n ${TORCH:-} && ($BACKENDS == *cuda* || -n ${SMOKE:-}) ]]; then
    torch=("$TORCH" bench/gpu/torch_steps.py)
    if [[ $BACKENDS == *cuda* ]]; then torch+=(--device "cuda:$gpu"); else torch+=(--device cpu); fi
    sides+=(measure_torch)
fi
say "== decoding and prompts, in turns: ${#sides[@]} sides, $ROUNDS rounds"
: >"$work/figures"
: >"$work/faults"
for size in $SIZES; do
    for dtype in $WEIGHTS; do
        file=$models/$size-$dtype.gguf
        if [[ ! -f $file && -z $random_model ]]; then
            echo "- $size $dtype was not measured: there is no $file, and no RANDOM_MODEL to make it" | tee -a "$work/faults" >&2
            continue
        fi
        [[ -f $file ]] || make_model "$size" "$dtype" "$file"
        for ((round = 1; round <= ROUNDS; round++)); do
            for i in "${!sides[@]}"; do
                # Another side begins in every round.
                ${sides[(i + round - 1) % ${#sides[@]}]}
            done
        done
    done
done
{
    echo
    echo "Random models: \`kvist bench decode\`, $new_tokens tokens, and \`kvist bench prefill\` in steps of $CHUNK tokens. Tokens per second, medians"
    echo "of $ROUNDS rounds in which all sides took turns, each the median of $runs runs. llama.cpp reads the same files, all layers on the GPU, with K and V in"
    echo "f16, with flash attention or without, whichever is faster; torch has models of the same sizes in bf16 (\`bench/gpu/torch_steps.py\`). × is the"
    echo "median of the rounds' own ratios: how many times as fast kvist is. Packed K and V have no ×: the rivals' have 16 bits."
    echo
    echo "| model | weights | | tokens | backend | K and V | kvist | llama.cpp | × | torch | × |"
    echo "|---|---|---|--:|---|---|--:|--:|--:|--:|--:|"
    awk -F'\t' -v rounds="$ROUNDS" '
        function median(list,  n, i, j, v, t) {
            n = split(list, v, " ")
            for (i = 2; i <= n; i++)
                for (j = i; j > 1 && v[j - 1] + 0 > v[j] + 0; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
            return n == 0 ? "" : n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
        }
        function shown(format, list) { return list == "" ? "" : sprintf(format, median(list)) }
        function values(of, side,  r, list) {
            for (r = 1; r <= rounds; r++) if ((of, side, r) in best) list = list " " best[of, side, r]
            return list
        }
        function ratios(of, own, side,  r, list) {
            for (r = 1; r <= rounds; r++)
                if ((of, own, r) in best && (of, side, r) in best) list = list " " best[of, own, r] / best[of, side, r]
            return list
        }
        {
            of = $2 " | " $3 " | " $4 " | " $5
            if (!((of, $6, $1) in best) || $7 + 0 > best[of, $6, $1]) best[of, $6, $1] = $7 + 0
            if ($6 ~ /^kvist/ && !((of, $6) in seen)) { seen[of, $6] = 1; n++; key[n] = of; own[n] = $6 }
        }
        END {
            for (i = 1; i <= n; i++) {
                split(own[i], side, " ")
                line = "| " key[i] " | " side[2] " | " side[3] " | " shown("%.1f", values(key[i], own[i]))
                for (j = 1; j <= 2; j++) {
                    rival = j == 1 ? "llama.cpp" : "torch"
                    times = side[3] ~ /^(f16|bf16|f32)$/ ? ratios(key[i], own[i], rival) : ""
                    line = line " | " shown("%.1f", values(key[i], rival)) " | " shown("%.2f", times)
                }
                print line " |"
            }
        }' "$work/figures"
    if [[ -s $work/faults ]]; then echo; cat "$work/faults"; fi
} | tee -a "$out"
[[ -n ${LLAMA_BENCH:-} ]] || { echo; echo "llama.cpp was not measured: give LLAMA_BENCH."; } >>"$out"
if [[ -z ${TORCH:-} ]]; then
    { echo; echo "torch was not measured: give TORCH."; } >>"$out"
elif [[ ${#torch[@]} == 0 ]]; then
    { echo; echo "torch was not measured: that is of CUDA."; } >>"$out"
else
    say "== attention in torch"
    { echo; echo "Attention of one decode step alone in torch: \`bench/gpu/torch_steps.py --attention\`."; echo; } >>"$out"
    if rows=$("${torch[@]}" --sizes "" --attention --attention-tokens "$TOKENS" --copy-bytes $copy_bytes 2>"$work/error"); then
        sed -n '/^| GPU/,$p' <<<"$rows" | tee -a "$out"
    else
        failed=1
        echo "torch failed: $(tail -n 1 "$work/error")" | tee -a "$out"
    fi
fi

say "== transfers"
{
    echo
    echo "K and V from the host to blocks on the GPU, a Llama 3 8B's, without overlap: \`kvist bench transfer\`."
    echo
    echo "| backend | staging | tokens | GB/s | link, GB/s | share |"
    echo "|---|---|--:|--:|--:|--:|"
} >>"$out"
for backend in $BACKENDS; do
    best=0
    if rows=$("$kvist" bench transfer --quiet --json --backend "$backend" --tokens 1,8,64,512 ${SMOKE:+--layers 2} 2>"$work/error"); then
        while read -r row; do
            [[ $row == *'"overlap":false'* ]] || continue
            staging=$(grep -o '"staging": *"[a-z]*"' <<<"$row" | cut -d'"' -f4) share=$(field of_link <<<"$row" | awk '{ print 100 * $1 }')
            printf '| %s | %s | %s | %.2f | %.2f | %.0f %% |\n' "$backend" "$staging" "$(field tokens <<<"$row")" \
                "$(field gb_per_s <<<"$row")" "$(field link_gb_per_s <<<"$row")" "$share" | tee -a "$out"
            best=$(awk -v a="$best" -v b="$share" 'BEGIN { print (a > b) ? a : b }')
        done <<<"$rows"
        goal "transfers over $backend, most, % of the link" "$best" at-least 80
    else
        failed=1
        echo "| $backend | | | failed: $(tail -n 1 "$work/error") | | |" | tee -a "$out"
    fi
done

{ echo; echo "Goals:"; echo; cat "$work/goals"; } | tee -a "$out"
say "wrote $out"
exit $failed
