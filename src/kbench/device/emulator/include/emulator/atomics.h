// Atomic operations, relaxed as on the GPU. Each exists for the device, the block and the system: here the same.
#pragma once

// One operation of CUDA may be a loop here: where accesses are counted, it says that it is one.
#ifdef KBENCH_EMULATOR_COUNTS
#define EMU_ONE_ATOMIC(address) emu_count_atomic(address, sizeof *(address))
#else
#define EMU_ONE_ATOMIC(address) ((void)0)
#endif

namespace emu {

// Replaces *address by change(*address) and returns what was there before. T is 2, 4 or 8 bytes.
template <class T, class Change> inline T update(T* address, Change change) {
    EMU_ONE_ATOMIC(address);
    T old, next;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do next = change(old);
    while (!__atomic_compare_exchange(address, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

template <class T> inline T compare_and_swap(T* address, T expected, T value) {
    EMU_ONE_ATOMIC(address);
    __atomic_compare_exchange(address, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

}  // namespace emu
#undef EMU_ONE_ATOMIC

#define EMU_ATOMIC_SCOPE(name, T, ...) \
    inline T name(T* address, T value) { return emu::update(address, [=](T old) -> T { return __VA_ARGS__; }); }
#define EMU_ATOMIC(name, T, ...)               \
    EMU_ATOMIC_SCOPE(name, T, __VA_ARGS__)     \
    EMU_ATOMIC_SCOPE(name##_block, T, __VA_ARGS__) \
    EMU_ATOMIC_SCOPE(name##_system, T, __VA_ARGS__)
#define EMU_ATOMIC_CAS_SCOPE(name, T) \
    inline T name(T* address, T expected, T value) { return emu::compare_and_swap(address, expected, value); }
#define EMU_ATOMIC_CAS(T)                   \
    EMU_ATOMIC_CAS_SCOPE(atomicCAS, T)      \
    EMU_ATOMIC_CAS_SCOPE(atomicCAS_block, T) \
    EMU_ATOMIC_CAS_SCOPE(atomicCAS_system, T)
#define EMU_ATOMIC_BITS(T)                                  \
    EMU_ATOMIC(atomicMin, T, old < value ? old : value)     \
    EMU_ATOMIC(atomicMax, T, old < value ? value : old)     \
    EMU_ATOMIC(atomicAnd, T, old & value)                   \
    EMU_ATOMIC(atomicOr, T, old | value)                    \
    EMU_ATOMIC(atomicXor, T, old ^ value)

EMU_ATOMIC(atomicAdd, int, emu::wrapping_add(old, value))
EMU_ATOMIC(atomicAdd, unsigned int, old + value)
EMU_ATOMIC(atomicAdd, unsigned long long, old + value)
EMU_ATOMIC(atomicAdd, float, old + value)
EMU_ATOMIC(atomicAdd, double, old + value)
EMU_ATOMIC_SCOPE(atomicAdd, __half, old + value)
EMU_ATOMIC_SCOPE(atomicAdd, __half2, old + value)
EMU_ATOMIC_SCOPE(atomicAdd, __nv_bfloat16, old + value)
EMU_ATOMIC_SCOPE(atomicAdd, __nv_bfloat162, old + value)
EMU_ATOMIC(atomicSub, int, emu::wrapping_sub(old, value))
EMU_ATOMIC(atomicSub, unsigned int, old - value)
EMU_ATOMIC(atomicExch, int, ((void)old, value))
EMU_ATOMIC(atomicExch, unsigned int, ((void)old, value))
EMU_ATOMIC(atomicExch, unsigned long long, ((void)old, value))
EMU_ATOMIC(atomicExch, float, ((void)old, value))
EMU_ATOMIC(atomicInc, unsigned int, old >= value ? 0u : old + 1u)
EMU_ATOMIC(atomicDec, unsigned int, old == 0 || old > value ? value : old - 1u)
EMU_ATOMIC_BITS(int)
EMU_ATOMIC_BITS(unsigned int)
EMU_ATOMIC_BITS(long long)
EMU_ATOMIC_BITS(unsigned long long)
EMU_ATOMIC_CAS(int)
EMU_ATOMIC_CAS(unsigned int)
EMU_ATOMIC_CAS(unsigned long long)
EMU_ATOMIC_CAS(unsigned short)
#undef EMU_ATOMIC_BITS
#undef EMU_ATOMIC_CAS
#undef EMU_ATOMIC_CAS_SCOPE
#undef EMU_ATOMIC
#undef EMU_ATOMIC_SCOPE

// Vectors of floats are added element by element; the vector as a whole is not atomic, there as here.
inline float2 atomicAdd(float2* address, float2 value) {
    return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y)};
}
inline float4 atomicAdd(float4* address, float4 value) {
    return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y), atomicAdd(&address->z, value.z),
            atomicAdd(&address->w, value.w)};
}
