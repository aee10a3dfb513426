// Eight subgroups of 32 lanes: four parts of the outputs, two of the tokens. Each has 32 outputs and 16 FRAGMENTS tokens.
const FRAGMENTS: u32 = TILE_TOKENS / 32u;

alias Weights = coop_mat16x16<f16, A>;
alias Inputs = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;

// A fragment's sums, [16 tokens, 16 outputs], of each subgroup.
var<workgroup> staged: array<f32, 8u * 256u>;

fn finish_fragment(work: Work, lane: u32, from_: u32, first_output: u32, first_token: u32) {
    for (var i = lane; i < 256u; i += 32u) { finish(work, first_output + i % 16u, first_token + i / 16u, staged[from_ + i]); }
}

@compute @workgroup_size(256)
fn main(
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(workgroup_id) group: vec3<u32>) {
    let thread = subgroup * 32u + lane;
    let first_output = group.x * TILE_OUTPUTS;
    let first_token = group.y * TILE_TOKENS;
    let output = subgroup % 4u * 32u;
    let token = subgroup / 4u * 16u * FRAGMENTS;
    var c00 = Sums();
    var c10 = Sums();
    var c01 = Sums();
    var c11 = Sums();
    var c02 = Sums();
    var c12 = Sums();
    var c03 = Sums();
    var c13 = Sums();
    let work = work_of(group.z);
    let steps = n_steps(work, first_output, first_token);
    if (steps > 0u) { load_step(work, thread, first_output, first_token, 0u); }
    for (var step = 0u; step < steps; step++) {
        workgroupBarrier();
        store_step(thread);
        workgroupBarrier();
        if (step + 1u < steps) { load_step(work, thread, first_output, first_token, step + 1u); }
        for (var c = 0u; c < STEP_QUADS; c += 4u) {
            let a0 = coopLoadT<Weights>(&tile_weights[output * STRIDE + c], STRIDE);
            let a1 = coopLoadT<Weights>(&tile_weights[(output + 16u) * STRIDE + c], STRIDE);
            let b0 = coopLoad<Inputs>(&tile_inputs[token * STRIDE + c], STRIDE);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c10 = coopMultiplyAdd(a1, b0, c10);
            if (FRAGMENTS > 1u) {
                let b1 = coopLoad<Inputs>(&tile_inputs[(token + 16u) * STRIDE + c], STRIDE);
                c01 = coopMultiplyAdd(a0, b1, c01);
                c11 = coopMultiplyAdd(a1, b1, c11);
            }
            if (FRAGMENTS > 2u) {
                let b2 = coopLoad<Inputs>(&tile_inputs[(token + 32u) * STRIDE + c], STRIDE);
                c02 = coopMultiplyAdd(a0, b2, c02);
                c12 = coopMultiplyAdd(a1, b2, c12);
                let b3 = coopLoad<Inputs>(&tile_inputs[(token + 48u) * STRIDE + c], STRIDE);
                c03 = coopMultiplyAdd(a0, b3, c03);
                c13 = coopMultiplyAdd(a1, b3, c13);
            }
        }
    }
    let from_ = subgroup * 256u;
    let o = first_output + output;
    let t = first_token + token;
    coopStore(c00, &staged[from_], 16u);
    workgroupBarrier();
    finish_fragment(work, lane, from_, o, t);
    workgroupBarrier();
    coopStore(c10, &staged[from_], 16u);
    workgroupBarrier();
    finish_fragment(work, lane, from_, o + 16u, t);
    if (FRAGMENTS > 1u) {
        workgroupBarrier();
        coopStore(c01, &staged[from_], 16u);
        workgroupBarrier();
        finish_fragment(work, lane, from_, o, t + 16u);
        workgroupBarrier();
        coopStore(c11, &staged[from_], 16u);
        workgroupBarrier();
        finish_fragment(work, lane, from_, o + 16u, t + 16u);
    }
    if (FRAGMENTS > 2u) {
        workgroupBarrier();
        coopStore(c02, &staged[from_], 16u);
        workgroupBarrier();
        finish_fragment(work, lane, from_, o, t + 32u);
        workgroupBarrier();
        coopStore(c12, &staged[from_], 16u);
        workgroupBarrier();
        finish_fragment(work, lane, from_, o + 16u, t + 32u);
        workgroupBarrier();
        coopStore(c03, &staged[from_], 16u);
        workgroupBarrier();
        finish_fragment(work, lane, from_, o, t + 48u);
        workgroupBarrier();
        coopStore(c13, &staged[from_], 16u);
        workgroupBarrier();
        finish_fragment(work, lane, from_, o + 16u, t + 48u);
    }
}
