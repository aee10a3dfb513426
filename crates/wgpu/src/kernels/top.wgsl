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

var<workgroup> values: array<f32, 128>;
var<workgroup> tokens: array<u32, 128>;
var<workgroup> broken: array<u32, 128>;

fn better(a: f32, i: u32, b: f32, j: u32) -> bool {
    return i != NONE && (j == NONE || a > b || (a == b && i < j));
}

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let k = wanted[args.wanted + group.x];
    let row = group.x * args.vocab;
    let answer = group.x * args.stride;
    var last = 0.0;
    var last_token = NONE;
    for (var i = 0u; i < k; i++) {
        var best = 0.0;
        var token = NONE;
        var nan = 0u;
        for (var t = lane; t < args.vocab; t += 128u) {
            let x = logits[row + t];
            nan |= select(0u, 1u, is_nan(x));
            let left = last_token == NONE || x < last || (x == last && t > last_token);
            if (left && better(x, t, best, token)) {
                best = x;
                token = t;
            }
        }
        values[lane] = best;
        tokens[lane] = token;
        broken[lane] = nan;
        for (var half = 64u; half > 0u; half /= 2u) {
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
