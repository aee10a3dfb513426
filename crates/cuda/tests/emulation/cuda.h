// CUDA's language on the host, as far as the kernels use it. Stands in front of a kernel's source; KVIST_ENTRY behind it.
//
// The threads of a block are fibers of one thread of the host: each runs until it waits at a barrier or an exchange within
// its warp, then the next one runs. A barrier that only some threads of a block reach, two different barriers, and an
// exchange that not every lane of its mask joins are errors, which a GPU would not report. Shared memory is filled with
// NaN before every block, and blocks run one after the other.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <utility>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#ifdef __SANITIZE_ADDRESS__
// In the usual section the sanitizer puts red zones around every variable.
#define __shared__ static
#else
#define __shared__ static __attribute__((section("kvist_shared")))
extern "C" char __start_kvist_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_kvist_shared[] __attribute__((weak, visibility("hidden")));
#endif
#define DYNAMIC_SHARED(name) uint4* name = reinterpret_cast<uint4*>(kvist::dynamic_shared)

struct uint3_ {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
// As CUDA has them: a mixed pair is unsigned.
static inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
static inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
template <class To, class From>
static inline To kvist_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned x) { return kvist_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return kvist_bits<unsigned>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
// Bytes of two words, each chosen by three bits of the selector.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = both >> (8 * (selector >> (4 * i) & 7)) & 0xff;
        result |= byte << (8 * i);
    }
    return result;
}

static uint3_ threadIdx, blockIdx, blockDim, gridDim;

namespace kvist {

enum State { READY, AT_BARRIER, AT_NAMED, IN_WARP, ENDED };

struct Fiber {
    void* stack_pointer;
    State state;
    int line;          // of the barrier or exchange it waits at
    unsigned mask;     // of the exchange
    unsigned named[2]; // the number of the barrier AT_NAMED, and of its threads
    unsigned exchanges; // that it has joined
    uint64_t given[2]; // what it gave to the last two exchanges
};

constexpr size_t STACK = 64 << 10;
constexpr unsigned MOST = 1024;

static Fiber fibers[MOST];
static char* stacks;
static void* scheduler_pointer;
static unsigned current, n_threads;
static void (*body)();
static char* dynamic_shared;
static char error[512];

// Saves the callee's registers on its stack, and continues where `to` has saved its own.
extern "C" void kvist_switch(void** from, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
    .text
    .hidden kvist_switch
    .globl kvist_switch
    .type kvist_switch, @function
kvist_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size kvist_switch, .-kvist_switch
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .hidden kvist_switch
    .globl kvist_switch
    .type kvist_switch, %function
kvist_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size kvist_switch, .-kvist_switch
)");
#else
#error "the emulation of CUDA switches stacks on x86-64 and AArch64 only"
#endif

#ifdef __SANITIZE_ADDRESS__
// The scheduler's stack. A fiber learns of it when it continues.
static const void* home;
static size_t home_size;
#endif

// To another stack: that of `fiber`, or of the scheduler if there is none.
static void switch_stacks(void** from, void* to, Fiber* fiber, bool last) {
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    const void* bottom = fiber ? stacks + (fiber - fibers) * STACK : home;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, bottom, fiber ? STACK : home_size);
    kvist_switch(from, to);
    size_t size;
    __sanitizer_finish_switch_fiber(fake, &bottom, &size);
    if (!fiber) { home = bottom, home_size = size; }
#else
    (void)fiber, (void)last;
    kvist_switch(from, to);
#endif
}

static void pause(State state, int line) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    fiber.line = line;
    switch_stacks(&fiber.stack_pointer, scheduler_pointer, nullptr, state == ENDED);
}

static void begin_fiber() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &home, &home_size);
#endif
    body();
    pause(ENDED, 0);
    abort(); // a fiber that has ended is not continued
}

static void prepare(unsigned t) {
#ifdef __SANITIZE_ADDRESS__
    // The fiber before has never returned from its last calls: what the sanitizer has marked of their frames is no error of this one.
    __asan_unpoison_memory_region(stacks + t * STACK, STACK);
#endif
    void** top = reinterpret_cast<void**>(stacks + (t + 1) * STACK);
#if defined(__x86_64__)
    // As if `begin_fiber` had been called: its return address makes the stack 16 bytes off by 8.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&begin_fiber);
    for (int i = 0; i < 6; i++) { *--top = nullptr; }
#else
    top -= 20;
    memset(top, 0, 160);
    top[11] = reinterpret_cast<void*>(&begin_fiber);
#endif
    fibers[t] = Fiber{top, READY, 0, 0, {0, 0}, 0, {0, 0}};
}

// Lets the fibers continue that wait for each other and are all there. False if there are none, with the reason.
static bool release() {
    bool any = false;
    for (unsigned warp = 0; warp < n_threads; warp += 32) {
        for (unsigned lane = 0; lane < 32 && warp + lane < n_threads; lane++) {
            Fiber& first = fibers[warp + lane];
            if (first.state != IN_WARP) { continue; }
            bool all = true;
            for (unsigned other = 0; other < 32; other++) {
                if (!(first.mask >> other & 1)) { continue; }
                const Fiber* fiber = warp + other < n_threads ? &fibers[warp + other] : nullptr;
                all = all && fiber && fiber->state == IN_WARP && fiber->line == first.line &&
                      fiber->mask == first.mask && fiber->exchanges == first.exchanges;
            }
            if (!all) { continue; }
            for (unsigned other = 0; other < 32; other++) {
                if (first.mask >> other & 1) { fibers[warp + other].state = READY; }
            }
            any = true;
        }
    }
    for (unsigned t = 0; t < n_threads; t++) {
        if (fibers[t].state != AT_NAMED) { continue; }
        auto waits = [&](const Fiber& fiber) {
            return fiber.state == AT_NAMED && fiber.named[0] == fibers[t].named[0] && fiber.named[1] == fibers[t].named[1];
        };
        unsigned n = 0;
        for (unsigned other = 0; other < n_threads; other++) { n += waits(fibers[other]); }
        if (n != fibers[t].named[1]) { continue; }
        for (unsigned other = n_threads; other-- > 0;) {
            if (other != t && waits(fibers[other])) { fibers[other].state = READY; }
        }
        fibers[t].state = READY;
        any = true;
    }
    if (any) { return true; }
    unsigned waiting = 0, ended = 0, line = 0;
    for (unsigned t = 0; t < n_threads; t++) {
        const Fiber& fiber = fibers[t];
        if (fiber.state == IN_WARP) {
            snprintf(error, sizeof error, "line %d: not every lane of the mask %08x joins the exchange of thread %u",
                     fiber.line, fiber.mask, t);
            return false;
        }
        if (fiber.state == AT_NAMED) {
            snprintf(error, sizeof error, "line %d: not all of %u threads come to barrier %u", fiber.line, fiber.named[1],
                     fiber.named[0]);
            return false;
        }
        ended += fiber.state == ENDED;
        if (fiber.state == AT_BARRIER) {
            if (waiting > 0 && line != static_cast<unsigned>(fiber.line)) {
                snprintf(error, sizeof error, "threads of a block wait at the barriers of lines %u and %d", line, fiber.line);
                return false;
            }
            line = fiber.line;
            waiting++;
        }
    }
    if (ended > 0) {
        snprintf(error, sizeof error, "line %u: %u threads wait at a barrier, %u have ended", line, waiting, ended);
        return false;
    }
    for (unsigned t = 0; t < n_threads; t++) { fibers[t].state = READY; }
    return true;
}

// Waits at barrier `number` until `n` threads of the block do.
[[maybe_unused]] static void meet(unsigned number, unsigned n, int line) {
    fibers[current].named[0] = number;
    fibers[current].named[1] = n;
    pause(AT_NAMED, line);
}

static bool run_block() {
#ifndef __SANITIZE_ADDRESS__
    if (__start_kvist_shared) { memset(__start_kvist_shared, 0xff, __stop_kvist_shared - __start_kvist_shared); }
#endif
    for (unsigned t = 0; t < n_threads; t++) { prepare(t); }
    for (;;) {
        unsigned ended = 0;
        for (unsigned t = 0; t < n_threads; t++) {
            if (fibers[t].state == READY) {
                current = t;
                threadIdx.x = t;
                switch_stacks(&scheduler_pointer, fibers[t].stack_pointer, &fibers[t], false);
            }
            ended += fibers[t].state == ENDED;
        }
        if (ended == n_threads) { return true; }
        if (!release()) { return false; }
    }
}

// Gives a value to the other lanes of the mask, and waits until all have given theirs.
[[maybe_unused]] static unsigned exchange(unsigned mask, uint64_t value, int line) {
    Fiber& fiber = fibers[current];
    unsigned turn = ++fiber.exchanges % 2;
    fiber.given[turn] = value;
    fiber.mask = mask;
    pause(IN_WARP, line);
    return turn;
}

template <class T>
static T shuffle_xor(unsigned mask, T value, unsigned lanes, int line) {
    static_assert(sizeof(T) == 4, "a shuffle of 32 bits");
    unsigned turn = exchange(mask, kvist_bits<unsigned>(value), line);
    return kvist_bits<T>(static_cast<unsigned>(fibers[current ^ lanes].given[turn]));
}

template <class T>
static T shuffle(unsigned mask, T value, unsigned lane, int line) {
    static_assert(sizeof(T) == 4, "a shuffle of 32 bits");
    unsigned turn = exchange(mask, kvist_bits<unsigned>(value), line);
    return kvist_bits<T>(static_cast<unsigned>(fibers[current / 32 * 32 + lane % 32].given[turn]));
}

// What every lane of the warp has, for instructions that a whole warp computes.
template <class T>
static void all_lanes(T (&all)[32], const T& mine, int line) {
    unsigned turn = exchange(0xffffffffu, reinterpret_cast<uint64_t>(&mine), line);
    for (unsigned lane = 0; lane < 32; lane++) {
        all[lane] = *reinterpret_cast<const T*>(fibers[current / 32 * 32 + lane].given[turn]);
    }
    // `mine` lies on this fiber's stack: all have to read it before any goes on.
    exchange(0xffffffffu, 0, line);
}

[[maybe_unused]] static bool any(unsigned mask, bool value, int line) {
    unsigned turn = exchange(mask, value, line);
    bool result = false;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) { result = result || fibers[current / 32 * 32 + lane].given[turn] != 0; }
    }
    return result;
}

[[maybe_unused]] static unsigned ballot(unsigned mask, bool value, int line) {
    unsigned turn = exchange(mask, value, line);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) { result |= static_cast<unsigned>(fibers[current / 32 * 32 + lane].given[turn]) << lane; }
    }
    return result;
}

[[maybe_unused]] static unsigned reduce_max(unsigned mask, unsigned value, int line) {
    unsigned turn = exchange(mask, value, line);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (mask >> lane & 1) {
            result = max(result, static_cast<unsigned>(fibers[current / 32 * 32 + lane].given[turn]));
        }
    }
    return result;
}

static const char* launch(const unsigned* grid, const unsigned* block, size_t shared_bytes) {
    if (block[0] > MOST || block[1] != 1 || block[2] != 1) { return "a block has one dimension of at most 1024 threads"; }
    n_threads = block[0];
    if (!stacks) {
        void* found = mmap(nullptr, MOST * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) { return "no memory for the stacks of a block"; }
        stacks = static_cast<char*>(found);
    }
    // Exactly as long as the launch says, so that the sanitizer sees what lies behind it. Aligned as a kernel may ask for.
    void* shared = nullptr;
    if (shared_bytes > 0 && posix_memalign(&shared, 1024, shared_bytes)) { return "no shared memory"; }
    dynamic_shared = static_cast<char*>(shared);
    blockDim = {block[0], block[1], block[2]};
    gridDim = {grid[0], grid[1], grid[2]};
    threadIdx = {0, 0, 0};
    error[0] = 0;
    bool right = true;
    for (unsigned z = 0; z < grid[2] && right; z++) {
        for (unsigned y = 0; y < grid[1] && right; y++) {
            for (unsigned x = 0; x < grid[0] && right; x++) {
                blockIdx = {x, y, z};
                if (shared_bytes > 0) { memset(dynamic_shared, 0xff, shared_bytes); }
                right = run_block();
            }
        }
    }
    free(dynamic_shared);
    return right ? nullptr : error;
}

// Calls a kernel with the arguments at `params`, as cuLaunchKernel has them: a pointer to each.
static void** params;

template <auto KERNEL, class... T, size_t... I>
static void call(void (*)(T...), std::index_sequence<I...>) {
    KERNEL(*static_cast<T*>(params[I])...);
}

template <auto KERNEL, class... T>
static void run_kernel(void (*kernel)(T...)) {
    call<KERNEL>(kernel, std::index_sequence_for<T...>{});
}

// The sizes of a kernel's arguments, then 0.
template <class... T>
static const size_t* sizes(void (*)(T...)) {
    static const size_t all[] = {sizeof(T)..., 0};
    return all;
}

template <auto KERNEL>
static const char* run_grid(void** given, const unsigned* grid, const unsigned* block, size_t shared_bytes) {
    // Emulated GPUs that run at the same time share a loaded kernel, and so all of the state above.
    static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&launching);
    params = given;
    body = [] { run_kernel<KERNEL>(KERNEL); };
    const char* wrong = launch(grid, block, shared_bytes);
    // The next launch may write `error` before the caller has read it.
    static thread_local char message[sizeof error];
    if (wrong) { wrong = strcpy(message, wrong); }
    pthread_mutex_unlock(&launching);
    return wrong;
}

} // namespace kvist

#define __syncthreads() kvist::pause(kvist::AT_BARRIER, __LINE__)
#define __shfl_xor_sync(mask, value, lanes) kvist::shuffle_xor(mask, value, lanes, __LINE__)

// Threads of a block are fibers of one thread, and run to their next barrier or shuffle.
inline unsigned atomicAdd(unsigned* at, unsigned by) {
    unsigned before = *at;
    *at += by;
    return before;
}
#define __syncwarp() ((void)kvist::exchange(0xffffffffu, 0, __LINE__))
#define __shfl_sync(mask, value, lane) kvist::shuffle(mask, value, lane, __LINE__)
#define kvist_all_lanes(all, mine) kvist::all_lanes(all, mine, __LINE__)
#define __ballot_sync(mask, value) kvist::ballot(mask, value, __LINE__)
#define __reduce_max_sync(mask, value) kvist::reduce_max(mask, value, __LINE__)
#define __any_sync(mask, value) kvist::any(mask, value, __LINE__)

// What a compiled kernel shows: `kvist_launch`, which returns null or what went wrong, and the sizes of its arguments.
#define KVIST_ENTRY(kernel)                                                                                          \
    extern "C" __attribute__((visibility("default"))) const char* kvist_launch(                                      \
        void** params, const unsigned* grid, const unsigned* block, size_t shared_bytes) {                           \
        return kvist::run_grid<kernel>(params, grid, block, shared_bytes);                                           \
    }                                                                                                                \
    extern "C" __attribute__((visibility("default"))) const size_t* kvist_sizes() { return kvist::sizes(kernel); }
