// Copies `count` packets of 16 bytes as fast as the card's memory allows: four loads are under way in each thread
// before the first of them is waited for, and what is used once does not displace anything in the caches.

constexpr int kLoads = 4;

__global__ void __launch_bounds__(512) copy_packets(uint4* __restrict__ to, const uint4* __restrict__ from,
                                                    long long count) {
    const long long begin = (long long)blockIdx.x * (blockDim.x * kLoads) + threadIdx.x;
    uint4 packets[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const long long index = begin + i * blockDim.x;
        if (index < count) packets[i] = __ldcs(from + index);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const long long index = begin + i * blockDim.x;
        if (index < count) __stcs(to + index, packets[i]);
    }
}
