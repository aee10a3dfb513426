// Attention over exactly the cells that the plan's reads name. One workgroup per work item, KV head and ROWS query rows
// (the query heads of a KV head, for up to 8 queries). Eight rows are a team of 64 invocations. All teams go through the
// same cells in step, so that the cells come from memory once, and are in the workgroup's cache for the other teams.
//
//   for each unit of the work item (a split: 1,024 positions of the sequence), in order:
//     for each 32 of its cells, in order:
//       s = q . k                                  q includes scale and log2 e; softcap: s = cap log2 e tanh(q . k)
//                                                  k and v as they are stored, see cells.wgsl; q is rotated like k
//       M' = max(M, round(max s));  w = 2^(s - M');  l = l 2^(M - M') + w;  o = o 2^(M - M') + w v
//     total = total 2^(Mt - M*) + unit 2^(M - M*)
//   out = o / l, with a sink: o 2^(M - P) / (l 2^(M - P) + 2^(sink - P)), rotated back if values are stored rotated; or the
//   state, for `merge` to add up
//
// (online softmax: Milakov and Gimelshein, 2018; splits: Dao et al., 2023, flash-decoding.) The running maximum is an
// integer, so every rescaling is exact, and each sum runs over the cells in their order. A row's result therefore does
// not depend on where tiles end, on the other rows, or on whether a work item has one unit or all of them.
// RECENT: a packed row of a token that is near to the query's (in its recent group) is read in f16 instead.
// A weight of 0 is skipped instead of multiplied: the cell may hold NaN of another query's token.
//
// Lanes exchange scores to find the largest, which is the same in any order. They do not exchange weights: a norm is added
// up cell by cell, because a row's cells lie elsewhere in tiles that it shares with other sequences.

const TEAM: u32 = 64u;
const TEAM_ROWS: u32 = 8u;
const THREADS: u32 = ROWS / TEAM_ROWS * TEAM;
const CELLS: u32 = 32u;
const PER_THREAD: u32 = (DIM + TEAM - 1u) / TEAM;
// For scores, an invocation has a cell and so many rows.
const SCORES: u32 = 4u;
const SCORE_GROUPS: u32 = ROWS / SCORES;
// Largest scores of subgroups, per row: the smallest have four lanes.
const PEAKS: u32 = 8u;
const PLAIN_ROWS: u32 = select(1u, ROWS, PLAIN);

// Queries as keys are stored; at the end the outputs.
var<workgroup> turned: array<f32, ROWS * DIM>;
// Queries as they came, where recent keys need them.
var<workgroup> plain: array<f32, PLAIN_ROWS * DIM>;
var<workgroup> weights: array<f32, ROWS * CELLS>; // scores, then weights
var<workgroup> peaks: array<f32, ROWS * PEAKS>;
var<workgroup> cell_of: array<u32, CELLS>;
var<workgroup> entry_of: array<u32, CELLS>;
var<workgroup> recent_of: array<u32, CELLS>;        // the cell's row of `recent`, or NONE
var<workgroup> recent_rows: array<u32, SCORE_GROUPS * CELLS>; // which query rows read it, a bit each, four rows at a time
var<workgroup> maxima: array<f32, ROWS>;
var<workgroup> norms: array<f32, ROWS>;
var<workgroup> factors: array<f32, ROWS>;
var<workgroup> total_maxima: array<f32, ROWS>;
var<workgroup> total_norms: array<f32, ROWS>;

// Element i of query row r, for keys that are not stored as `turned` is.
fn plain_query(r: u32, i: u32) -> f32 {
    if (PLAIN) { return plain[r * DIM + i]; }
    return turned[r * DIM + i];
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let thread = thread_of(lanes);
    // Neighbouring lanes, with neighbouring cells, that exchange scores.
    let near = min(width_of(lanes), CELLS);
    let team_row = thread / TEAM * TEAM_ROWS;
    let team_thread = thread % TEAM;
    let per_kv = args.heads / args.kv_heads;
    let work = args.work + 4u * group.x;
    let kv_head = group.y;
    let first_unit = plan[work];

    let partial = plan[work + 2u];
    let first_slot = plan[args.units + 4u * first_unit];
    let all_rows = plan[args.units + 4u * first_unit + 1u] * per_kv;
    let row0 = group.z * ROWS;
    // No return before the barriers: a group without rows repeats the last ones and writes nothing.
    let rows = min(ROWS, all_rows - min(row0, all_rows));
    let end_unit = select(plan[work + 1u], first_unit, rows == 0u);
    let first_query_head = (args.first_head + kv_head) * per_kv;
    // In a row of `recent`, values are behind the keys of all heads.
    let recent_value = (select(0u, args.kv_heads, K_RECENT) + args.first_head + kv_head) * ((DIM + 1u) / 2u);

    for (var i = thread; i < ROWS * DIM; i += THREADS) {
        let r = min(row0 + i / DIM, all_rows - 1u);
        let token = plan[args.order + first_slot + r / per_kv];
        let at = (token * args.heads + first_query_head + r % per_kv) * DIM;
        var channel = i % DIM;
        if (PLAIN) { plain[i] = q[at + channel] * args.scale; }
        if (K_WIDE > 0u) { channel = order[(args.first_head + kv_head) * DIM + channel]; }
        turned[i] = q[at + channel] * args.scale;
    }
    workgroupBarrier();
    turn_rows(thread, ROWS, K_TURN, K_WIDE);
    var totals: array<f32, TEAM_ROWS * PER_THREAD>;
    var sums: array<f32, TEAM_ROWS * PER_THREAD>;
    for (var i = 0u; i < TEAM_ROWS * PER_THREAD; i++) { totals[i] = 0.0; }
    if (thread < ROWS) {
        total_maxima[thread] = NO_SCORE;
        total_norms[thread] = 0.0;
    }
    workgroupBarrier();

    for (var unit = first_unit; unit < end_unit; unit++) {
        let first_entry = plan[args.units + 4u * unit + 2u];
        let end_entry = plan[args.units + 4u * unit + 3u];
        // Behind a unit's entries is one that only says how many cells it has.
        let n_cells = plan[args.entries + ENTRY * end_entry];
        for (var i = 0u; i < TEAM_ROWS * PER_THREAD; i++) { sums[i] = 0.0; }
        if (thread < ROWS) {
            maxima[thread] = NO_SCORE;
            norms[thread] = 0.0;
        }
        workgroupBarrier();
        for (var start = 0u; start < n_cells; start += CELLS) {
            // Find the cells.
            if (thread < CELLS) {
                let flat = start + thread;
                var low = first_entry;
                var high = end_entry;
                while (high - low > 1u) {
                    let middle = (low + high) / 2u;
                    if (plan[args.entries + ENTRY * middle] <= flat) { low = middle; } else { high = middle; }
                }
                let entry = args.entries + ENTRY * low;
                let cell = flat - plan[entry];
                entry_of[thread] = select(DIRECT, entry, flat < n_cells);
                cell_of[thread] = cell;
                if (RECENT) {
                    var row = NONE;
                    if (flat < n_cells && plan[entry + 8u] != NONE) { row = plan[args.recents + plan[entry + 8u] + 2u * cell]; }
                    recent_of[thread] = row;
                }
            }
            workgroupBarrier();

            // Scores.
            let c = thread % CELLS;
            let first_row = thread / CELLS * SCORES;
            let entry = entry_of[c];
            // Teams without rows only wait for the others.
            let used = first_row < rows && entry != DIRECT;
            var scores: array<f32, SCORES>;
            for (var r = 0u; r < SCORES; r++) { scores[r] = 0.0; }
            // Bits of the rows that read the cell's recent row.
            var recents = 0u;
            if (RECENT && used && recent_of[c] != NONE) {
                let recent_group = plan[args.recents + plan[entry + 8u] + 2u * cell_of[c] + 1u];
                for (var r = 0u; r < SCORES; r++) {
                    let slot = first_slot + min(row0 + first_row + r, all_rows - 1u) / per_kv;
                    recents |= select(0u, 1u << r, plan[args.recents + slot] == recent_group);
                }
            }
            if (RECENT) { recent_rows[thread] = recents; }
            if (used && (!K_RECENT || recents != 15u)) {
                let at = ((args.k_head + kv_head) * args.cells + plan[entry + 1u] + cell_of[c]) * K_WORDS;
                for (var i = 0u; i < DIM / 4u; i++) {
                    let x = k_quad(at, i);
                    for (var r = 0u; r < SCORES; r++) {
                        let first = (first_row + r) * DIM + 4u * i;
                        var sum = scores[r];
                        sum = fma(turned[first], x.x, sum);
                        sum = fma(turned[first + 1u], x.y, sum);
                        sum = fma(turned[first + 2u], x.z, sum);
                        sum = fma(turned[first + 3u], x.w, sum);
                        scores[r] = sum;
                    }
                }
                for (var i = DIM / 4u * 4u; i < DIM; i++) {
                    let x = k_element(at, i);
                    for (var r = 0u; r < SCORES; r++) {
                        scores[r] = fma(turned[(first_row + r) * DIM + i], x, scores[r]);
                    }
                }
            }
            if (K_RECENT && recents != 0u) {
                let at = recent_of[c] * args.recent_row + (args.first_head + kv_head) * ((DIM + 1u) / 2u);
                var recent_scores: array<f32, SCORES>;
                for (var r = 0u; r < SCORES; r++) { recent_scores[r] = 0.0; }
                for (var i = 0u; i < DIM; i++) {
                    let x = recent_element(at, i);
                    for (var r = 0u; r < SCORES; r++) {
                        recent_scores[r] = fma(plain_query(first_row + r, i), x, recent_scores[r]);
                    }
                }
                for (var r = 0u; r < SCORES; r++) {
                    scores[r] = select(scores[r], recent_scores[r], ((recents >> r) & 1u) == 1u);
                }
            }
            for (var r = 0u; r < SCORES; r++) {
                var s = scores[r];
                if (args.cap > 0.0) { s = args.cap * LOG2_E * tanh_(s); }
                if (s < NO_SCORE) { s = NO_SCORE; }
                let row = row0 + first_row + r;
                var seen = entry != DIRECT && row < all_rows;
                if (seen) {
                    seen = is_seen(seen_of(entry, cell_of[c]), first_slot + row / per_kv);
                }
                weights[(first_row + r) * CELLS + c] = select(HIDDEN, s, seen);
                if (near > 1u) {
                    var peak = select(HIDDEN, known(s), seen);
                    for (var step = 1u; step < near; step *= 2u) {
                        peak = max(peak, bitcast<f32>(of_neighbour(bitcast<u32>(peak), step)));
                    }
                    if (c % near == 0u) { peaks[(first_row + r) * PEAKS + c / near] = peak; }
                }
            }
            workgroupBarrier();

            // New maxima.
            if (thread < ROWS) {
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

            // Weights.
            for (var i = thread; i < ROWS * CELLS; i += THREADS) {
                let s = weights[i];
                weights[i] = select(exp_2_less(s, maxima[i / CELLS]), 0.0, s == HIDDEN);
            }
            workgroupBarrier();

            // Norms, and the sums of weighted values.
            if (thread < ROWS) {
                var norm = norms[thread] * factors[thread];
                for (var i = 0u; i < CELLS; i++) { norm += weights[thread * CELLS + i]; }
                norms[thread] = norm;
            }
            for (var j = 0u; j < PER_THREAD; j++) {
                let e = team_thread + TEAM * j;
                if (e < DIM && team_row < rows) {
                    for (var r = 0u; r < TEAM_ROWS; r++) { sums[r * PER_THREAD + j] *= factors[team_row + r]; }
                    for (var i = 0u; i < CELLS; i++) {
                        let entry = entry_of[i];
                        if (entry == DIRECT) { break; }
                        var recents = 0u;
                        var near = 0.0;
                        if (V_RECENT) {
                            let at = team_row / SCORES * CELLS + i;
                            recents = recent_rows[at] | (recent_rows[at + CELLS] << SCORES);
                            if (recents != 0u) { near = recent_element(recent_of[i] * args.recent_row + recent_value, e); }
                        }
                        let at = ((args.v_head + kv_head) * args.cells + plan[entry + 1u] + cell_of[i]) * V_WORDS;
                        let far = v_element(at, e);
                        for (var r = 0u; r < TEAM_ROWS; r++) {
                            let weight = weights[(team_row + r) * CELLS + i];
                            let sum = sums[r * PER_THREAD + j];
                            let x = select(far, near, V_RECENT && ((recents >> r) & 1u) == 1u);
                            sums[r * PER_THREAD + j] = select(fma(weight, x, sum), sum, bitcast<u32>(weight) == 0u);
                        }
                    }
                }
            }
            workgroupBarrier();
        }
        // total += unit
        for (var r = 0u; r < TEAM_ROWS; r++) {
            let total_max = total_maxima[team_row + r];
            let unit_max = maxima[team_row + r];
            let top = max(total_max, unit_max);
            let a = power(total_max - top);
            let b = power(unit_max - top);
            let first = total_max == NO_SCORE;
            let none = unit_max == NO_SCORE;
            for (var j = 0u; j < PER_THREAD; j++) {
                let i = r * PER_THREAD + j;
                let both = totals[i] * a + sums[i] * b;
                totals[i] = select(select(both, sums[i], first), totals[i], none);
            }
        }
        workgroupBarrier();
        if (thread < ROWS && maxima[thread] != NO_SCORE) {
            let top = max(total_maxima[thread], maxima[thread]);
            let both = total_norms[thread] * power(total_maxima[thread] - top) + norms[thread] * power(maxima[thread] - top);
            total_norms[thread] = select(both, norms[thread], total_maxima[thread] == NO_SCORE);
            total_maxima[thread] = top;
        }
        workgroupBarrier();
    }

    if (partial == DIRECT) {
        for (var r = 0u; r < TEAM_ROWS; r++) {
            let row = team_row + r;
            let head = first_query_head + (row0 + row) % per_kv;
            let factor = final_factor(total_maxima[row], total_norms[row], head);
            for (var j = 0u; j < PER_THREAD; j++) {
                let e = team_thread + TEAM * j;
                if (e < DIM) { turned[row * DIM + e] = totals[r * PER_THREAD + j] * factor; }
            }
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
    for (var r = 0u; r < TEAM_ROWS; r++) {
        if (team_row + r >= rows) { break; }
        let row = row0 + team_row + r;
        let at = ((partial + row / per_kv) * args.heads + first_query_head + row % per_kv) * (DIM + 2u);
        for (var j = 0u; j < PER_THREAD; j++) {
            let e = team_thread + TEAM * j;
            if (e < DIM) { states[at + e] = totals[r * PER_THREAD + j]; }
        }
        if (team_thread == 0u) {
            states[at + DIM] = total_maxima[team_row + r];
            states[at + DIM + 1u] = total_norms[team_row + r];
        }
    }
}
