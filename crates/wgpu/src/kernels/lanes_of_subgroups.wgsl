// How lanes exchange values, with subgroups. `lanes.wgsl` is the same without.
//
// Kernels add up values as a binary tree: first lanes that differ in bit 0 of their number, then in bit 1, and so on. The
// first levels are within a subgroup, the others go through workgroup memory, and a lane's value meets the same others
// in the same order. So the bits do not depend on the size of a subgroup, nor on whether there are any.
//
// A driver may run fewer lanes per subgroup than it reports (Vulkan fixes `subgroup_size` unless a pipeline asks for the
// real one). Then the reported subgroups do not add up to the workgroup, and everything goes through workgroup memory.

struct Lanes {
    @builtin(local_invocation_index) index: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

// Lanes whose values can be exchanged: a power of two, 1 if none. Every kernel says how many THREADS its workgroups have.
fn width_of(lanes: Lanes) -> u32 {
    return select(1u, lanes.size, lanes.size >= 4u && lanes.size * lanes.subgroups == THREADS);
}

// The number of an invocation, so that neighbours are in a subgroup.
fn thread_of(lanes: Lanes) -> u32 {
    return select(lanes.index, lanes.subgroup * lanes.size + lanes.lane, width_of(lanes) > 1u);
}

// The value of the lane whose number differs in the bit `step`, which is less than the width.
fn of_neighbour(x: u32, step: u32) -> u32 {
    return subgroupShuffleXor(x, step);
}
