// Token and position embedding: out[b, t, :] = wte[inp[b, t], :] + wpe[t, :].
//
// Versions ("+": what it adds to the one before):
//
//   1  one thread per position (b, t), which walks over the channels
//   2  one thread per element: a warp reads and writes neighbouring channels
//   3  + 16 bytes per access; in large problems (more accesses than threads that the GPU holds at once) four batch rows
//      per thread: one load of wpe serves all, and their loads of wte are under way together
#include "common.cuh"

// -------------------------------------------------------------------------------------------- 1: a thread per position

template <class Element>
__global__ void encoder_forward1(Element* __restrict__ out, const int* __restrict__ inp,
                                 const Element* __restrict__ wte, const Element* __restrict__ wpe, int positions,
                                 int T, int C) {
    const Offset position = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (position >= positions) return;
    out += position * C, wte += Offset(inp[position]) * C, wpe += position % T * C;
    for (int c = 0; c < C; ++c) out[c] = from_float<Element>(to_float(wte[c]) + to_float(wpe[c]));
}

// --------------------------------------------------------------------------------------------- 2: a thread per element

template <class Element>
__global__ void encoder_forward2(Element* __restrict__ out, const int* __restrict__ inp,
                                 const Element* __restrict__ wte, const Element* __restrict__ wpe, int positions,
                                 int T, int C) {
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= Offset(positions) * C) return;
    const int position = i / C, c = i % C;
    const Offset token = Offset(inp[position]) * C + c, place = Offset(position % T) * C + c;
    out[i] = from_float<Element>(to_float(wte[token]) + to_float(wpe[place]));
}

// ----------------------------------------------------------------------------------------------- 3: packets per thread

// N consecutive channels: a packet where rows of C elements begin at multiples of 16 bytes, else one element.
template <class Element, int N>
struct alignas(sizeof(Element) * N) Channels {
    Element values[N];
};

// A thread has N channels of one t, and `Rows` neighbouring values of b. In the order of threads, channels come first,
// then t, so that a warp reads and writes whole stretches of rows.
// More rows need more registers, and bring more bytes under way than a second block would.
// Index: unsigned where that can number all threads, since the first load waits for divisions, which take several times
// as long in 64 bits; else Offset.
template <class Element, int N, int Rows, class Index>
__global__ void __launch_bounds__(1024, Rows > 2 ? 1 : 2)
encoder_forward3(Element* __restrict__ out, const int* __restrict__ inp, const Element* __restrict__ wte,
                 const Element* __restrict__ wpe, int B, int T, int C) {
    using Part = Channels<Element, N>;
    const Index per_row = C / N;
    const Index thread = Index(blockIdx.x) * blockDim.x + threadIdx.x;
    const Index group = thread / per_row;  // of rows: all t of the first values of b, then of the next
    const int c = int(thread % per_row) * N, t = int(group % Index(T));
    const Offset b = Offset(group / Index(T)) * Rows;
    if (b >= B) return;
    const int rows = min(Offset(Rows), B - b);

    Part tokens[Rows];
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        // The last row takes the place of rows that do not exist, so that no load waits for a branch.
        const Offset token = inp[(b + min(i, rows - 1)) * T + t];
        tokens[i] = *reinterpret_cast<const Part*>(wte + token * C + c);
    }
    const Part place = *reinterpret_cast<const Part*>(wpe + Offset(t) * C + c);
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            tokens[i].values[j] = from_float<Element>(to_float(tokens[i].values[j]) + to_float(place.values[j]));
        }
        if (i < rows) *reinterpret_cast<Part*>(out + ((b + i) * T + t) * C + c) = tokens[i];
    }
}
