// Atomic operations: many blocks on one address, and the value that each operation leaves and returns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// All threads of all blocks hit the same cells.
__global__ void contended(unsigned int* words, float* floats, double* doubles, __half* halves,
                          __nv_bfloat16* bfloats, unsigned long long* wide) {
    const int id = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int* whole = reinterpret_cast<int*>(words);
    atomicAdd(&whole[0], 1);
    atomicSub(&whole[1], 2);
    atomicMax(&whole[2], id);
    atomicMin(&whole[3], -id);
    atomicInc(&words[4], 99u);
    atomicDec(&words[5], 99u);
    atomicXor(&words[6], 1u << (id % 32));
    atomicOr(&words[7], 1u << (id % 32));
    atomicAnd(&words[8], ~(1u << (id % 31)));
    atomicAdd_block(&words[9], 0u);
    atomicAdd(&floats[0], 1.0f);
    float2 ones = make_float2(1, 2);
    atomicAdd(reinterpret_cast<float2*>(floats + 2), ones);
    atomicAdd(&doubles[0], 0.5);
    atomicAdd(&halves[0], __float2half(1.0f));
    atomicAdd(reinterpret_cast<__half2*>(halves + 2), __floats2half2_rn(1.0f, -1.0f));
    atomicAdd(&bfloats[0], __float2bfloat16(0.25f));
    atomicAdd(reinterpret_cast<__nv_bfloat162*>(bfloats + 2), __floats2bfloat162_rn(0.25f, -0.25f));
    atomicAdd(&wide[0], 1ull << 33);
    atomicMax(&wide[1], (unsigned long long)id << 40);
    atomicMin(reinterpret_cast<long long*>(&wide[2]), -(long long)id << 40);
    unsigned old = words[10], seen;  // a lock-free multiply-add
    do {
        seen = old;
        old = atomicCAS(&words[10], seen, seen * 3u + 1u);
    } while (old != seen);
}

// One thread: what each operation returns is what was there before.
__global__ void returned(long long* out, int* cell, unsigned int* word, unsigned long long* wide, float* real,
                         unsigned short* narrow) {
    const long long results[] = {
        atomicAdd(cell, 5), atomicSub(cell, 7), atomicExch(cell, 40), atomicMin(cell, 30), atomicMax(cell, 50),
        atomicAnd(cell, 6), atomicOr(cell, 9), atomicXor(cell, 5), atomicCAS(cell, 14, 77), atomicCAS(cell, 1, 99),
        *cell,
        atomicInc(word, 3u), atomicInc(word, 3u), atomicDec(word, 9u), atomicDec(word, 9u), *word,
        (long long)atomicExch(wide, 1ull << 50), (long long)atomicCAS(wide, 1ull << 50, 3ull), (long long)*wide,
        (long long)atomicAdd(real, 1.5f), (long long)atomicExch(real, 8.0f), (long long)*real,
        atomicCAS(narrow, (unsigned short)3, (unsigned short)9), *narrow};
    for (int r = 0; r < 24; ++r) out[r] = results[r];
}
