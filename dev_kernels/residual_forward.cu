// Residual connection: out = inp1 + inp2, element by element, added in fp32 and rounded once to the stored type.
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per element
//   2  + 16 bytes per access, two packets of each input under way in each thread, streaming loads
//
// A sum of two numbers has one correctly rounded value, and adding in fp32 before rounding to bf16 or fp16 gives it
// (24 bits are at least 2 * 11 + 2), so every version leaves the same bits. `out` may be the memory of an input: a
// thread loads its elements before it stores them, and no other thread touches them. Hence no __restrict__.
#include "common.cuh"

template <class T>
__device__ inline T sum(T a, T b) {
    return from_float<T>(to_float(a) + to_float(b));
}

template <class T>
__global__ void residual_forward1(T* out, const T* inp1, const T* inp2, Offset count) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = sum(inp1[i], inp2[i]);
}

// Packets: of each input, per thread. The elements of a last block that has less than a whole tile move one by one.
template <class T, int Packets>
__global__ void residual_forward2(T* out, const T* inp1, const T* inp2, Offset count) {
    constexpr int kPacket = Packet<T>::size;
    const int tile = Packets * kPacket * blockDim.x;
    const Offset start = Offset(blockIdx.x) * tile;
    out += start, inp1 += start, inp2 += start;
    if (count - start < tile) {
        for (int i = threadIdx.x; i < count - start; i += blockDim.x) out[i] = sum(inp1[i], inp2[i]);
        return;
    }

    Packet<T> a[Packets], b[Packets];
#pragma unroll
    for (int k = 0; k < Packets; ++k) {
        const int first = (k * blockDim.x + threadIdx.x) * kPacket;
        a[k] = load_packet_streaming(inp1 + first);
        b[k] = load_packet_streaming(inp2 + first);
    }
    // Ordinary stores: whatever comes next reads `out`.
#pragma unroll
    for (int k = 0; k < Packets; ++k) {
#pragma unroll
        for (int i = 0; i < kPacket; ++i) a[k][i] = sum(a[k][i], b[k][i]);
        store_packet(out + (k * blockDim.x + threadIdx.x) * kPacket, a[k]);
    }
}
