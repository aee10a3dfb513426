#!/usr/bin/env bash
# What needs a real GPU: the tests on it, decode attention beside the copy bandwidth, branches of one trunk, linear layers, decoding
# and prompts with random models over every backend of the GPU, llama.cpp and torch beside them, transfers beside the link. Writes a
# table and what it says about the goals.
#
#   bench/gpu/run.sh                         builds everything, on the first NVIDIA GPU, over CUDA and over wgpu
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
    SIZES=${SIZES:-134m} DEPTHS=${DEPTHS:-0,32} TOKENS=${TOKENS:-2048} PROMPTS=${PROMPTS-32} runs=1 new_tokens=8 copy_bytes=1048576
else
    SIZES=${SIZES:-1.1b 8b} DEPTHS=${DEPTHS:-0,8192} TOKENS=${TOKENS:-32768} PROMPTS=${PROMPTS-512,2048} runs=5 new_tokens=128 copy_bytes=1073741824
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
    trap 'nvidia-smi --id="$gpu" --reset-gpu-clocks >/dev/null' EXIT
fi
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
        printf "- %s: %.2f, goal %s %s: %s\n", text, value, how, bound, met ? "met" : "missed" }' >>"$goals"
}
goals=$(mktemp)

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
            "$linear" "${args[@]}" --copy-bytes $copy_bytes ${SMOKE:+--bytes 1048576} 2>"$goals.error" | tee -a "$out" || {
                failed=1
                echo "| $name | $dtype | ${inputs}x$outputs | | $(tail -n 1 "$goals.error") | | | | |" | tee -a "$out"
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
# Rows of `kvist bench WHAT`, over every backend and storage of K and V; the field of the JSON that goes before tokens/s.
bench() { # what, field, size, dtype, file, arguments…
    local what=$1 counted=$2 size=$3 dtype=$4 file=$5 backend kv rows row
    shift 5
    for backend in $BACKENDS; do
        for kv in $KV; do
            args=(--quiet --json --model "$file" --backend "$backend" --k "$kv" --v "$kv" --runs $runs "$@")
            if rows=$("$kvist" bench "$what" "${args[@]}" 2>"$goals.error"); then
                while read -r row; do
                    printf '| %s | %s | %s | %s | %s | %.1f |\n' "$size" "$dtype" "$backend" "$kv" "$(field "$counted" <<<"$row")" \
                        "$(field tokens_per_s <<<"$row")" | tee -a "$out"
                done <<<"$rows"
            else
                failed=1
                echo "| $size | $dtype | $backend | $kv | | failed: $(tail -n 1 "$goals.error") |" | tee -a "$out"
            fi
        done
    done
}
say "== decoding"
{
    echo
    echo "Decoding with random models: \`kvist bench decode\`, $new_tokens tokens, the median of $runs runs."
    echo
    echo "| model | weights | backend | K and V | tokens before | tokens/s |"
    echo "|---|---|---|---|--:|--:|"
} >>"$out"
measured=() files=()
for size in $SIZES; do
    for dtype in $WEIGHTS; do
        file=$models/$size-$dtype.gguf
        if [[ ! -f $file && -z $random_model ]]; then
            echo "| $size | $dtype | | | | not measured: there is no $file, and no RANDOM_MODEL to make it |" | tee -a "$out"
            continue
        fi
        [[ -f $file ]] || make_model "$size" "$dtype" "$file"
        bench decode depth "$size" "$dtype" "$file" --depth "$DEPTHS" --tokens $new_tokens
        measured+=("$size $dtype") files+=("$file")
    done
done
if [[ -n $PROMPTS && ${#files[@]} -gt 0 ]]; then
    say "== prompts"
    {
        echo
        echo "Prompts with the same models: \`kvist bench prefill\` in steps of $CHUNK tokens, the median of $runs runs."
        echo
        echo "| model | weights | backend | K and V | tokens of the prompt | tokens/s |"
        echo "|---|---|---|---|--:|--:|"
    } >>"$out"
    for i in "${!files[@]}"; do
        read -r size dtype <<<"${measured[i]}"
        bench prefill tokens "$size" "$dtype" "${files[i]}" --tokens "$PROMPTS" --chunk "$CHUNK"
    done
fi
if [[ -n ${LLAMA_BENCH:-} && ${#files[@]} -gt 0 ]]; then
    say "== llama.cpp"
    { echo; echo "llama.cpp on the same files, all layers on the GPU:"; echo; } >>"$out"
    for file in "${files[@]}"; do
        "$LLAMA_BENCH" -m "$file" -ngl 99 -p "${PROMPTS:-0}" -n $new_tokens -d "$DEPTHS" -r $runs -o md | tee -a "$out" || failed=1
    done
elif [[ -z ${LLAMA_BENCH:-} ]]; then
    { echo; echo "llama.cpp was not measured: give LLAMA_BENCH."; } >>"$out"
fi
if [[ -z ${TORCH:-} ]]; then
    { echo; echo "torch was not measured: give TORCH."; } >>"$out"
elif [[ $BACKENDS != *cuda* && -z ${SMOKE:-} ]]; then
    { echo; echo "torch was not measured: that is of CUDA."; } >>"$out"
else
    say "== torch"
    torch=(--sizes "$SIZES" --depth "$DEPTHS" --prompts "$PROMPTS" --tokens $new_tokens --runs $runs)
    torch+=(--attention --attention-tokens "$TOKENS" --copy-bytes $copy_bytes)
    if [[ $BACKENDS == *cuda* ]]; then torch+=(--device "cuda:$gpu"); else torch+=(--device cpu); fi
    { echo; echo "torch on models of the same sizes, and attention of one decode step alone: \`bench/gpu/torch_steps.py\`."; } >>"$out"
    "$TORCH" bench/gpu/torch_steps.py "${torch[@]}" 2>"$goals.error" | tee -a "$out" ||
        { failed=1; { echo; echo "torch failed: $(tail -n 1 "$goals.error")"; } | tee -a "$out"; }
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
    if rows=$("$kvist" bench transfer --quiet --json --backend "$backend" --tokens 1,8,64,512 ${SMOKE:+--layers 2} 2>"$goals.error"); then
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
        echo "| $backend | | | failed: $(tail -n 1 "$goals.error") | | |" | tee -a "$out"
    fi
done

{ echo; echo "Goals:"; echo; cat "$goals"; } | tee -a "$out"
rm -f "$goals" "$goals.error"
say "wrote $out"
exit $failed
