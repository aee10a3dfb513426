// The gate of an MLP.
//
//   gate = activation(gate, up)

struct Args {
    u32 elements;
    u32 activation; // as in gate.cu
    float limit;
};

extern "C" __global__ void __launch_bounds__(256) gated(const float* __restrict__ up, float* __restrict__ gate, Args args) {
    each_element(gate, up, args.elements, [&](float g, float u) { return gated_(g, u, args.activation, args.limit); });
}
