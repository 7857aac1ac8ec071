// Kernels whose time or effect is known, to test the timer with.

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Takes this long by the GPU's own clock.
__global__ void spin(unsigned long long duration) {
    const unsigned long long start = nanoseconds();
    while (nanoseconds() - start < duration) {
    }
}

__global__ void nothing() {}

// Wrong if launched twice on the same data.
__global__ void add_one(float* values, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += 1.0f;
}

// Reads every element, so its time depends on where they are. Never writes: no sum of zeros is 1.
__global__ void read(const float* values, float* unused, int count) {
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) sum += values[i];
    if (sum == 1.0f) unused[0] = sum;
}

__global__ void wild(float* values) { values[1LL << 44] = 1.0f; }
