// The most likely tokens of a row of logits: the largest first, equal ones in order of their numbers.
//
//   answers[r] = (how many; 0xffffffff if a logit is NaN), then that many (token, logit)
//
// k passes over the row, each of which finds the next token after the last one. Rows that want 0 tokens are skipped.

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

const THREADS: u32 = 128u;

var<workgroup> values: array<f32, THREADS>;
var<workgroup> tokens: array<u32, THREADS>;
var<workgroup> broken: array<u32, THREADS>;

fn better(a: f32, i: u32, b: f32, j: u32) -> bool {
    return i != NONE && (j == NONE || a > b || (a == b && i < j));
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = thread_of(lanes);
    let width = width_of(lanes);
    let k = wanted[args.wanted + group.x];
    let row = group.x * args.vocab;
    let answer = group.x * args.stride;
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
