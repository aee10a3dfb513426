// What sums over a row's cells are multiplied by at the end. A sink takes part in the softmax and has no value.
fn final_factor(top: f32, norm: f32, head: u32) -> f32 {
    if (args.has_sinks == 0u) { return 1.0 / norm; }
    let sink = sinks[head] * LOG2_E;
    let peak = max(top, round(sink));
    let shrink = power(top - peak);
    return shrink / (norm * shrink + exp_2(sink - peak));
}
