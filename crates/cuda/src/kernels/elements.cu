// How kernels go through the elements of rows, one after the other: a thread has four that lie side by side.

#define THREADS 256u

// x[i] = f(x[i], y[i]) for this thread's elements.
template <class F>
__device__ __forceinline__ void each_element(float* x, const float* y, u32 elements, F f) {
    u32 first = ((blockIdx.y * 65535u + blockIdx.x) * THREADS + threadIdx.x) * 4u;
    if (first + 4u <= elements) { // buffers begin at multiples of 16 bytes
        float4 a = *reinterpret_cast<const float4*>(x + first);
        float4 b = *reinterpret_cast<const float4*>(y + first);
        *reinterpret_cast<float4*>(x + first) = make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
        return;
    }
    for (u32 i = first; i < elements; i++) { x[i] = f(x[i], y[i]); }
}
