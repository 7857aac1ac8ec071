// Gradients of the embeddings: dwte[inp[b, t], :] += dout[b, t, :] and dwpe[t, :] += dout[b, t, :] over all b and t.
//
// Versions:
//
//   1  one thread per four channels of each t: atomic additions to dwte, where positions with the same token meet; none
//      to dwpe, since a thread has all positions of its t
//   2  one thread per channel, over all positions: nobody else touches its column, so no atomics, and always the same
//      order. Deterministic, but slow: there are only C threads
//   3  positions sorted by token on the device, so that those of one token stand side by side and are added up in
//      registers: deterministic and fast
//
// Where C is not a multiple of four, a thread of version 1 has one channel.
//
// Versions 1 and 2 add to rows of fp32: `sums`, one row per token. For fp32 gradients that is dwte itself, where the
// row of a position is its token. Else a row of dwte, rounded after every addition, would lose small terms, and fp32
// rows for the whole vocabulary would be several times as big as dout. So `sums` has one row per position, and all
// positions of a token use the row of the last of them: find_last and find_rows name it, add_rows adds it to dwte,
// rounding once.
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

// --------------------------------------------------------------------------------------- 3: positions sorted by token

// The sort: least significant digit first, a stable scatter per digit. A block has a tile of 2^tile_bits positions, a
// thread of it one value of the digit. Stable, so positions of one token stay in rising order: it is the order in which
// they are added, and always the same. Atomics count only; integers have the same sum in any order.
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSortWarps = kDigits / kWarpSize;

__device__ inline int digit_of(int token, int pass) { return token >> pass * kDigitBits & (kDigits - 1); }

// counts[tile][digit] for the first pass. Those of later passes, of which the pass before counts, become 0.
__global__ void __launch_bounds__(kDigits)
count_digits(int* __restrict__ counts, const int* __restrict__ inp, int positions, int tile_bits, int passes) {
    __shared__ int of_tile[kDigits];
    const int digit = threadIdx.x, tile = blockIdx.x, tiles = gridDim.x;
    of_tile[digit] = 0;
    __syncthreads();
    const Offset begin = Offset(tile) << tile_bits, end = min(Offset(positions), begin + (1 << tile_bits));
    for (Offset i = begin + threadIdx.x; i < end; i += kDigits) atomicAdd(of_tile + digit_of(inp[i], 0), 1);
    __syncthreads();
    counts += tile * kDigits + digit;
    counts[0] = of_tile[digit];
    for (int pass = 1; pass < passes; ++pass) counts[pass * tiles * kDigits] = 0;
}

// The sum of the values of all threads before this one, in a block of kDigits threads.
__device__ inline int sum_before(int value) {
    __shared__ int of_warp[kSortWarps];
    int sum = value;  // over the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int below = __shfl_up_sync(kFullWarp, sum, distance);
        if (lane_index() >= distance) sum += below;
    }
    if (lane_index() == kWarpSize - 1) of_warp[warp_index()] = sum;
    __syncthreads();
    for (int warp = 0; warp < warp_index(); ++warp) sum += of_warp[warp];
    return sum - value;
}

// Where the positions of this tile that have the digit `threadIdx.x` begin: after all smaller digits, and after those
// of the tiles before.
__device__ inline int first_place(const int* __restrict__ counts) {
    int total = 0, before = 0;
#pragma unroll 16
    for (int tile = 0; tile < int(gridDim.x); ++tile) {
        const int count = counts[tile * kDigits + threadIdx.x];
        total += count;
        before += tile < int(blockIdx.x) ? count : 0;
    }
    return before + sum_before(total);
}

// One pass: (token, row) pairs from one order into the next. First: they are in the order of positions, so rows need
// not be read. counts: of this pass's digit; next_counts: of the next one's, in tiles of the new order.
template <bool First, bool Last>
__global__ void __launch_bounds__(kDigits)
sort_by_digit(int* __restrict__ sorted_tokens, int* __restrict__ sorted_rows, int* __restrict__ next_counts,
              const int* __restrict__ tokens, const int* __restrict__ rows, const int* __restrict__ counts,
              int positions, int tile_bits, int pass) {
    // Where the next position with this digit of this warp goes. A warp has a stretch of the tile.
    __shared__ int places[kSortWarps][kDigits];
    const int warp = warp_index();
#pragma unroll
    for (int other = 0; other < kSortWarps; ++other) places[other][threadIdx.x] = 0;
    __syncthreads();
    const int stretch = (1 << tile_bits) / kSortWarps;
    const Offset begin = (Offset(blockIdx.x) << tile_bits) + warp * stretch;
    const Offset end = min(Offset(positions), begin + stretch);
    for (Offset i = begin + lane_index(); i < end; i += kWarpSize) {
        atomicAdd(&places[warp][digit_of(tokens[i], pass)], 1);
    }
    int place = first_place(counts);  // a barrier: all warps have counted
#pragma unroll
    for (int other = 0; other < kSortWarps; ++other) {
        const int count = places[other][threadIdx.x];
        places[other][threadIdx.x] = place;
        place += count;
    }
    __syncthreads();

    for (Offset first = begin; first < end; first += kWarpSize) {
        const Offset i = first + lane_index();
        const bool exists = i < end;
        const int token = exists ? tokens[i] : 0;
        const int digit = exists ? digit_of(token, pass) : kDigits;
        const unsigned same = __match_any_sync(kFullWarp, digit);
        const int before = __popc(same & ((1u << lane_index()) - 1));  // of them, in this stretch of 32
        const int to = exists ? places[warp][digit] + before : 0;
        __syncwarp();  // all lanes have read the place
        if (exists && before == 0) places[warp][digit] += __popc(same);
        __syncwarp();
        if (exists) {
            sorted_tokens[to] = token;
            sorted_rows[to] = First ? int(i) : rows[i];
            if (!Last) atomicAdd(next_counts + (to >> tile_bits) * kDigits + digit_of(token, pass + 1), 1);
        }
    }
}

// The sums. Sorted positions are cut into pieces of one length, so that a token that is everywhere is as much work for
// a warp as a thousand rare ones. A run, the positions of one token, that lies within a piece is added to dwte at once.
// Parts of longer runs become rows of fp32, at most two for a piece: of a run that began before it, and of one that
// began in it and goes on. A warp has 32 packets of channels, a stripe of the rows, of one piece.
struct Pieces {
    int positions, length, stripes;

    __device__ int begin(int piece) const { return piece * length; }
    __device__ int end(int piece) const { return min(positions, (piece + 1) * length); }
    // Where the sums of the calling lane's packet are, of a part of a run.
    template <int N>
    __device__ float* part(float* parts, int piece, bool began_before, int stripe) const {
        return parts + (((Offset(piece) * 2 + began_before) * stripes + stripe) * kWarpSize + lane_index()) * N;
    }
};

template <int N>
__device__ inline void store_part(float* part, const float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        *reinterpret_cast<float4*>(part + i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    }
}

template <int N>
__device__ inline void add_part(float (&sums)[N], const float* part) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(part + i);
        sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
    }
}

template <class Element>
__device__ inline void add_packet(float (&sums)[Packet<Element>::size], const Packet<Element>& packet) {
#pragma unroll
    for (int i = 0; i < Packet<Element>::size; ++i) sums[i] += to_float(packet[i]);
}

// sums, which become 0, are all that is added to a row: `start` is what stood there.
template <bool Aligned, class Element>
__device__ inline void finish_row(Element* row, int c, int C, const Packet<Element>& start,
                                  float (&sums)[Packet<Element>::size]) {
    Packet<Element> result;
#pragma unroll
    for (int i = 0; i < Packet<Element>::size; ++i) {
        result[i] = from_float<Element>(to_float(start[i]) + sums[i]);
        sums[i] = 0.0f;
    }
    store_row_packet<Aligned>(row, c, C, result);
}

// Packets of a thread whose loads are under way at the same time. Where they are not aligned, every element has a
// register of its own.
template <bool Aligned>
constexpr int kBatch = Aligned ? 4 : 1;

// dwpe: a thread has a packet of one t. Neighbouring threads have neighbouring packets.
template <bool Aligned, class Element>
__device__ inline void add_batch_rows(Element* __restrict__ dwpe, const Element* __restrict__ dout, Offset thread,
                                      int B, int T, int C, bool accumulate) {
    constexpr int N = Packet<Element>::size, batch = kBatch<Aligned>;
    const int per_row = ceil_div(C, N);
    const Offset t = thread / per_row;
    const int c = int(thread - t * per_row) * N;
    if (t >= T) return;
    const Element zero = from_float<Element>(0.0f);
    const Element* const row = dout + t * C;
    int4 start = {};
    if (accumulate) start = bits_of(load_row_packet<Aligned>(dwpe + t * C, c, C, zero));
    float sums[N] = {};
#pragma unroll 1
    for (int first = 0; first < B; first += batch) {
        Packet<Element> packets[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            // The last row takes the place of those that do not exist, so that no load waits for a branch.
            packets[i] = load_row_packet<Aligned>(row + Offset(min(first + i, B - 1)) * T * C, c, C, zero);
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (first + i < B) add_packet(sums, packets[i]);
        }
    }
    finish_row<Aligned>(dwpe + t * C, c, C, packet_of<Element>(start), sums);
}

// dwte: one stripe of one piece.
template <bool Aligned, class Element>
__device__ inline void add_piece(Element* __restrict__ dwte, float* __restrict__ parts,
                                 const Element* __restrict__ dout, const int* __restrict__ tokens,
                                 const int* __restrict__ rows, const Pieces& pieces, int piece, int stripe, int C,
                                 bool accumulate) {
    constexpr int N = Packet<Element>::size, batch = kBatch<Aligned>;
    const int begin = pieces.begin(piece), end = pieces.end(piece), lane = lane_index();
    // Lanes past the last channel load the last packet again, and store nothing.
    const int last_c = (ceil_div(C, N) - 1) * N, wanted_c = (stripe * kWarpSize + lane) * N;
    const int c = min(wanted_c, last_c), channels = C - c;
    const bool stores = wanted_c <= last_c;
    dout += c, dwte += c;
    const Element zero = from_float<Element>(0.0f);

    const int count = end - begin, position = begin + min(lane, count - 1);
    const int token = tokens[position], row = rows[position];
    const bool is_last = position + 1 == pieces.positions || tokens[position + 1] != token;
    const unsigned last_of_run = __ballot_sync(kFullWarp, is_last);
    bool began_before = begin > 0 && tokens[begin - 1] == tokens[begin];
    float sums[N] = {};
#pragma unroll 1
    for (int first = 0; first < count; first += batch) {
        // As bits: over branches, elements of 16 bits would have a register each.
        int4 packets[batch], starts[batch] = {};
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int at = min(first + i, count - 1);
            const Offset row_of = __shfl_sync(kFullWarp, row, at);
            packets[i] = bits_of(load_row_packet<Aligned>(dout + row_of * C, 0, channels, zero));
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            // Before it is known whether the run is whole: it nearly always is.
            const int at = min(first + i, count - 1);
            const Offset token_of = __shfl_sync(kFullWarp, token, at);
            if (accumulate && (last_of_run >> at & 1)) {
                starts[i] = bits_of(load_row_packet<Aligned>(dwte + token_of * C, 0, channels, zero));
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (first + i >= count) break;
            add_packet(sums, packet_of<Element>(packets[i]));
            if (!(last_of_run >> (first + i) & 1)) continue;
            const Offset token_of = __shfl_sync(kFullWarp, token, first + i);
            if (began_before) {
                store_part(pieces.part<N>(parts, piece, true, stripe), sums);
#pragma unroll
                for (int j = 0; j < N; ++j) sums[j] = 0.0f;
            } else if (stores) {
                finish_row<Aligned>(dwte + token_of * C, 0, channels, packet_of<Element>(starts[i]), sums);
            }
            began_before = false;
        }
    }
    const bool goes_on = !(last_of_run >> (count - 1) & 1);
    if (goes_on) store_part(pieces.part<N>(parts, piece, began_before, stripe), sums);
}

// Half of the largest block that CUDA allows: all packets under way take more registers than 1024 threads can have.
constexpr int kMaxBlock = 512;

// The first blocks, `place_blocks` of them, have dwpe, the others dwte.
template <class Element, bool Aligned>
__global__ void __launch_bounds__(kMaxBlock, 1)
encoder_backward3(Element* __restrict__ dwte, Element* __restrict__ dwpe, float* __restrict__ parts,
                  const Element* __restrict__ dout, const int* __restrict__ tokens, const int* __restrict__ rows, int B,
                  int T, int C, int length, int stripes, int place_blocks, bool accumulate) {
    if (int(blockIdx.x) < place_blocks) {
        const Offset thread = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
        add_batch_rows<Aligned>(dwpe, dout, thread, B, T, C, accumulate);
        return;
    }
    const Pieces pieces{B * T, length, stripes};
    const Offset warp = Offset(blockIdx.x - place_blocks) * (blockDim.x / kWarpSize) + warp_index();
    const Offset piece = warp / stripes;
    if (piece * length >= pieces.positions) return;  // whole warps leave
    add_piece<Aligned>(dwte, parts, dout, tokens, rows, pieces, int(piece), int(warp - piece * stripes), C,
                       accumulate);
}

// How many of the pieces after `piece` begin with `token`. Tokens are sorted, so those pieces come first: each round
// divides what is left among the lanes.
__device__ inline int pieces_after(const int* __restrict__ tokens, const Pieces& pieces, int piece, int token) {
    int first = piece + 1;                                // every piece before it has the token
    int end = ceil_div(pieces.positions, pieces.length);  // no piece from here on has it
    while (first < end) {
        const int step = ceil_div(end - first, kWarpSize);
        const int at = first + lane_index() * step;
        const int have = __popc(__ballot_sync(kFullWarp, at < end && tokens[pieces.begin(at)] == token));
        if (have == 0) break;
        end = min(end, first + have * step);
        first += (have - 1) * step + 1;
    }
    return first - (piece + 1);
}

constexpr int kJoinWarps = 4;

// Adds up the parts of a run where it begins: a block has one stripe of one piece, and something to do if a run begins
// in the piece and goes on after it. Warp w takes every part of number w, w + warps, ...
template <class Element, bool Aligned>
__global__ void __launch_bounds__(kJoinWarps * kWarpSize)
join_parts(Element* __restrict__ dwte, float* __restrict__ parts, const int* __restrict__ tokens, int positions, int C,
           int length, int stripes, bool accumulate) {
    constexpr int N = Packet<Element>::size;
    __shared__ float4 of_warp[kJoinWarps][kWarpSize * N / 4];
    const Pieces pieces{positions, length, stripes};
    const int piece = blockIdx.x / stripes, stripe = blockIdx.x % stripes;
    const int begin = pieces.begin(piece), end = pieces.end(piece), warp = warp_index();
    const int token = tokens[end - 1];
    if (end == positions || tokens[end] != token) return;  // whole blocks leave
    if (begin > 0 && tokens[begin - 1] == token) return;

    const int last = piece + pieces_after(tokens, pieces, piece, token);
    float sums[N] = {};
#pragma unroll 4
    for (int part = piece + warp; part <= last; part += kJoinWarps) {
        add_part(sums, pieces.part<N>(parts, part, part > piece, stripe));
    }
    store_part(reinterpret_cast<float*>(of_warp[warp]) + lane_index() * N, sums);
    __syncthreads();
    const int c = (stripe * kWarpSize + lane_index()) * N;
    if (warp > 0 || c >= C) return;
    for (int other = 1; other < kJoinWarps; ++other) {
        add_part(sums, reinterpret_cast<const float*>(of_warp[other]) + lane_index() * N);
    }
    Element* const row = dwte + Offset(token) * C;
    Packet<Element> start = {};
    if (accumulate) start = load_row_packet<Aligned>(row, c, C, from_float<Element>(0.0f));
    finish_row<Aligned>(row, c, C, start, sums);
}
