// Transpose of four dimensions, (d1, d2, d3, d4) -> (d4, d3, d1, d2): out[i4, i3, i1, i2] = inp[i1, i2, i3, i4].
//
// Seen as a matrix, the input has R = d1 * d2 rows of K = d3 * d4 elements. The output has K rows of R elements: column
// k = (i3, i4) of the input is row (i4, i3) of the output. So it is the transpose of a matrix, with its rows in another
// order.
//
// There is one version:
//
//   1  square tiles through shared memory: a warp reads along rows of the input and writes along rows of the output, so
//      that both coalesce; 16 bytes per access where rows begin at multiples of that; small tiles where large
//      ones would leave multiprocessors idle
#include "common.cuh"

// What access number `index` of a tile of Side rows moves: N elements of row `row` from `first` on.
template <int Side, int N>
struct Place {
    static constexpr int per_row = Side / N;
    static constexpr int count = Side * per_row;
    // Loads that are under way at the same time in one thread. More would take more registers than leave room for as
    // many threads as a multiprocessor can hold.
    static constexpr int batch = N == 1 ? 8 : 2;
    int row, first;
    __device__ Place(int index) : row(index / per_row), first(index % per_row * N) {}
};

template <class T, int N>
__device__ inline void load(T (&values)[N], const T* address) {
    if constexpr (N == 1) {
        values[0] = __ldcs(address);
    } else {
        const Packet<T> packet = load_packet_streaming(address);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = packet[i];
    }
}

template <class T, int N>
__device__ inline void store(T* address, const T (&values)[N]) {
    if constexpr (N == 1) {
        *address = values[0];
    } else {
        Packet<T> packet;
#pragma unroll
        for (int i = 0; i < N; ++i) packet[i] = values[i];
        store_packet(address, packet);
    }
}

// Read, Write: elements per access to the input and to the output, one or a packet. Side: of a tile, in elements.
template <class T, int Read, int Write, int Side>
__global__ void __launch_bounds__(1024, 2)
permute1(T* __restrict__ out, const T* __restrict__ inp, int d3, int d4, int R, int K) {
    // tile[k][r]. One word more per row, so that the elements of a column lie in different banks.
    __shared__ T tile[Side][Side + 4 / sizeof(T)];
    const int tiles_per_row = ceil_div(K, Side);
    const int first_r = blockIdx.x / tiles_per_row * Side, first_k = blockIdx.x % tiles_per_row * Side;
    const int rows = min(Side, R - first_r), columns = min(Side, K - first_k);
    inp += Offset(first_r) * K + first_k, out += first_r;

    constexpr int batch = Place<Side, Read>::batch;
    for (int first = threadIdx.x; first < Place<Side, Read>::count; first += batch * blockDim.x) {
        T values[batch][Read];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const Place<Side, Read> at(first + i * blockDim.x);
            if (at.row < rows && at.first < columns) load(values[i], inp + Offset(at.row) * K + at.first);
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const Place<Side, Read> at(first + i * blockDim.x);
            if (at.row < rows && at.first < columns) {
#pragma unroll
                for (int j = 0; j < Read; ++j) tile[at.first + j][at.row] = values[i][j];
            }
        }
    }
    __syncthreads();

    for (int i = threadIdx.x; i < Place<Side, Write>::count; i += blockDim.x) {
        const Place<Side, Write> at(i);
        if (at.row < columns && at.first < rows) {
            const int k = first_k + at.row;
            const Offset row = Offset(k % d4) * d3 + k / d4;
            T values[Write];
#pragma unroll
            for (int j = 0; j < Write; ++j) values[j] = tile[at.row][at.first + j];
            store(out + row * R + at.first, values);
        }
    }
}
