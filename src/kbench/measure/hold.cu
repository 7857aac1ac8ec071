// Holds a stream until the host lets go: the first word of `words` becomes non-zero. `words` lies in pinned
// host memory, so the host can write it while the kernel runs.
//
// The kernel gives up after `limit_ns` and says so in the second word. Without that, a plan that makes the
// host wait for the GPU while it is being queued would wait for ever.

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__global__ void hold(unsigned int* words, unsigned long long limit_ns) {
    volatile unsigned int* shared_with_host = words;
    const unsigned long long start = nanoseconds();
    while (shared_with_host[0] == 0) {
        if (nanoseconds() - start > limit_ns) {
            shared_with_host[1] = 1;
            __threadfence_system();
            return;
        }
    }
}
