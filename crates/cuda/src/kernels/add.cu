//   x += y

struct Args {
    u32 elements;
};

extern "C" __global__ void add(const float* __restrict__ y, float* __restrict__ x, Args args) {
    u32 i = (blockIdx.y * 65535u + blockIdx.x) * 64u + threadIdx.x;
    if (i < args.elements) { x[i] += y[i]; }
}
