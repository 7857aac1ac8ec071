// CUDA's host functions for an exported program that runs on the emulator: included behind cuda_emulator.h.
//
// The test turns the one launch in the program's text into `on_cpu::launch(...)`. Memory is filled as the program asks
// for; times are not measured.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// Mirrors of report.h and of the request in launch.cpp, as runtime.py has them.
namespace emu {
struct Report {
    char kind[24], message[2048], file[1024];
    int32_t line, has_thread;
    uint32_t block[3], thread[3];
    int32_t frames, is_write;
    uint64_t pc[8], address;
};
struct Request {
    const Kernel* kernel;
    const void* module;
    void** parameters;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, workers;
    int32_t order;
    uint32_t seed;
    double time_limit;
    void* counter;  // of accesses: none
};
}  // namespace emu
extern "C" const void* emu_find_module(const void* code);
extern "C" void emu_start(const emu::Request* request);
extern "C" int emu_wait(double seconds, emu::Report* report);

namespace on_cpu {

// The kernel itself is the parameter behind its last one.
template <class... P, int... i>
void call_with(void** parameters, std::integer_sequence<int, i...>) {
    auto kernel = *static_cast<void (**)(P...)>(parameters[sizeof...(P)]);
    kernel(*static_cast<std::remove_cv_t<P>*>(parameters[i])...);
}
template <class... P>
void call(void** parameters) {
    call_with<P...>(parameters, std::make_integer_sequence<int, int(sizeof...(P))>{});
}

template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, std::remove_cv_t<P>... arguments) {
    void* parameters[] = {static_cast<void*>(&arguments)..., &kernel};
    const emu::Kernel record = {"", call<P...>, ""};
    const void* module = emu_find_module(reinterpret_cast<const void*>(&call<P...>));
    const emu::Request request = {&record, module, parameters, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
                                  uint32_t(shared), 2, 0, 0, 30, nullptr};
    emu::Report report = {};
    emu_start(&request);
    while (!emu_wait(1.0, &report)) continue;
    if (report.kind[0]) {
        std::fprintf(stderr, "emulator: %s: %s\n", report.kind, report.message);
        std::exit(2);
    }
}

}  // namespace on_cpu

using cudaError_t = int;
using cudaStream_t = void*;
using cudaEvent_t = void*;
enum { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaDevAttrL2CacheSize };
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
};

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {"CPU emulator", 9, 0, 3};
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 1 << 20, cudaSuccess; }
template <class Function>
cudaError_t cudaFuncSetAttribute(Function, int, int) {
    return cudaSuccess;
}
template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    *pointer = static_cast<T*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* to, int byte, size_t bytes) { return std::memset(to, byte, bytes), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) { return cudaMemset(to, byte, bytes); }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = nullptr, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    return *milliseconds = 10.0f, cudaSuccess;
}
