// Attention over exactly the cells that the plan's reads name, in sums of any order: what `attend` computes, with splits as long as it
// takes to fill the GPU. One workgroup per work item, KV head and ROWS query rows (the query heads of a KV head, for up to 8
// queries). For scores an invocation has a cell; for values a pair of elements and a part of the cells.
//
//   for each CELLS cells of the work item's units:
//     s = q . k                                  q includes scale and log2 e; softcap: s = cap log2 e tanh(q . k)
//                                                k and v as they are stored, see cells.wgsl; q is rotated like k
//     M' = max(M, round(max s));  w = 2^(s - M');  l = l 2^(M - M') + w;  o = o 2^(M - M') + w v
//   out = o / l, with a sink: o 2^(M - P) / (l 2^(M - P) + 2^(sink - P)), rotated back if values are stored rotated; or the
//   state, for `merge` to add up
//
// (online softmax: Milakov and Gimelshein, 2018; splits: Dao et al., 2023, flash-decoding.)
// RECENT: a packed row of a token that is near to the query's (in its recent group) is read in f16 instead.
// A weight of 0 is skipped instead of multiplied: the cell may hold NaN of another query's token.

const THREADS: u32 = 128u;
const CELLS: u32 = THREADS;
// Rows that an invocation computes scores and sums for at a time.
const SOME: u32 = 8u;
const PAIRS: u32 = (DIM + 1u) / 2u;
const EACH: u32 = (PAIRS + THREADS - 1u) / THREADS; // pairs of an invocation
// Parts of the cells whose weighted values are added up side by side.
const PARTS: u32 = max(1u, THREADS / PAIRS);
const PART_CELLS: u32 = (CELLS + PARTS - 1u) / PARTS;
// Values that an invocation asks for before it uses the first of them.
const AHEAD: u32 = 4u;
// Largest scores of subgroups, per row: the smallest have four lanes.
const PEAKS: u32 = CELLS / 4u;
const PLAIN_ROWS: u32 = select(1u, ROWS, PLAIN);

// Queries as keys are stored; at the end the outputs.
var<workgroup> turned: array<f32, ROWS * DIM>;
// Queries as they came, where recent keys need them.
var<workgroup> plain: array<f32, PLAIN_ROWS * DIM>;
var<workgroup> weights: array<f32, ROWS * CELLS>; // scores, then weights
var<workgroup> peaks: array<f32, ROWS * PEAKS>;
var<workgroup> value_of: array<u32, CELLS>;       // first word of the cell's values, or NONE
var<workgroup> recent_of: array<u32, CELLS>;      // the cell's row of `recent`
var<workgroup> recent_rows: array<u32, CELLS>;    // which query rows read it, a bit each
var<workgroup> maxima: array<f32, ROWS>;
var<workgroup> norms: array<f32, ROWS>;
var<workgroup> factors: array<f32, ROWS>;

fn plain_query(at: u32) -> f32 {
    if (PLAIN) { return plain[at]; }
    return turned[at];
}

// q . k for rows first .. first + SOME, of the key whose first word is `at`.
fn add_scores(first: u32, at: u32) -> array<f32, SOME> {
    var scores: array<f32, SOME>;
    for (var r = 0u; r < SOME; r++) { scores[r] = 0.0; }
    for (var i = 0u; i < DIM / 4u; i++) {
        let x = k_quad(at, i);
        for (var r = 0u; r < SOME; r++) {
            let q = (first + r) * DIM + 4u * i;
            scores[r] = fma(turned[q], x.x, fma(turned[q + 1u], x.y, fma(turned[q + 2u], x.z, fma(turned[q + 3u], x.w, scores[r]))));
        }
    }
    for (var i = DIM / 4u * 4u; i < DIM; i++) {
        let x = k_element(at, i);
        for (var r = 0u; r < SOME; r++) { scores[r] = fma(turned[(first + r) * DIM + i], x, scores[r]); }
    }
    return scores;
}

// The same with the key of a recent row.
fn add_recent_scores(first: u32, at: u32) -> array<f32, SOME> {
    var scores: array<f32, SOME>;
    for (var r = 0u; r < SOME; r++) { scores[r] = 0.0; }
    for (var i = 0u; i < DIM; i++) {
        let x = recent_element(at, i);
        for (var r = 0u; r < SOME; r++) { scores[r] = fma(plain_query((first + r) * DIM + i), x, scores[r]); }
    }
    return scores;
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let thread = thread_of(lanes);
    // Neighbouring lanes, with neighbouring cells, that exchange scores.
    let near = min(width_of(lanes), CELLS);
    let per_kv = args.heads / args.kv_heads;
    let work = args.work + 4u * group.x;
    let kv_head = group.y;
    let first_unit = plan[work];
    let partial = plan[work + 2u];
    let first_slot = plan[args.units + 4u * first_unit];
    let all_rows = plan[args.units + 4u * first_unit + 1u] * per_kv;
    let row0 = group.z * ROWS;
    // No return before the barriers: a group without rows writes nothing.
    let rows = min(ROWS, all_rows - min(row0, all_rows));
    let end_unit = select(plan[work + 1u], first_unit, rows == 0u);
    let first_query_head = (args.first_head + kv_head) * per_kv;
    // In a row of `recent`, values are behind the keys of all heads.
    let recent_key = (args.first_head + kv_head) * PAIRS;
    let recent_value = (select(0u, args.kv_heads, K_RECENT) + args.first_head + kv_head) * PAIRS;

    for (var i = thread; i < ROWS * DIM; i += THREADS) {
        let r = min(row0 + i / DIM, all_rows - 1u);
        let token = plan[args.order + first_slot + r / per_kv];
        let at = (token * args.heads + first_query_head + r % per_kv) * DIM;
        var channel = i % DIM;
        if (PLAIN) { plain[i] = q[at + channel] * args.scale; }
        if (K_WIDE > 0u) { channel = order[(args.first_head + kv_head) * DIM + channel]; }
        turned[i] = q[at + channel] * args.scale;
    }
    if (thread < ROWS) { maxima[thread] = NO_SCORE; }
    workgroupBarrier();
    turn_rows(thread, ROWS, K_TURN, K_WIDE);

    // Its part of the cells, and its pairs of elements.
    let part = thread / PAIRS;
    let pair = select(thread % PAIRS, thread, EACH > 1u);
    let adds = part < PARTS;
    var sums: array<f32, ROWS * EACH * 2u>;
    var own_norms: array<f32, ROWS>;
    for (var i = 0u; i < ROWS * EACH * 2u; i++) { sums[i] = 0.0; }
    for (var r = 0u; r < ROWS; r++) { own_norms[r] = 0.0; }

    for (var unit = first_unit; unit < end_unit; unit++) {
        let first_entry = plan[args.units + 4u * unit + 2u];
        let end_entry = plan[args.units + 4u * unit + 3u];
        // Behind a unit's entries is one that only says how many cells it has.
        let n_cells = plan[args.entries + ENTRY * end_entry];
        for (var start = 0u; start < n_cells; start += CELLS) {
            // The cell of this invocation.
            let flat = start + thread;
            let is_cell = flat < n_cells;
            var low = first_entry;
            var high = end_entry;
            while (high - low > 1u) {
                let middle = (low + high) / 2u;
                if (plan[args.entries + ENTRY * middle] <= flat) { low = middle; } else { high = middle; }
            }
            let entry = args.entries + ENTRY * low;
            let cell = select(0u, flat - plan[entry], is_cell);
            let number = plan[entry + 1u] + cell;
            value_of[thread] = select(NONE, ((args.v_head + kv_head) * args.cells + number) * V_WORDS, is_cell);
            // Bits of the rows that read the cell's recent row.
            var recents = 0u;
            var recent_row = NONE;
            if (RECENT && is_cell && plan[entry + 8u] != NONE) {
                let list = args.recents + plan[entry + 8u] + 2u * cell;
                recent_row = plan[list];
                if (recent_row != NONE) {
                    for (var r = 0u; r < rows; r++) {
                        let slot = first_slot + (row0 + r) / per_kv;
                        recents |= select(0u, 1u << r, plan[args.recents + slot] == plan[list + 1u]);
                    }
                }
            }
            if (RECENT) {
                recent_of[thread] = recent_row;
                recent_rows[thread] = recents;
            }

            // Scores.
            for (var first = 0u; first < ROWS; first += SOME) {
                let some = first < rows;
                var scores: array<f32, SOME>;
                for (var r = 0u; r < SOME; r++) { scores[r] = 0.0; }
                let mine = (recents >> first) & 255u;
                if (some && is_cell && (!K_RECENT || mine != 255u)) {
                    scores = add_scores(first, ((args.k_head + kv_head) * args.cells + number) * K_WORDS);
                }
                if (K_RECENT && mine != 0u) {
                    let recent_scores = add_recent_scores(first, recent_row * args.recent_row + recent_key);
                    for (var r = 0u; r < SOME; r++) {
                        scores[r] = select(scores[r], recent_scores[r], ((mine >> r) & 1u) == 1u);
                    }
                }
                for (var r = 0u; r < SOME; r++) {
                    var s = scores[r];
                    if (args.cap > 0.0) { s = args.cap * LOG2_E * tanh_(s); }
                    if (s < NO_SCORE) { s = NO_SCORE; }
                    let row = first + r;
                    var seen = is_cell && row < rows;
                    if (seen) { seen = sees(entry, plan[entry + 2u] + cell, first_slot + (row0 + row) / per_kv); }
                    weights[row * CELLS + thread] = select(HIDDEN, s, seen);
                    if (near > 1u && some) {
                        var peak = select(HIDDEN, known(s), seen);
                        for (var step = 1u; step < near; step *= 2u) {
                            peak = max(peak, bitcast<f32>(of_neighbour(bitcast<u32>(peak), step)));
                        }
                        if (thread % near == 0u) { peaks[row * PEAKS + thread / near] = peak; }
                    }
                }
            }
            workgroupBarrier();

            // New maxima.
            if (thread < rows) {
                var peak = HIDDEN;
                if (near > 1u) {
                    for (var i = 0u; i < CELLS / near; i++) { peak = max(peak, peaks[thread * PEAKS + i]); }
                } else {
                    for (var i = 0u; i < CELLS; i++) { peak = max(peak, known(weights[thread * CELLS + i])); }
                }
                var top = maxima[thread];
                // All scores are NaN or as small as can be, but there are some.
                if (peak == NO_SCORE && top == NO_SCORE) { top = 0.0; }
                if (peak > NO_SCORE) { top = max(top, round(peak)); }
                factors[thread] = power(maxima[thread] - top);
                maxima[thread] = top;
            }
            workgroupBarrier();

            // Weights of the cell.
            for (var r = 0u; r < rows; r++) {
                let s = weights[r * CELLS + thread];
                weights[r * CELLS + thread] = select(exp_2_less(s, maxima[r]), 0.0, s == HIDDEN);
            }
            workgroupBarrier();

            // Norms, and the sums of weighted values.
            if (adds) {
                for (var r = 0u; r < ROWS; r++) {
                    let factor = select(1.0, factors[r], r < rows);
                    own_norms[r] *= factor;
                    for (var j = 0u; j < EACH * 2u; j++) { sums[r * EACH * 2u + j] *= factor; }
                }
                let end = min(min((part + 1u) * PART_CELLS, CELLS), n_cells - start);
                for (var at = part * PART_CELLS; at < end; at += AHEAD) {
                    var values: array<vec2<f32>, AHEAD * EACH>;
                    var near_values: array<vec2<f32>, AHEAD * EACH>;
                    var recent_bits: array<u32, AHEAD>;
                    for (var i = 0u; i < AHEAD; i++) {
                        let c = min(at + i, end - 1u);
                        let from_ = value_of[c];
                        recent_bits[i] = 0u;
                        if (V_RECENT) { recent_bits[i] = recent_rows[c]; }
                        for (var j = 0u; j < EACH; j++) {
                            let e = 2u * (pair + j * THREADS);
                            let low_ = min(e, DIM - 1u);
                            let high_ = min(e + 1u, DIM - 1u);
                            values[i * EACH + j] = vec2(v_element(from_, low_), v_element(from_, high_));
                            if (V_RECENT && recent_bits[i] != 0u) {
                                let recent_at = recent_of[c] * args.recent_row + recent_value;
                                near_values[i * EACH + j] = vec2(recent_element(recent_at, low_), recent_element(recent_at, high_));
                            }
                        }
                    }
                    for (var i = 0u; i < AHEAD; i++) {
                        if (at + i >= end) { break; }
                        for (var r = 0u; r < ROWS; r++) {
                            if (r >= rows) { break; }
                            let weight = weights[r * CELLS + at + i];
                            // A row without a weight skips the value, which may be NaN.
                            if (bitcast<u32>(weight) == 0u) { continue; }
                            own_norms[r] += weight;
                            let is_near = V_RECENT && ((recent_bits[i] >> r) & 1u) == 1u;
                            for (var j = 0u; j < EACH; j++) {
                                var x = values[i * EACH + j];
                                if (is_near) { x = near_values[i * EACH + j]; }
                                let sum = r * EACH * 2u + 2u * j;
                                sums[sum] = fma(weight, x.x, sums[sum]);
                                sums[sum + 1u] = fma(weight, x.y, sums[sum + 1u]);
                            }
                        }
                    }
                }
            }
            workgroupBarrier();
        }
    }

    // One part after the other adds its sums.
    for (var p = 0u; p < PARTS; p++) {
        if (adds && part == p) {
            for (var r = 0u; r < ROWS; r++) {
                for (var j = 0u; j < EACH * 2u; j++) {
                    let e = 2u * (pair + j / 2u * THREADS) + j % 2u;
                    if (e < DIM) { turned[r * DIM + e] = sums[r * EACH * 2u + j] + select(turned[r * DIM + e], 0.0, p == 0u); }
                }
                if (pair == 0u) { norms[r] = own_norms[r] + select(norms[r], 0.0, p == 0u); }
            }
        }
        workgroupBarrier();
    }
    if (partial == DIRECT) {
        for (var i = thread; i < rows * DIM; i += THREADS) {
            let row = i / DIM;
            turned[i] *= final_factor(maxima[row], norms[row], first_query_head + (row0 + row) % per_kv);
        }
        workgroupBarrier();
        turn_rows_back(thread, ROWS, V_TURN, V_WIDE);
        for (var i = thread; i < rows * DIM; i += THREADS) {
            let row = row0 + i / DIM;
            let token = plan[args.order + first_slot + row / per_kv];
            out[(token * args.heads + first_query_head + row % per_kv) * DIM + i % DIM] = turned[i];
        }
        return;
    }
    for (var i = thread; i < rows * DIM; i += THREADS) {
        let row = row0 + i / DIM;
        let at = ((partial + row / per_kv) * args.heads + first_query_head + row % per_kv) * (DIM + 2u);
        states[at + i % DIM] = turned[i];
        if (i % DIM == 0u) {
            states[at + DIM] = maxima[i / DIM];
            states[at + DIM + 1u] = norms[i / DIM];
        }
    }
}
