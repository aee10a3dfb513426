// How lanes exchange values, without subgroups: see `lanes_of_subgroups.wgsl`.

struct Lanes {
    @builtin(local_invocation_index) index: u32,
}

fn width_of(lanes: Lanes) -> u32 {
    return 1u;
}

fn thread_of(lanes: Lanes) -> u32 {
    return lanes.index;
}

// Never called: a subgroup of one lane has no neighbours.
fn of_neighbour(x: u32, step: u32) -> u32 {
    return x;
}
