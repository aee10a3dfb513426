// CUDA's driver and NVRTC for tests without a GPU: the functions that src/ffi.rs loads, over the host's memory.
//
// NVRTC compiles with the host's C++ compiler (KVIST_CXX, KVIST_CXXFLAGS) to a shared library in KVIST_EMULATION, and its
// "cubin" is that library's path. Everything runs at once, so every event is done; with KVIST_EMULATION_LATE=1 copies to the
// host arrive late, though, and copies from the host begin late. Memory of the device is poisoned when it is allocated, and limited to
// KVIST_EMULATION_BYTES; a block has KVIST_EMULATION_SHARED bytes of shared memory. KVIST_EMULATION_FAIL=function:number[:after] makes a
// function fail, and the context with it, as an illegal address would. `node` instead of a function is a kernel in a graph. Graphs are
// lists of launches, and take memory of the device while they exist.
#include <chrono>
#include <deque>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

typedef const char* (*Launch)(void**, const unsigned*, const unsigned*, size_t);
typedef const size_t* (*Sizes)();

struct Module {
    void* library;
    Launch launch;
    Sizes sizes;
    std::string name;
    size_t dynamic_bytes;
};

struct Program {
    std::string source, name, log, library;
};

std::recursive_mutex mutex;
std::map<uint64_t, size_t> allocations;
size_t used_bytes;
int sticky; // the error that broke the context
std::string message = "emulated";
thread_local bool has_context;
int contexts;

// With KVIST_EMULATION_LATE=1: copies to the host that have not arrived. They arrive when an event behind them is found done, or when the
// stream or the context is waited for.
struct LateCopy {
    void* to;
    std::string bytes;
};
std::deque<LateCopy> late;
uint64_t n_arrived;

// And copies from the host that have not begun. They read what is there when the next operation of their stream runs, when another stream
// waits for an event behind them, when such an event is found done, or when the stream or the context is waited for.
struct LateUpload {
    void* stream;
    uint64_t number, to;
    const void* from;
    size_t bytes;
};
std::deque<LateUpload> uploads;
uint64_t n_uploads;

struct Event {
    std::chrono::steady_clock::time_point at;
    uint64_t n_before; // copies to the host before it
    bool was_asked;
    void* stream;
    uint64_t uploads_before; // the number of the first copy from the host that is not before it
};

uint64_t hash(const std::string& text) {
    uint64_t h = 0xcbf29ce484222325;
    for (unsigned char c : text) { h = (h ^ c) * 0x100000001b3; }
    return h;
}

// A setting: a line NAME=value of the file `settings` beside this library, or a variable of the environment.
std::string environment(const char* name, const char* otherwise) {
    static const std::map<std::string, std::string> settings = [] {
        std::map<std::string, std::string> found;
        Dl_info info;
        if (!dladdr(reinterpret_cast<void*>(&hash), &info)) { return found; }
        std::string path = info.dli_fname;
        std::ifstream file(path.substr(0, path.rfind('/') + 1) + "settings");
        for (std::string line; std::getline(file, line);) {
            size_t equals = line.find('=');
            if (equals != std::string::npos) { found[line.substr(0, equals)] = line.substr(equals + 1); }
        }
        return found;
    }();
    auto found = settings.find(name);
    if (found != settings.end()) { return found->second; }
    const char* text = getenv(name);
    return text && *text ? text : otherwise;
}

size_t total_bytes() {
    return strtoull(environment("KVIST_EMULATION_BYTES", "8589934592").c_str(), nullptr, 10);
}

// Of a block: by default as on Ampere's small GPUs.
int max_shared_bytes() {
    return atoi(environment("KVIST_EMULATION_SHARED", "101376").c_str());
}

// The error that the environment wants from a function, after some calls of it.
int wanted_failure(const char* function) {
    static std::map<std::string, int> calls;
    std::string wanted = environment("KVIST_EMULATION_FAIL", "");
    size_t colon = wanted.find(':');
    if (colon == std::string::npos || wanted.substr(0, colon) != function) { return 0; }
    size_t second = wanted.find(':', colon + 1);
    int after = second == std::string::npos ? 0 : atoi(wanted.c_str() + second + 1);
    return calls[wanted]++ >= after ? atoi(wanted.c_str() + colon + 1) : 0;
}

// What every call on a context begins with.
int enter(const char* function) {
    if (!has_context) { return 201; }
    if (sticky) { return sticky; }
    return wanted_failure(function);
}

// The copies to the host up to one number, or all of them, arrive.
void arrive(uint64_t up_to = UINT64_MAX) {
    for (; !late.empty() && n_arrived < up_to; n_arrived++) {
        memcpy(late.front().to, late.front().bytes.data(), late.front().bytes.size());
        late.pop_front();
    }
}

// A stream's copies from the host up to one number, or all of them, have run.
void upload(void* stream, uint64_t up_to = UINT64_MAX) {
    std::deque<LateUpload> others;
    for (const LateUpload& copy : uploads) {
        if (copy.stream == stream && copy.number < up_to) {
            memcpy(reinterpret_cast<void*>(copy.to), copy.from, copy.bytes);
        } else {
            others.push_back(copy);
        }
    }
    uploads.swap(others);
}
void upload_all() {
    while (!uploads.empty()) { upload(uploads.front().stream); }
}

// Whether a range lies in one allocation.
bool inside(uint64_t address, size_t bytes) {
    auto found = allocations.upper_bound(address);
    if (found == allocations.begin()) { return false; }
    --found;
    return address + bytes <= found->first + found->second;
}

std::string read_file(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

} // namespace

#define BEGIN                                                                                                        \
    std::lock_guard<std::recursive_mutex> guard(mutex);                                                              \
    if (int code = enter(__func__)) { return code; }

API int cuInit(unsigned) {
    return wanted_failure(__func__);
}
API int cuDriverGetVersion(int* version) {
    *version = atoi(environment("KVIST_EMULATION_VERSION", "13000").c_str());
    return 0;
}
API int cuGetErrorName(int code, const char** text) {
    static const std::map<int, const char*> names = {
        {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {100, "CUDA_ERROR_NO_DEVICE"},
        {200, "CUDA_ERROR_INVALID_IMAGE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {600, "CUDA_ERROR_NOT_READY"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
        {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"}};
    auto found = names.find(code);
    *text = found == names.end() ? nullptr : found->second;
    return found == names.end() ? 1 : 0;
}
API int cuGetErrorString(int code, const char** text) {
    *text = code == 719 ? message.c_str() : "emulated";
    return 0;
}
API int cuDeviceGetCount(int* n) {
    *n = atoi(environment("KVIST_EMULATION_DEVICES", "1").c_str());
    return 0;
}
API int cuDeviceGet(int* device, int index) {
    int n;
    cuDeviceGetCount(&n);
    if (index < 0 || index >= n) { return 101; }
    *device = index;
    return 0;
}
API int cuDeviceGetName(char* name, int len, int) {
    snprintf(name, len, "emulated on the CPU");
    return 0;
}
API int cuDeviceGetAttribute(int* value, int attribute, int) {
    int capability = atoi(environment("KVIST_EMULATION_CAPABILITY", "90").c_str());
    switch (attribute) {
    case 16: *value = 2; return 0; // multiprocessors
    case 18: *value = 0; return 0; // integrated
    case 75: *value = capability / 10; return 0;
    case 76: *value = capability % 10; return 0;
    case 97: *value = max_shared_bytes(); return 0;
    default: return 1;
    }
}
API int cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = total_bytes();
    return 0;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (contexts++ == 0) { sticky = 0; }
    *context = reinterpret_cast<void*>(uintptr_t(device) + 1);
    return 0;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    contexts--;
    return 0;
}
API int cuCtxSetCurrent(void* context) {
    has_context = context != nullptr;
    return 0;
}
API int cuCtxSynchronize() {
    if (sticky) { uploads.clear(); }
    BEGIN upload_all();
    arrive();
    return 0;
}

API int cuMemGetInfo_v2(size_t* free, size_t* total) {
    BEGIN* total = total_bytes();
    *free = *total - used_bytes;
    return 0;
}
API int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    BEGIN if (bytes == 0) { return 1; }
    if (bytes > total_bytes() - used_bytes) { return 2; }
    void* found = nullptr;
    if (posix_memalign(&found, 256, bytes)) { return 2; }
    memset(found, 0xff, bytes);
    *address = reinterpret_cast<uint64_t>(found);
    allocations[*address] = bytes;
    used_bytes += bytes;
    return 0;
}
API int cuMemFree_v2(uint64_t address) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto found = allocations.find(address);
    if (found == allocations.end()) { return 1; }
    used_bytes -= found->second;
    allocations.erase(found);
    free(reinterpret_cast<void*>(address));
    return 0;
}
API int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    BEGIN* address = malloc(bytes);
    return *address ? 0 : 2;
}
API int cuMemFreeHost(void* address) {
    free(address);
    return 0;
}
API int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
    BEGIN if (!inside(address, bytes)) { return 1; }
    upload(stream);
    memset(reinterpret_cast<void*>(address), value, bytes);
    return 0;
}
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    BEGIN if (!inside(to, bytes)) { return 1; }
    upload(stream);
    if (environment("KVIST_EMULATION_LATE", "") == "1") {
        uploads.push_back({stream, n_uploads++, to, from, bytes});
    } else {
        memcpy(reinterpret_cast<void*>(to), from, bytes);
    }
    return 0;
}
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    BEGIN if (!inside(from, bytes)) { return 1; }
    upload(stream);
    if (environment("KVIST_EMULATION_LATE", "") == "1") {
        late.push_back({to, std::string(reinterpret_cast<const char*>(from), bytes)});
    } else {
        memcpy(to, reinterpret_cast<void*>(from), bytes);
    }
    return 0;
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    BEGIN if (!inside(from, bytes) || !inside(to, bytes)) { return 1; }
    upload(stream);
    memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return 0;
}

API int cuStreamCreate(void** stream, unsigned) {
    BEGIN* stream = malloc(1);
    return 0;
}
API int cuStreamSynchronize(void* stream) {
    BEGIN upload(stream);
    arrive();
    return 0;
}
API int cuStreamWaitEvent(void*, void* raw, unsigned) {
    BEGIN Event* event = static_cast<Event*>(raw);
    upload(event->stream, event->uploads_before);
    return 0;
}
API int cuStreamDestroy_v2(void* stream) {
    free(stream);
    return 0;
}
API int cuEventCreate(void** event, unsigned) {
    BEGIN* event = new Event{};
    return 0;
}
API int cuEventRecord(void* event, void* stream) {
    BEGIN* static_cast<Event*>(event) = {
        std::chrono::steady_clock::now(), n_arrived + late.size(), false, stream, n_uploads};
    return 0;
}
API int cuEventQuery(void* raw) {
    BEGIN Event* event = static_cast<Event*>(raw);
    // The first question comes too early.
    if (n_arrived < event->n_before && !event->was_asked) {
        event->was_asked = true;
        return 600;
    }
    upload(event->stream, event->uploads_before);
    arrive(event->n_before);
    return 0;
}
API int cuEventElapsedTime(float* elapsed, void* first, void* last) {
    BEGIN auto at = [](void* event) { return static_cast<Event*>(event)->at; };
    *elapsed = std::chrono::duration<float, std::milli>(at(last) - at(first)).count();
    return 0;
}
API int cuEventDestroy_v2(void* event) {
    delete static_cast<Event*>(event);
    return 0;
}

API int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
    BEGIN const char* path = static_cast<const char*>(image);
    if (strncmp(path, "emulated:", 9) != 0) { return 200; }
    void* library = dlopen(path + 9, RTLD_NOW | RTLD_LOCAL);
    if (!library) { return 200; }
    auto launch = reinterpret_cast<Launch>(dlsym(library, "kvist_launch"));
    auto sizes = reinterpret_cast<Sizes>(dlsym(library, "kvist_sizes"));
    *module = new Module{library, launch, sizes, "", 0};
    return 0;
}
API int cuModuleUnload(void* module) {
    Module* loaded = static_cast<Module*>(module);
    dlclose(loaded->library);
    delete loaded;
    return 0;
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
    BEGIN static_cast<Module*>(module)->name = name;
    *function = module;
    return 0;
}
API int cuFuncSetAttribute(void* function, int attribute, int value) {
    BEGIN if (attribute != 8 || value > max_shared_bytes()) { return 1; }
    static_cast<Module*>(function)->dynamic_bytes = value;
    return 0;
}
namespace {

// A GPU's limits.
bool can_launch(const Module* kernel, const unsigned* grid, unsigned shared_bytes) {
    bool fits = shared_bytes <= kernel->dynamic_bytes || shared_bytes <= 48 << 10;
    return fits && grid[0] && grid[1] && grid[2] && grid[0] <= 0x7fffffff && grid[1] <= 65535 && grid[2] <= 65535;
}

int run(Module* kernel, const unsigned* grid, const unsigned* block, unsigned shared_bytes, void** params) {
    if (const char* what = kernel->launch(params, grid, block, shared_bytes)) {
        message = kernel->name + ": " + what;
        sticky = 719;
        return sticky;
    }
    return 0;
}

} // namespace

API int cuLaunchKernel(
    void* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y, unsigned block_z,
    unsigned shared_bytes, void* stream, void** params, void**) {
    BEGIN Module* kernel = static_cast<Module*>(function);
    upload(stream);
    unsigned grid[3] = {x, y, z};
    unsigned block[3] = {block_x, block_y, block_z};
    return can_launch(kernel, grid, shared_bytes) ? run(kernel, grid, block, shared_bytes, params) : 1;
}

#include "graphs.h"

// ---- NVRTC

API int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
API int nvrtcGetNumSupportedArchs(int* n) {
    *n = 3;
    return 0;
}
API int nvrtcGetSupportedArchs(int* found) {
    found[0] = 80;
    found[1] = 90;
    found[2] = 100;
    return 0;
}
API int nvrtcCreateProgram(
    void** program, const char* source, const char* name, int, const char* const*, const char* const*) {
    std::string stem = name;
    *program = new Program{source, stem.substr(0, stem.find('.')), "", ""};
    return 0;
}
API int nvrtcDestroyProgram(void** program) {
    delete static_cast<Program*>(*program);
    *program = nullptr;
    return 0;
}
API int nvrtcCompileProgram(void* raw, int, const char* const*) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (int code = wanted_failure(__func__)) { return code; }
    Program& program = *static_cast<Program*>(raw);
    std::string folder = environment("KVIST_EMULATION", ".");
    std::string command = environment("KVIST_CXX", "c++") + " " + environment("KVIST_CXXFLAGS", "") +
                          " " KERNEL_FLAGS " -include " CUDA_H;
    char key[17];
    snprintf(key, sizeof key, "%016llx",
             static_cast<unsigned long long>(hash(program.source + "\n" + command + "\n" + read_file(CUDA_H))));
    program.library = folder + "/" + program.name + "-" + key + ".so";
    if (access(program.library.c_str(), R_OK) == 0) { return 0; }
    // Every copy of this library has a mutex of its own, so two threads of a process may be here.
    std::string part = folder + "/" + program.name + "-" + key + "." + std::to_string(getpid()) + "-" +
                       std::to_string(reinterpret_cast<std::uintptr_t>(&program));
    std::ofstream(part + ".cpp") << program.source << "\nKVIST_ENTRY(" << program.name << ")\n";
    // The compiler needs no sanitizer's library that is preloaded for the kernels.
    command = "env -u LD_PRELOAD " + command + " -o " + part + ".so " + part + ".cpp > " + part + ".log 2>&1";
    bool compiled = system(command.c_str()) == 0;
    program.log = read_file(part + ".log");
    unlink((part + ".log").c_str());
    unlink((part + ".cpp").c_str());
    return compiled && rename((part + ".so").c_str(), program.library.c_str()) == 0 ? 0 : 6;
}
API int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
    *bytes = static_cast<Program*>(program)->log.size() + 1;
    return 0;
}
API int nvrtcGetProgramLog(void* program, char* log) {
    strcpy(log, static_cast<Program*>(program)->log.c_str());
    return 0;
}
API int nvrtcGetCUBINSize(void* program, size_t* bytes) {
    *bytes = static_cast<Program*>(program)->library.size() + 10;
    return 0;
}
API int nvrtcGetCUBIN(void* program, char* image) {
    strcpy(image, ("emulated:" + static_cast<Program*>(program)->library).c_str());
    return 0;
}
API int nvrtcGetPTXSize(void* program, size_t* bytes) {
    return nvrtcGetCUBINSize(program, bytes);
}
API int nvrtcGetPTX(void* program, char* image) {
    return nvrtcGetCUBIN(program, image);
}
