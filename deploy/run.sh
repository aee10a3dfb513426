#!/bin/sh
# Runs the image of Containerfile without a container: builds the program with the lines in that file, puts it where the image has it, into a
# root directory with nothing but /kvist and /data, and starts it there as the image's user, as two workers of compose.yaml over two stores.
# KVIST names a static program that is built already. Needs root (for chroot), the target x86_64-unknown-linux-musl, musl-gcc, curl and
# Redis or Valkey. On loopback only.
set -eu
cd "$(dirname "$0")/.."
fail() { echo "image: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "chroot needs root"
chroot=$(command -v chroot) || fail "there is no chroot"
redis=$(command -v redis-server || command -v valkey-server) || fail "there is no redis-server or valkey-server (Debian: redis-server)"

image=target/image
# In the Containerfile: a comment with a line to run.
line() { sed -n "s/^#     \($1 .*\)/\1/p" deploy/Containerfile; }
if [ -n "${KVIST:-}" ]; then
    mkdir -p "$image/data" && cp "$KVIST" "$image/kvist"
else
    unset CARGO_TARGET_DIR
    eval "$(line 'cargo build')"
    eval "$(line 'mkdir')"
fi
ldd "$image/kvist" 2>&1 | grep -qE 'statically linked|not a dynamic executable' || fail "$image/kvist is not static"

work=$(mktemp -d)
running=
trap 'for process in $running; do kill -9 "$process" 2>/dev/null || true; done; rm -rf "$work"' EXIT
# sh runs the line above when it exits, but not when a signal ends it. So the signals make it exit.
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir -p "$work/root/data"
cp "$image/kvist" "$work/root/kvist"
chown 65532:65532 "$work/root/data"
chmod 755 "$work" "$work/root"

# Starts a store on a port that is free, and prints it.
store() {
    for port in $(shuf -i 20000-30000 -n 20); do
        "$redis" --bind 127.0.0.1 --port "$port" --dir "$work" --save "" --appendonly no --maxmemory 256mb "$@" >"$work/store-$port" 2>&1 &
        process=$!
        for _ in $(seq 100); do
            if grep -qs 'Ready to accept' "$work/store-$port"; then running="$running $process"; return; fi
            kill -0 "$process" 2>/dev/null || break
            sleep 0.1
        done
    done
    fail "no store starts"
}
store --maxmemory-policy allkeys-lru; blocks=$port
store --maxmemory-policy noeviction; sessions=$port

# A worker's arguments in compose.yaml, on loopback and on any port. `default_ttl` stays.
arguments=$(sed -n '/^x-worker/,/depends_on/s/^    - \(--[^ ]*\).*/\1/p' deploy/compose/compose.yaml |
    sed "s|=0\.0\.0\.0|=127.0.0.1|; s|tcp://\*:[0-9]*|tcp://127.0.0.1:0|; s|//blocks:6379|//127.0.0.1:$blocks|; s|//sessions:6379|//127.0.0.1:$sessions|")
[ "$(echo "$arguments" | wc -l)" -ge 6 ] || fail "compose.yaml has no worker any more: $arguments"

# Starts a worker in the root directory. Sets `process` and `url`.
worker() {
    # shellcheck disable=SC2086
    env -i HOME=/data XDG_CACHE_HOME=/data "$chroot" --userspec=65532:65532 "$work/root" /kvist serve $arguments --port=0 -q >"$work/$1" 2>&1 &
    process=$!
    running="$running $process"
    until grep -qs '^serving ' "$work/$1"; do
        kill -0 "$process" 2>/dev/null || { cat "$work/$1" >&2; fail "a worker ended"; }
        sleep 0.1
    done
    url=$(sed -n 's/^serving .* on //p' "$work/$1")
}
post() { curl -sSf --retry 20 --retry-all-errors --retry-delay 1 "$1" -H 'content-type: application/json' -d "$2"; }

worker first; first=$process; one=$url
worker second; second=$process; two=$url
grep -q '^Uid:.65532.65532' "/proc/$first/status" || fail "it does not run as the image's user"
prompt=$(seq -s ' ' 200)
post "$one/v1/completions" "{\"prompt\": \"$prompt\", \"max_tokens\": 4}" | grep -q '"finish_reason"' || fail "no answer"
id=$(post "$one/v1/sessions" '{"text": "A vector owns its elements."}' | grep -o 'sess-[0-9a-f]*' | head -1)
post "$one/v1/sessions/$id/generate" '{"max_tokens": 8}' >/dev/null
value() { curl -sSf "$1/metrics" | sed -n "s/^$2{.*} //p" | head -1; }
tries=0
until [ "$(value "$one" kvist_shared_sessions_recorded_total)" -ge 1 ] && [ "$(value "$one" kvist_tier_stored_blocks_total)" -ge 1 ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 1200 ] || fail "the stores get nothing"
    sleep 0.1
done
kill -9 "$first"
post "$two/v1/sessions/$id/generate" '{"max_tokens": 8}' | grep -q '"finish_reason"' || fail "the session is not continued"
[ "$(value "$two" kvist_shared_sessions_adopted_total)" -ge 1 ] || fail "the session was not taken over"
kill "$second"
wait "$second" || fail "a worker does not shut down"
echo "image: the static program runs in an empty root directory, over two stores; another worker continues a session"
