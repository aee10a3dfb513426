// The driver's functions of graphs, a part of libcuda.cpp.
#pragma once

namespace {

// CUDA_KERNEL_NODE_PARAMS_v2
struct NodeParams {
    void* function;
    unsigned grid[3], block[3], shared_bytes;
    void **params, **extra;
    void *kernel, *context;
};

// A launch with copies of its arguments.
struct Node {
    Module* kernel;
    const Node* after = nullptr; // which comes before it
    unsigned grid[3], block[3], shared_bytes;
    std::vector<std::vector<uint64_t>> arguments;

    // False: the driver refuses these parameters.
    bool set(const NodeParams& given) {
        kernel = static_cast<Module*>(given.function);
        if (!kernel || given.extra || given.kernel || !can_launch(kernel, given.grid, given.shared_bytes)) { return false; }
        memcpy(grid, given.grid, sizeof grid);
        memcpy(block, given.block, sizeof block);
        shared_bytes = given.shared_bytes;
        arguments.clear();
        for (const size_t* size = kernel->sizes(); *size; size++) {
            std::vector<uint64_t> argument((*size + 7) / 8);
            memcpy(argument.data(), given.params[arguments.size()], *size);
            arguments.push_back(std::move(argument));
        }
        return true;
    }
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes; // each after the one before it
};

struct Executable {
    const Graph* of;
    std::vector<Node> nodes;
};

constexpr size_t GRAPH_BYTES = 4 << 10, EXECUTABLE_BYTES = 64 << 10;
std::set<Graph*> graphs;
std::set<Executable*> executables;

} // namespace

API int cuGraphCreate(void** graph, unsigned flags) {
    BEGIN if (flags != 0) { return 1; }
    if (GRAPH_BYTES > total_bytes() - used_bytes) { return 2; }
    used_bytes += GRAPH_BYTES;
    *graph = *graphs.insert(new Graph{}).first;
    return 0;
}
API int cuGraphAddKernelNode_v2(void** node, void* raw, void* const* before, size_t n_before, const NodeParams* params) {
    BEGIN Graph* graph = static_cast<Graph*>(raw);
    if (!graphs.count(graph)) { return 1; }
    auto added = std::make_unique<Node>();
    if (n_before > 1 || !added->set(*params)) { return 1; }
    added->after = n_before ? static_cast<const Node*>(*before) : nullptr;
    *node = added.get();
    graph->nodes.push_back(std::move(added));
    return 0;
}
API int cuGraphAddDependencies_v2(void* graph, void* const* from, void* const* to, const unsigned char* edge, size_t n) {
    BEGIN if (!graphs.count(static_cast<Graph*>(graph)) || n != 1) { return 1; }
    // Programmatic: from that port, to all of the node.
    static const unsigned char PROGRAMMATIC[8] = {1, 0, 1};
    Node* node = static_cast<Node*>(*to);
    if (memcmp(edge, PROGRAMMATIC, 8) != 0 || node->after) { return 1; }
    node->after = static_cast<const Node*>(*from);
    return 0;
}
API int cuGraphInstantiateWithFlags(void** executable, void* raw, unsigned long long flags) {
    BEGIN Graph* graph = static_cast<Graph*>(raw);
    if (!graphs.count(graph) || flags != 0) { return 1; }
    // Real graphs may have any shape. Those of kvist are a chain.
    const Node* last = nullptr;
    for (auto& node : graph->nodes) {
        if (node->after != last) { return 1; }
        last = node.get();
    }
    if (EXECUTABLE_BYTES > total_bytes() - used_bytes) { return 2; }
    used_bytes += EXECUTABLE_BYTES;
    auto made = new Executable{graph, {}};
    for (auto& node : graph->nodes) { made->nodes.push_back(*node); }
    executables.insert(made);
    *executable = made;
    return 0;
}
API int cuGraphExecKernelNodeSetParams_v2(void* raw, void* node, const NodeParams* params) {
    BEGIN Executable* executable = static_cast<Executable*>(raw);
    if (!executables.count(executable) || !graphs.count(const_cast<Graph*>(executable->of))) { return 1; }
    auto& nodes = executable->of->nodes;
    for (size_t i = 0; i < nodes.size(); i++) {
        if (nodes[i].get() != node) { continue; }
        // The driver would allow another kernel. Here it is a mistake.
        if (nodes[i]->kernel != params->function) { return 910; }
        Node changed;
        if (!changed.set(*params)) { return 1; }
        executable->nodes[i] = std::move(changed);
        return 0;
    }
    return 1;
}
API int cuGraphLaunch(void* raw, void* stream) {
    BEGIN Executable* executable = static_cast<Executable*>(raw);
    if (!executables.count(executable)) { return 1; }
    upload(stream);
    for (Node& node : executable->nodes) {
        if (int code = wanted_failure("node")) { return sticky = code; }
        std::vector<void*> params;
        for (auto& argument : node.arguments) { params.push_back(argument.data()); }
        if (int code = run(node.kernel, node.grid, node.block, node.shared_bytes, params.data())) { return code; }
    }
    return 0;
}
API int cuGraphExecDestroy(void* raw) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (!executables.erase(static_cast<Executable*>(raw))) { return 1; }
    used_bytes -= EXECUTABLE_BYTES;
    delete static_cast<Executable*>(raw);
    return 0;
}
API int cuGraphDestroy(void* raw) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (!graphs.erase(static_cast<Graph*>(raw))) { return 1; }
    used_bytes -= GRAPH_BYTES;
    delete static_cast<Graph*>(raw);
    return 0;
}
