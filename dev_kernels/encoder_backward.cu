// Gradients of the embeddings: dwte[inp[b, t], :] += dout[b, t, :] and dwpe[t, :] += dout[b, t, :] over all b and t.
//
// Versions:
//
//   1  one thread per four channels of each t: atomic additions to dwte, where positions with the same token meet; none
//      to dwpe, since a thread has all positions of its t
//   2  one thread per channel, over all positions: nobody else touches its column, so no atomics, and always the same
//      order. Deterministic, but slow: there are only C threads
//
// Where C is not a multiple of four, a thread of version 1 has one channel.
//
// Both add to rows of fp32: `sums`, one row per token. For fp32 gradients that is dwte itself, where the row of a
// position is its token. Else a row of dwte, rounded after every addition, would lose small terms, and fp32 rows for
// the whole vocabulary would be several times as big as dout. So `sums` has one row per position, and all positions of
// a token use the row of the last of them: find_last and find_rows name it, add_rows adds it to dwte, rounding once.
#include "common.cuh"

// N consecutive channels: four where C is a multiple of four, else one.
template <class Element, int N>
struct alignas(sizeof(Element) * N) Channels {
    Element values[N];
};

template <class Element, int N>
__device__ inline Channels<Element, N> load_channels(const Element* address) {
    return *reinterpret_cast<const Channels<Element, N>*>(address);
}

// What a sum begins with: the element that it is added to, or 0.
template <class Element, int N>
__device__ inline void load_start(float (&sums)[N], const Element* address, bool accumulate) {
    Channels<Element, N> part = {};
    if (accumulate) part = load_channels<Element, N>(address);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = accumulate ? to_float(part.values[i]) : 0.0f;
}

template <class Element, int N>
__device__ inline void store_sums(Element* address, const float (&sums)[N]) {
    Channels<Element, N> part;
#pragma unroll
    for (int i = 0; i < N; ++i) part.values[i] = from_float<Element>(sums[i]);
    *reinterpret_cast<Channels<Element, N>*>(address) = part;
}

// ------------------------------------------------------------------------------------------------- 1: atomic additions

// N sums at once. Four of them are one operation of the L2 cache from compute capability 9.0 on.
template <class Element, int N>
__device__ inline void add_atomically(float* sums, const Channels<Element, N>& part) {
#if __CUDA_ARCH__ >= 900
    constexpr bool at_once = N == 4;
#else
    constexpr bool at_once = false;
#endif
    if constexpr (at_once) {
        const Element(&terms)[4] = part.values;
        atomicAdd(reinterpret_cast<float4*>(sums),
                  make_float4(to_float(terms[0]), to_float(terms[1]), to_float(terms[2]), to_float(terms[3])));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) atomicAdd(sums + i, to_float(part.values[i]));
    }
}

template <class Element, int N>
__global__ void __launch_bounds__(1024, 1)
encoder_backward1(float* __restrict__ sums, Element* __restrict__ dwpe, const Element* __restrict__ dout,
                  const int* __restrict__ rows, int B, int T, int C, bool accumulate) {
    const int per_row = C / N;
    const Offset thread = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    const int t = thread / per_row, c = thread % per_row * N;
    if (t >= T) return;
    rows += t, dout += Offset(t) * C + c, dwpe += Offset(t) * C + c, sums += c;

    constexpr int batch = 4;  // positions whose loads are under way at the same time
    float of_place[N];
    load_start(of_place, dwpe, accumulate);
#pragma unroll 1
    for (int first = 0; first < B; first += batch) {
        Channels<Element, N> parts[batch];
        int row[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            // The last position takes the place of those that do not exist, so that no load waits for a branch.
            const Offset b = min(first + i, B - 1);
            parts[i] = load_channels<Element, N>(dout + b * T * C);
            row[i] = rows[b * T];
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (first + i < B) {
                add_atomically(sums + Offset(row[i]) * C, parts[i]);
#pragma unroll
                for (int j = 0; j < N; ++j) of_place[j] += to_float(parts[i].values[j]);
            }
        }
    }
    store_sums(dwpe, of_place);
}

// ------------------------------------------------------------------------------------------- 2: one thread per channel

template <class Element>
__global__ void encoder_backward2(float* __restrict__ sums, Element* __restrict__ dwpe,
                                  const Element* __restrict__ dout, const int* __restrict__ rows, int B, int T, int C,
                                  bool accumulate) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    for (Offset position = 0; position < Offset(B) * T; ++position) {
        sums[Offset(rows[position]) * C + c] += to_float(dout[position * C + c]);
    }
    for (Offset t = 0; t < T; ++t) {
        float sum[1];
        load_start(sum, dwpe + t * C + c, accumulate);
        for (int b = 0; b < B; ++b) sum[0] += to_float(dout[(Offset(b) * T + t) * C + c]);
        store_sums(dwpe + t * C + c, sum);
    }
}

// ------------------------------------------------------------------------------------ one row of fp32 per token in use

// last[token] = the last position of the token; -1, which it must hold before, where there is none.
__global__ void find_last(int* __restrict__ last, const int* __restrict__ inp, int positions) {
    const Offset position = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (position < positions) atomicMax(last + inp[position], int(position));
}

__global__ void find_rows(int* __restrict__ rows, const int* __restrict__ last, const int* __restrict__ inp,
                          int positions) {
    const Offset position = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (position < positions) rows[position] = last[inp[position]];
}

// dwte[token, :] += the token's row of sums. A thread has N channels of one position, and works if the row is that
// position's: so each token is added once.
template <class Element, int N>
__global__ void add_rows(Element* __restrict__ dwte, const float* __restrict__ sums, const int* __restrict__ rows,
                         const int* __restrict__ inp, int positions, int C) {
    const int per_row = C / N;
    const Offset thread = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    const Offset position = thread / per_row;
    const int c = thread % per_row * N;
    if (position >= positions || rows[position] != position) return;
    dwte += Offset(inp[position]) * C + c;
    float sum[N];
    load_start(sum, dwte, true);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += sums[position * C + c + i];
    store_sums(dwte, sum);
}
