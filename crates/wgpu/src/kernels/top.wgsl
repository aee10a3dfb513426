// The most likely tokens of a row of logits: the largest first, equal ones in order of their numbers.
//
//   answers[r] = (how many; 0xffffffff if a logit is NaN), then that many (token, logit)
//
// One token takes one pass over the row. More take two: the k-th largest of the invocations' own maxima is a bound that at least k logits
// reach and few exceed; those are collected and sorted. If too many reach it (many equal ones), k passes find one token after the
// other. Rows that want 0 tokens are skipped.

struct Args {
    vocab: u32,
    wanted: u32, // first word of [rows] numbers of tokens
    stride: u32, // words of an answer
}

@group(0) @binding(0) var<storage, read> logits: array<f32>; // [rows, vocab]
@group(0) @binding(1) var<storage, read> wanted: array<u32>;
@group(0) @binding(2) var<storage, read_write> answers: array<u32>;
var<immediate> args: Args;

const NONE: u32 = 0xffffffffu;

const THREADS: u32 = 256u;

var<workgroup> values: array<f32, THREADS>;
var<workgroup> tokens: array<u32, THREADS>;
var<workgroup> broken: array<u32, THREADS>;

fn better(a: f32, i: u32, b: f32, j: u32) -> bool {
    return i != NONE && (j == NONE || a > b || (a == b && i < j));
}

// A number whose order is that of logits; both zeros have the same. 0 is none.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x + 0.0);
    return bits ^ select(0x80000000u, 0xffffffffu, bits >> 31u == 1u);
}

var<workgroup> keys: array<u32, THREADS>;
var<workgroup> n_found: atomic<u32>;
var<workgroup> is_done: u32; // 1: the answer is there

// Sorts `keys`, the largest first, equal ones by `tokens` (bitonic: Batcher, 1968). All invocations must call it, after a barrier.
fn sort(thread: u32) {
    for (var size = 2u; size <= THREADS; size *= 2u) {
        for (var stride = size / 2u; stride > 0u; stride /= 2u) {
            let other = thread ^ stride;
            if (other > thread) {
                let a = keys[thread];
                let b = keys[other];
                let i = tokens[thread];
                let j = tokens[other];
                let in_order = a > b || (a == b && i < j);
                if (in_order != ((thread & size) == 0u)) {
                    keys[thread] = b;
                    keys[other] = a;
                    tokens[thread] = j;
                    tokens[other] = i;
                }
            }
            workgroupBarrier();
        }
    }
}

// Finds k tokens at once, or sees that there is none, and says in `is_done` whether that succeeded.
fn find_all(thread: u32, k: u32, row: u32, answer: u32) {
    var most = 0u;
    var nan = 0u;
    for (var t = thread; t < args.vocab; t += THREADS) {
        let x = logits[row + t];
        nan |= select(0u, 1u, is_nan(x));
        most = max(most, key_of(x));
    }
    keys[thread] = most;
    tokens[thread] = thread;
    broken[thread] = nan;
    if (thread == 0u) { atomicStore(&n_found, 0u); }
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { broken[thread] |= broken[thread + half]; }
        workgroupBarrier();
    }
    if (thread == 0u) { is_done = min(broken[0], 1u); }
    if (workgroupUniformLoad(&is_done) == 1u) {
        if (thread == 0u) { answers[answer] = NONE; }
        return;
    }
    sort(thread);
    let bound = keys[k - 1u];
    workgroupBarrier();
    keys[thread] = 0u;
    tokens[thread] = NONE;
    workgroupBarrier();
    for (var t = thread; t < args.vocab; t += THREADS) {
        let key = key_of(logits[row + t]);
        if (key >= bound) {
            let at = atomicAdd(&n_found, 1u);
            if (at < THREADS) {
                keys[at] = key;
                tokens[at] = t;
            }
        }
    }
    workgroupBarrier();
    if (thread == 0u) {
        let n = atomicLoad(&n_found);
        is_done = u32(n >= k && n <= THREADS);
    }
    if (workgroupUniformLoad(&is_done) == 0u) { return; }
    sort(thread);
    if (thread < k) {
        answers[answer + 1u + 2u * thread] = tokens[thread];
        answers[answer + 2u + 2u * thread] = bitcast<u32>(logits[row + tokens[thread]]);
    }
    if (thread == 0u) { answers[answer] = k; }
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = thread_of(lanes);
    let width = width_of(lanes);
    let k = wanted[args.wanted + group.x];
    let row = group.x * args.vocab;
    let answer = group.x * args.stride;
    if (k > 1u && k <= THREADS) {
        find_all(lane, k, row, answer);
        if (workgroupUniformLoad(&is_done) == 1u) { return; }
    }
    var last = 0.0;
    var last_token = NONE;
    for (var i = 0u; i < k; i++) {
        var best = 0.0;
        var token = NONE;
        var nan = 0u;
        for (var t = lane; t < args.vocab; t += THREADS) {
            let x = logits[row + t];
            nan |= select(0u, 1u, is_nan(x));
            let left = last_token == NONE || x < last || (x == last && t > last_token);
            if (left && better(x, t, best, token)) {
                best = x;
                token = t;
            }
        }
        for (var step = 1u; step < width; step *= 2u) {
            let other = bitcast<f32>(of_neighbour(bitcast<u32>(best), step));
            let other_token = of_neighbour(token, step);
            nan |= of_neighbour(nan, step);
            if (better(other, other_token, best, token)) {
                best = other;
                token = other_token;
            }
        }
        if (lane % width == 0u) {
            values[lane / width] = best;
            tokens[lane / width] = token;
            broken[lane / width] = nan;
        }
        for (var half = THREADS / width / 2u; half > 0u; half /= 2u) {
            workgroupBarrier();
            if (lane < half) {
                broken[lane] |= broken[lane + half];
                if (better(values[lane + half], tokens[lane + half], values[lane], tokens[lane])) {
                    values[lane] = values[lane + half];
                    tokens[lane] = tokens[lane + half];
                }
            }
        }
        workgroupBarrier();
        last = values[0];
        last_token = tokens[0];
        if (lane == 0u) {
            answers[answer] = select(i + 1u, NONE, broken[0] != 0u);
            answers[answer + 1u + 2u * i] = last_token;
            answers[answer + 2u + 2u * i] = bitcast<u32>(last);
        }
        workgroupBarrier();
    }
}
