// Attention over exactly the cells that the plan's reads name, in sums of any order: what `attend` computes, with splits as long as it
// takes to fill the GPU. One workgroup per work item, KV head and ROWS query rows (the query heads of a KV head, for up to 8
// queries). For scores an invocation has a cell and GROUPS times four rows; for values a pair of elements and a part of the cells.
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
// Where values are not finite a weight of 0 is skipped: the cell may hold NaN of another query's token.
// Four rows are a vector, so that they come from workgroup memory at once.

const THREADS: u32 = CELLS * FOURS / GROUPS;
const PAIRS: u32 = (DIM + 1u) / 2u;
// Values are added up in so many parts side by side, each of every PARTS-th cell.
const PARTS: u32 = max(1u, THREADS / PAIRS);
// Largest scores of subgroups, per row: the smallest have four lanes.
const PEAKS: u32 = CELLS / 4u;
const PLAIN_ROWS: u32 = select(1u, ROWS, PLAIN);

// Queries on their way to `queries`; at the end the outputs.
var<workgroup> turned: array<f32, ROWS * DIM>;
var<workgroup> queries: array<vec4<f32>, DIM * FOURS>; // [DIM, FOURS]
// Queries as they came, where recent keys need them.
var<workgroup> plain: array<f32, PLAIN_ROWS * DIM>;
var<workgroup> weights: array<vec4<f32>, CELLS * FOURS>; // [CELLS, FOURS] scores, then weights; at the end norms, and sums
var<workgroup> peaks: array<f32, ROWS * PEAKS>;
var<workgroup> value_of: array<u32, CELLS>;       // first word of the cell's values, or NONE
var<workgroup> recent_of: array<u32, CELLS>;      // the cell's row of `recent`
var<workgroup> recent_rows: array<u32, CELLS>;    // which query rows read it, a bit each
var<workgroup> slot_of: array<u32, ROWS>;         // query slots of rows
var<workgroup> query_of: array<u32, ROWS>;        // first elements in `q` and `out`
var<workgroup> state_of: array<u32, ROWS>;        // first elements in `states`
var<workgroup> maxima: array<f32, ROWS>;
var<workgroup> norms: array<f32, ROWS>;
var<workgroup> factors: array<f32, ROWS>;

fn plain_query(at: u32) -> f32 {
    if (PLAIN) { return plain[at]; }
    return turned[at];
}

// Scores of this invocation.
var<private> scores: array<vec4<f32>, GROUPS>;

// q . k for rows from 4 first on, of the key whose first word is `at`.
fn add_products(first: u32, at: u32) {
    // Eight quads are asked for before the first of them is used.
    for (var c = 0u; c < DIM / 4u; c += 8u) {
        var quads: array<vec4<f32>, 8>;
        unroll(i, 8) { quads[i] = k_quad(at, min(c + i, DIM / 4u - 1u)); }
        unroll(i, 8) {
            if (c + i < DIM / 4u) {
                unroll(j, 4) {
                    let q = (4u * (c + i) + j) * FOURS + first;
                    unroll(g, GROUPS) { scores[g] = fma(queries[q + g], vec4(quads[i][j]), scores[g]); }
                }
            }
        }
    }
    for (var i = DIM / 4u * 4u; i < DIM; i++) {
        let x = vec4(k_element(at, i));
        unroll(g, GROUPS) { scores[g] = fma(queries[i * FOURS + first + g], x, scores[g]); }
    }
}

// q . k for rows 4 g .. 4 g + 4, with the key of a recent row.
fn recent_product(g: u32, at: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var i = 0u; i < DIM; i++) {
        let q = 4u * g * DIM + i;
        let four = vec4(plain_query(q), plain_query(q + DIM), plain_query(q + 2u * DIM), plain_query(q + 3u * DIM));
        sum = fma(four, vec4(recent_element(at, i)), sum);
    }
    return sum;
}

// The largest of `near` neighbouring lanes, of each of four values.
fn largest_of(x: vec4<f32>, near: u32) -> vec4<f32> {
    var most = x;
    for (var step = 1u; step < near; step *= 2u) { most = max(most, four_of_neighbour(most, step)); }
    return most;
}

// Their sums.
fn sums_of(x: vec4<f32>, near: u32) -> vec4<f32> {
    var sum = x;
    for (var step = 1u; step < near; step *= 2u) { sum += four_of_neighbour(sum, step); }
    return sum;
}

fn four_of_neighbour(x: vec4<f32>, step: u32) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let low = vec2(of_neighbour(bits.x, step), of_neighbour(bits.y, step));
    let high = vec2(of_neighbour(bits.z, step), of_neighbour(bits.w, step));
    return bitcast<vec4<f32>>(vec4(low, high));
}

// A cell of a unit, for this invocation.
struct Cell {
    is: bool,    // or there are not so many
    entry: u32,
    index: u32,  // in the entry
    number: u32, // in the pool
    seen: Seen,
}

// Cell `flat` of those of entries `first` to `end`, which are `n` together.
fn find(first: u32, end: u32, n: u32, flat: u32) -> Cell {
    var low = first;
    var high = end;
    while (high - low > 1u) {
        let middle = (low + high) / 2u;
        if (plan[args.entries + ENTRY * middle] <= flat) { low = middle; } else { high = middle; }
    }
    let entry = args.entries + ENTRY * low;
    let index = select(0u, flat - plan[entry], flat < n);
    return Cell(flat < n, entry, index, plan[entry + 1u] + index, seen_of(entry, index));
}

// The score as it counts: HIDDEN where the query does not see the cell.
fn counted(score: f32, is_cell: bool, seen: Seen, row: u32, rows: u32) -> f32 {
    var s = score;
    if (args.cap > 0.0) { s = args.cap * LOG2_E * tanh_(s); }
    if (s < NO_SCORE) { s = NO_SCORE; }
    var visible = is_cell && row < rows;
    if (visible) { visible = is_seen(seen, slot_of[row]); }
    return select(HIDDEN, s, visible);
}

fn four_factors(g: u32) -> vec4<f32> {
    return vec4(factors[4u * g], factors[4u * g + 1u], factors[4u * g + 2u], factors[4u * g + 3u]);
}

fn weight_of(s: f32, top: f32) -> f32 {
    return select(exp_2_less(s, top), 0.0, s == HIDDEN);
}

fn any_not_finite(x: vec2<f32>) -> bool {
    return any((bitcast<vec2<u32>>(x) & vec2(0x7f800000u)) == vec2(0x7f800000u));
}

// Sums of this invocation: for each of its pairs of elements two of FOURS vectors.
var<private> sums: array<vec4<f32>, 2u * PAIRS_EACH * FOURS>;

// Adds the values of a pair, with the weights at `at`.
fn add_values(first: u32, at: u32, x: vec2<f32>) {
    if (any_not_finite(x)) {
        unroll(g, FOURS) {
            let w = weights[at + g];
            let none = w == vec4(0.0);
            sums[first + g] = select(fma(w, vec4(x.x), sums[first + g]), sums[first + g], none);
            sums[first + FOURS + g] = select(fma(w, vec4(x.y), sums[first + FOURS + g]), sums[first + FOURS + g], none);
        }
        return;
    }
    unroll(g, FOURS) {
        let w = weights[at + g];
        sums[first + g] = fma(w, vec4(x.x), sums[first + g]);
        sums[first + FOURS + g] = fma(w, vec4(x.y), sums[first + FOURS + g]);
    }
}

// The same where some rows, whose bits are set, read `near` instead.
fn add_near_values(first: u32, at: u32, x: vec2<f32>, near: vec2<f32>, bits: u32) {
    unroll(g, FOURS) {
        let w = weights[at + g];
        let none = w == vec4(0.0);
        let is_near = (vec4(bits >> (4u * g)) & vec4(1u, 2u, 4u, 8u)) != vec4(0u);
        let low = select(vec4(x.x), vec4(near.x), is_near);
        let high = select(vec4(x.y), vec4(near.y), is_near);
        sums[first + g] = select(fma(w, low, sums[first + g]), sums[first + g], none);
        sums[first + FOURS + g] = select(fma(w, high, sums[first + FOURS + g]), sums[first + FOURS + g], none);
    }
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

    if (thread < ROWS) {
        let r = min(row0 + thread, all_rows - 1u);
        let slot = r / per_kv;
        let head = first_query_head + r % per_kv;
        maxima[thread] = NO_SCORE;
        slot_of[thread] = first_slot + slot;
        query_of[thread] = (plan[args.order + first_slot + slot] * args.heads + head) * DIM;
        state_of[thread] = ((partial + slot) * args.heads + head) * (DIM + 2u);
    }
    workgroupBarrier();
    unroll(n, QUERIES_EACH) {
        let i = min(thread + n * THREADS, ROWS * DIM - 1u);
        let at = query_of[i / DIM];
        var channel = i % DIM;
        if (PLAIN) { plain[i] = q[at + channel] * args.scale; }
        if (K_WIDE > 0u) { channel = order[(args.first_head + kv_head) * DIM + channel]; }
        turned[i] = q[at + channel] * args.scale;
    }
    workgroupBarrier();
    turn_rows(thread, ROWS, K_TURN, K_WIDE);
    for (var i = thread; i < DIM * FOURS; i += THREADS) {
        let at = i % FOURS * 4u * DIM + i / FOURS;
        queries[i] = vec4(turned[at], turned[at + DIM], turned[at + 2u * DIM], turned[at + 3u * DIM]);
    }
    workgroupBarrier();

    // Its part of the cells, and its pairs of elements.
    let part = thread / PAIRS;
    let pair = select(thread % PAIRS, thread, PAIRS_EACH > 1u);
    let adds = part < PARTS;
    unroll(i, SUMS) { sums[i] = vec4(0.0); }
    // For scores: its cell, and its rows, whose weights it adds up.
    let c = thread % CELLS;
    let first_four = thread / CELLS * GROUPS;
    var norm: array<vec4<f32>, GROUPS>;
    unroll(g, GROUPS) { norm[g] = vec4(0.0); }

    for (var unit = first_unit; unit < end_unit; unit++) {
        let first_entry = plan[args.units + 4u * unit + 2u];
        let end_entry = plan[args.units + 4u * unit + 3u];
        // Behind a unit's entries is one that only says how many cells it has.
        let n_cells = plan[args.entries + ENTRY * end_entry];
        var cell = find(first_entry, end_entry, n_cells, c);
        for (var start = 0u; start < n_cells; start += CELLS) {
            value_of[c] = select(NONE, ((args.v_head + kv_head) * args.cells + cell.number) * V_WORDS, cell.is);
            // Bits of the rows that read the cell's recent row.
            var recents = 0u;
            var recent_row = NONE;
            if (RECENT && cell.is && plan[cell.entry + 8u] != NONE) {
                let list = args.recents + plan[cell.entry + 8u] + 2u * cell.index;
                recent_row = plan[list];
                if (recent_row != NONE) {
                    for (var r = 0u; r < rows; r++) {
                        recents |= select(0u, 1u << r, plan[args.recents + slot_of[r]] == plan[list + 1u]);
                    }
                }
            }
            if (RECENT) {
                recent_of[c] = recent_row;
                recent_rows[c] = recents;
            }

            // Scores.
            unroll(g, GROUPS) { scores[g] = vec4(0.0); }
            if (cell.is && 4u * first_four < rows) {
                add_products(first_four, ((args.k_head + kv_head) * args.cells + cell.number) * K_WORDS);
            }
            unroll(g, GROUPS) {
                let four = first_four + g;
                let mine = (recents >> (4u * four)) & 15u;
                if (K_RECENT && mine != 0u) {
                    let is_recent = (vec4(mine) & vec4(1u, 2u, 4u, 8u)) != vec4(0u);
                    scores[g] = select(scores[g], recent_product(four, recent_row * args.recent_row + recent_key), is_recent);
                }
                unroll(r, 4) { scores[g][r] = counted(scores[g][r], cell.is, cell.seen, 4u * four + r, rows); }
                if (near == 1u) {
                    weights[c * FOURS + four] = scores[g];
                } else {
                    let s = scores[g];
                    let most = largest_of(vec4(known(s.x), known(s.y), known(s.z), known(s.w)), near);
                    if (c % near == 0u) {
                        unroll(r, 4) { peaks[(4u * four + r) * PEAKS + c / near] = most[r]; }
                    }
                }
            }
            workgroupBarrier();

            // New maxima.
            if (thread < ROWS) {
                var peak = HIDDEN;
                if (near > 1u) {
                    for (var i = 0u; i < CELLS / near; i++) { peak = max(peak, peaks[thread * PEAKS + i]); }
                } else {
                    for (var i = 0u; i < CELLS; i++) { peak = max(peak, known(weights[i * FOURS + thread / 4u][thread % 4u])); }
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
            unroll(g, GROUPS) {
                let row = 4u * (first_four + g);
                let s = scores[g];
                let own = vec4(
                    weight_of(s.x, maxima[row]), weight_of(s.y, maxima[row + 1u]),
                    weight_of(s.z, maxima[row + 2u]), weight_of(s.w, maxima[row + 3u]));
                norm[g] = norm[g] * four_factors(first_four + g) + own;
                weights[c * FOURS + first_four + g] = own;
            }
            workgroupBarrier();

            // The next cell is looked for while the values of these are on their way.
            if (start + CELLS < n_cells) { cell = find(first_entry, end_entry, n_cells, start + CELLS + c); }

            // Sums of weighted values.
            if (adds) {
                unroll(f, FOURS) {
                    let factor = four_factors(f);
                    unroll(j, PAIR_SUMS) { sums[j * FOURS + f] *= factor; }
                }
                let end = min(CELLS, n_cells - start);
                // Eight values are asked for before the first of them is used.
                for (var at = part; at < end; at += 8u * PARTS) {
                    var values: array<vec2<f32>, 8u * PAIRS_EACH>;
                    unroll(i, 8) {
                        let from_ = value_of[min(at + i * PARTS, end - 1u)];
                        unroll(j, PAIRS_EACH) {
                            let e = 2u * (pair + j * THREADS);
                            values[i * PAIRS_EACH + j] = vec2(v_element(from_, min(e, DIM - 1u)), v_element(from_, min(e + 1u, DIM - 1u)));
                        }
                    }
                    unroll(i, 8) {
                        if (at + i * PARTS < end) {
                            let from_cell = at + i * PARTS;
                            var bits = 0u;
                            if (V_RECENT) { bits = recent_rows[from_cell]; }
                            unroll(j, PAIRS_EACH) {
                                if (bits != 0u) {
                                    let e = 2u * (pair + j * THREADS);
                                    let recent_at = recent_of[from_cell] * args.recent_row + recent_value;
                                    let low = recent_element(recent_at, min(e, DIM - 1u));
                                    let near_values = vec2(low, recent_element(recent_at, min(e + 1u, DIM - 1u)));
                                    add_near_values(2u * j * FOURS, from_cell * FOURS, values[i * PAIRS_EACH + j], near_values, bits);
                                } else {
                                    add_values(2u * j * FOURS, from_cell * FOURS, values[i * PAIRS_EACH + j]);
                                }
                            }
                        }
                    }
                }
            }
            workgroupBarrier();
        }
    }

    // Norms: every cell's weights.
    unroll(g, GROUPS) {
        let sum = sums_of(norm[g], near);
        if (c % near == 0u) { weights[c / near * FOURS + first_four + g] = sum; }
    }
    workgroupBarrier();
    if (thread < ROWS) {
        var sum = 0.0;
        for (var i = 0u; i < CELLS / near; i++) { sum += weights[i * FOURS + thread / 4u][thread % 4u]; }
        norms[thread] = sum;
    }
    // Sums, one vector of every invocation after the other: those of one pair in all parts are added up.
    unroll(i, SUMS) {
        workgroupBarrier();
        weights[thread] = sums[i];
        workgroupBarrier();
        if (part == i % PARTS) {
            var sum = vec4(0.0);
            for (var p = 0u; p < PARTS; p++) { sum += weights[pair + p * PAIRS]; }
            let e = 2u * (pair + i / (2u * FOURS) * THREADS) + i / FOURS % 2u;
            if (e < DIM) {
                unroll(r, 4) { turned[(i % FOURS * 4u + r) * DIM + e] = sum[r]; }
            }
        }
    }
    workgroupBarrier();
    if (partial == DIRECT) {
        for (var i = thread; i < rows * DIM; i += THREADS) {
            let row = i / DIM;
            turned[i] *= final_factor(maxima[row], norms[row], query_of[row] / DIM % args.heads);
        }
        workgroupBarrier();
        turn_rows_back(thread, ROWS, V_TURN, V_WIDE);
        for (var i = thread; i < rows * DIM; i += THREADS) { out[query_of[i / DIM] + i % DIM] = turned[i]; }
        return;
    }
    for (var i = thread; i < rows * DIM; i += THREADS) {
        let at = state_of[i / DIM];
        states[at + i % DIM] = turned[i];
        if (i % DIM == 0u) {
            states[at + DIM] = maxima[i / DIM];
            states[at + DIM + 1u] = norms[i / DIM];
        }
    }
}
