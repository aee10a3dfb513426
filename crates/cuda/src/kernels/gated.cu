// The gate of an MLP.
//
//   gate = activation(gate, up)

struct Args {
    u32 elements;
    u32 activation; // as in gate.cu
    float limit;
};

extern "C" __global__ void gated(const float* __restrict__ up, float* __restrict__ gate, Args args) {
    u32 i = (blockIdx.y * 65535u + blockIdx.x) * 64u + threadIdx.x;
    if (i >= args.elements) { return; }
    gate[i] = gated_(gate[i], up[i], args.activation, args.limit);
}
