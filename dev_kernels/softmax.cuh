// What softmax over long rows takes, alone or with a loss behind it: packets of rows that begin anywhere, the largest
// and the sum in one pass, and rows that pass through shared memory.
#pragma once
#include "common.cuh"

// ------------------------------------------------------------------------------------ rows that begin anywhere

// A row of `size` elements in three parts: `head` elements up to the first sector of memory, whole packets, and a tail
// shorter than a packet. A warp's packets are whole sectors then, of which none is fetched or written in two halves.
// Head and tail together, the edges, are fewer elements than a warp has lanes. A row of another tensor has the same
// parts if both tensors begin at a sector and have rows of one length.
template <class T>
struct RowParts {
    static constexpr int kSector = 32 / sizeof(T);  // elements in the 32 bytes that memory moves at once
    static_assert(kSector - 1 + Packet<T>::size - 1 < kWarpSize, "each edge needs a lane");
    int head = 0, packets = 0, edges = 0;

    __device__ RowParts() {}  // an empty row
    __device__ RowParts(const T* row, int size) {
        const int past = reinterpret_cast<unsigned long long>(row) / sizeof(T) % kSector;
        head = min(size, (kSector - past) % kSector);
        packets = (size - head) / Packet<T>::size;
        edges = size - packets * Packet<T>::size;
    }

    // Where in the row edge number i is.
    __device__ int edge(int i) const { return i < head ? i : i + packets * Packet<T>::size; }
};

// Packets first, first + step, ... of those that begin at `packets`, of which there are `count`, at least 1. From
// `count` on it is the last one again: a load that always happens waits for no branch, so all N are under way at once.
template <bool Streaming, class T, int N>
__device__ inline void load_clamped(Packet<T> (&loaded)[N], const T* packets, int first, int step, int count) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const T* address = packets + Offset(min(first + i * step, count - 1)) * Packet<T>::size;
        if constexpr (Streaming) {
            loaded[i] = load_packet_streaming(address);
        } else {
            loaded[i] = load_packet(address);
        }
    }
}

// ------------------------------------------------------------------------------------------ softmax in one pass

// As __expf, but 0 where the result would be below all normal numbers, which saves three instructions of six. For
// terms of a sum that is at least 1, and for factors that rescale a sum to one that is: the sum is the same.
__device__ inline float exp_of_term(float x) {
#ifdef KBENCH_EMULATOR
    return __expf(x);
#else
    constexpr float kLog2E = 1.4426950409f;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2E));
    return result;
#endif
}

// The largest of the numbers seen so far, and the sum of exp(number - largest). The sum is rescaled when a larger
// number comes.
struct SoftmaxSum {
    // Before the first number: finite, as -infinity - -infinity would be NaN where two that saw nothing are merged.
    static constexpr float kLowest = -3.402823466e38f;  // of all finite floats
    float largest = kLowest;
    float sum = 0.0f;

    __device__ void add(float value) {
        const float larger = fmaxf(largest, value);
        sum = sum * expf(largest - larger) + expf(value - larger);
        largest = larger;
    }

    // A packet: the sum is rescaled once for all of it.
    template <class T>
    __device__ void add(const Packet<T>& packet) {
        float larger = largest;
#pragma unroll
        for (int i = 0; i < Packet<T>::size; ++i) larger = fmaxf(larger, to_float(packet[i]));
        float part = exp_of_term(to_float(packet[0]) - larger);
#pragma unroll
        for (int i = 1; i < Packet<T>::size; ++i) part += exp_of_term(to_float(packet[i]) - larger);
        sum = sum * exp_of_term(largest - larger) + part;
        largest = larger;
    }

    // What load_clamped() loaded. Repetitions of the last packet do not change the largest, and are not added. The sum
    // is rescaled once for 16 elements: more would take too many registers as floats, where T is a 16-bit type.
    template <class T, int N>
    __device__ void add(const Packet<T> (&loaded)[N], int first, int step, int count) {
        constexpr int kTogether = 16 / Packet<T>::size;
        static_assert(N % kTogether == 0, "packets are added in groups");
#pragma unroll
        for (int group = 0; group < N; group += kTogether) {
            float larger = largest;
#pragma unroll
            for (int i = group; i < group + kTogether; ++i) {
#pragma unroll
                for (int j = 0; j < Packet<T>::size; ++j) larger = fmaxf(larger, to_float(loaded[i][j]));
            }
            sum *= exp_of_term(largest - larger);
            largest = larger;
#pragma unroll
            for (int i = group; i < group + kTogether; ++i) {
                float part = 0.0f;
#pragma unroll
                for (int j = 0; j < Packet<T>::size; ++j) part += exp_of_term(to_float(loaded[i][j]) - larger);
                sum += first + i * step < count ? part : 0.0f;
            }
        }
    }
};

// That of all lanes, in every lane. All lanes of the warp must call it together.
__device__ inline SoftmaxSum warp_merge(SoftmaxSum of) {
    const float largest = warp_max(of.largest);
    of.sum = warp_sum(of.sum * expf(of.largest - largest));
    of.largest = largest;
    return of;
}

// That of all threads of a one-dimensional block of whole warps, in every thread. All threads must call it together;
// it may be called any number of times.
__device__ inline SoftmaxSum block_merge(SoftmaxSum of) {
    __shared__ float largest[kMaxWarps], sums[kMaxWarps];
    of = warp_merge(of);
    __syncthreads();  // an earlier call's values have been read by everybody
    if (lane_index() == 0) largest[warp_index()] = of.largest, sums[warp_index()] = of.sum;
    __syncthreads();
    SoftmaxSum of_warp;
    if (lane_index() < int(blockDim.x) / kWarpSize) {
        of_warp.largest = largest[lane_index()], of_warp.sum = sums[lane_index()];
    }
    return warp_merge(of_warp);
}

// -------------------------------------------------------------------------- rows that pass through shared memory

// Steps of one packet per thread that each row of `size` elements takes, at least 1.
template <class T>
__device__ inline int steps_of(int size) {
    return max(1, ceil_div(size / Packet<T>::size, blockDim.x));
}

// Goes step by step through a block's rows, which are blockIdx.x, blockIdx.x + gridDim.x, ... of `rows`. All rows take
// the same number of steps; in the last ones some threads, or all, have no packet.
template <class T>
class RowWalk {
    const T* row;       // where the current row begins
    const Offset next;  // elements from there to the block's next row
    const int size, steps;
    int rows_left, step;
    const T* of_thread;  // where this thread's packet of this step would begin
    int left;            // packets of the row from there on

    __device__ void enter_row() {
        const RowParts<T> parts = rows_left > 0 ? RowParts<T>(row, size) : RowParts<T>();
        step = 0, left = parts.packets - int(threadIdx.x);
        of_thread = row + parts.head + threadIdx.x * Packet<T>::size;
    }

public:
    __device__ RowWalk(const T* inp, Offset stride, int rows, int size)
        : row(inp + blockIdx.x * stride), next(gridDim.x * stride), size(size), steps(steps_of<T>(size)),
          rows_left(ceil_div(rows - int(blockIdx.x), gridDim.x)) {
        enter_row();
    }

    // The calling thread's packet of this step.
    __device__ bool has_packet() const { return left > 0; }
    __device__ const T* packet() const { return of_thread; }

    __device__ void advance() {
        left -= blockDim.x, of_thread += blockDim.x * Packet<T>::size;
        if (++step == steps) --rows_left, row += next, enter_row();
    }

    // Has L2 fetch the whole block's packets of the step that comes `steps_ahead` later, in this row or the next.
    __device__ void fetch(int steps_ahead) const {
        int at = step + steps_ahead;
        const bool in_next = at >= steps;
        if (in_next) at -= steps;
        if (rows_left <= in_next) return;
        const T* const begin = in_next ? row + next : row;
        const RowParts<T> parts(begin, size);
        const int first = at * blockDim.x;
        const int count = min(parts.packets - first, int(blockDim.x));
        if (count > 0) fetch_into_l2(begin + parts.head + first * Packet<T>::size, count * sizeof(int4));
    }
};

// One place of a thread after the other, in shared memory that has `places` for each thread, and from the start again.
class RoundTrip {
    int4* at;
    int left;  // places from here on

public:
    __device__ RoundTrip(int4* held, int places) : at(held + threadIdx.x), left(places) {}
    __device__ int4& place() const { return *at; }
    __device__ void move_on(int places) {
        at += blockDim.x;
        if (--left == 0) at -= places * blockDim.x, left = places;
    }
};

// The packets of a block's rows on their way through shared memory. It has room for those of one row and of `Ahead`
// steps more. In each step every thread takes one packet of a row out for good, has another one loaded into its place,
// which is needed `Ahead` steps later, and reads the one that arrives. So loads are under way all the time, even while
// a block waits for its last thread at the end of a row; they take no registers, and no lines of L1, of which a row in
// shared memory leaves few. A packet is loaded and read by one and the same thread: no barrier guards it.
template <class T, int Ahead>
class RowRing {
    // L2 fetches what is loaded so many steps later: loads then take as long as from L2, and few are enough.
    static constexpr int kFetched = 4;

    const int places;
    RoundTrip leaves, arrives;
    AsyncCopies<Ahead> copies;
    RowWalk<T> walk;
    int turn;  // steps until this thread has L2 fetch: one of each warp does it, one after the other

public:
    // Rows of `size` elements, `stride` apart. held: dynamic shared memory.
    __device__ RowRing(int4* held, const T* inp, Offset stride, int rows, int size)
        : places(steps_of<T>(size) + Ahead), leaves(held, places), arrives(held, places),
          walk(inp, stride, rows, size), turn(lane_index() == 0 ? warp_index() : 0x7fffffff) {
#pragma unroll 1  // it is long, and runs once
        for (int i = 0; i < Ahead; ++i) refill();
    }

    // This thread's packet of the row before, in this step.
    __device__ const int4& leaving() const { return leaves.place(); }

    // Loads another one into its place.
    __device__ void refill() {
        copies.start(walk.has_packet(), &leaves.place(), walk.packet());
        if (--turn < 0) {
            walk.fetch(kFetched);
            turn = blockDim.x / kWarpSize - 1;
        }
        walk.advance();
        leaves.move_on(places);
    }

    // This thread's packet of the current row, in this step: it waits for it. Called once per step, after refill().
    __device__ const int4& arrived() {
        copies.wait();
        const int4& packet = arrives.place();
        arrives.move_on(places);
        return packet;
    }
};
