//   x += y

struct Args {
    u32 elements;
};

extern "C" __global__ void __launch_bounds__(256) add(const float* __restrict__ y, float* __restrict__ x, Args args) {
    each_element(x, y, args.elements, [](float a, float b) { return a + b; });
}
