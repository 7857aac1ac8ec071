// Kernels that do one thing each, as fast as a card can: what they reach is a ceiling for kernels that do more.
// The numbers of loads, stores and chains are template arguments because the best one differs between cards.

constexpr int kBlock = 512;

__device__ unsigned int mixed(uint4 packet) { return packet.x ^ packet.y ^ packet.z ^ packet.w; }

// ------------------------------------------------------------------------------------------------ memory

// Copies `count` packets of 16 bytes: kLoads of them are under way in each thread before the first is waited for, and
// what is used once does not displace anything in the caches.
template <int kLoads>
__global__ void __launch_bounds__(kBlock) copy_packets(uint4* __restrict__ to, const uint4* __restrict__ from,
                                                       long long count) {
    const long long begin = (long long)blockIdx.x * (kBlock * kLoads) + threadIdx.x;
    uint4 packets[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const long long index = begin + i * kBlock;
        if (index < count) packets[i] = __ldcs(from + index);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const long long index = begin + i * kBlock;
        if (index < count) __stcs(to + index, packets[i]);
    }
}

// Reads `count` packets. The store keeps the loads alive: a thread stores only if all bits that it read cancel, which
// among random numbers one thread in 2^32 does.
template <int kLoads>
__global__ void __launch_bounds__(kBlock) read_packets(unsigned int* __restrict__ out, const uint4* __restrict__ from,
                                                       long long count) {
    const long long begin = (long long)blockIdx.x * (kBlock * kLoads) + threadIdx.x;
    uint4 packets[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const long long index = begin + i * kBlock;
        packets[i] = index < count ? __ldcs(from + index) : make_uint4(1u, 0u, 0u, 0u);
    }
    unsigned int sum = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum ^= mixed(packets[i]);
    if (sum == 0) out[0] = blockIdx.x;
}

// Writes `count` packets of numbers that look random: equal ones would cost less power.
template <int kStores>
__global__ void __launch_bounds__(kBlock) write_packets(uint4* __restrict__ to, long long count) {
    const long long begin = (long long)blockIdx.x * (kBlock * kStores) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
        const long long index = begin + i * kBlock;
        // A multiplicative hash; the high half of the product is the well mixed one.
        const unsigned long long hash = (unsigned long long)(index + 1) * 0x9E3779B97F4A7C15ull;
        const unsigned int low = (unsigned int)hash, high = (unsigned int)(hash >> 32);
        if (index < count) __stcs(to + index, make_uint4(high, low ^ high, high * 3u, low + high));
    }
}

// ------------------------------------------------------------------------------------------------ L2

// Reads a buffer of mask + 1 packets, a power of two, again and again: rounds * kLoads packets in each thread, past L1,
// so that every one of them comes out of L2. At any time the card's threads are spread over the whole buffer.
template <int kLoads>
__global__ void __launch_bounds__(kBlock) read_cached(unsigned int* __restrict__ out, const uint4* __restrict__ from,
                                                      unsigned int mask, int rounds) {
    const unsigned int threads = gridDim.x * kBlock, thread = blockIdx.x * kBlock + threadIdx.x;
    unsigned int index = thread, sum = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        uint4 packets[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) packets[i] = __ldcg(from + ((index + i * threads) & mask));
#pragma unroll
        for (int i = 0; i < kLoads; ++i) sum ^= mixed(packets[i]);
        index += kLoads * threads;
    }
    out[thread] = sum;
}

// ------------------------------------------------------------------------------------------------ arithmetic

constexpr int kPairs = 8;

// rounds * kSteps * kPairs * 2 fused multiply-adds in each thread, all in registers. A pair of numbers turns about the
// origin: what each step gives is neither the value before nor near a fixed point, so the multipliers never idle, and
// for angles below 1 the pair stays within twice its first length. kPairs chains hide the latency of each.
template <int kSteps>
__global__ void __launch_bounds__(256) turn_pairs(float* __restrict__ out, const float* __restrict__ in, int rounds) {
    const int thread = blockIdx.x * 256 + threadIdx.x;
    float x[kPairs], y[kPairs];
    const float angle = 1.0f / (1.5f + fabsf(in[thread]));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        x[i] = in[thread] + 0.25f * i;
        y[i] = 1.0f - 0.125f * i;
    }
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) x[i] = fmaf(angle, y[i], x[i]);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) y[i] = fmaf(-angle, x[i], y[i]);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum += x[i] + y[i];
    out[thread] = sum;
}
