// char1 to double4 and dim3, with CUDA's sizes and alignments: float4 is one 16-byte access, float3 is not.
#pragma once

#define EMU_VECTOR_1_AND_3(name, T)                                                     \
    struct name##1 { T x; };                                                            \
    struct name##3 { T x, y, z; };                                                      \
    inline name##1 make_##name##1(T x) { return {x}; }                                  \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }
#define EMU_VECTOR_2(name, T, bytes)                                                    \
    struct alignas(bytes) name { T x, y; };                                             \
    inline name make_##name(T x, T y) { return {x, y}; }
#define EMU_VECTOR_4(name, T, bytes)                                                    \
    struct alignas(bytes) name { T x, y, z, w; };                                       \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMU_VECTORS(name, T, bytes2, bytes4)                                            \
    EMU_VECTOR_1_AND_3(name, T)                                                         \
    EMU_VECTOR_2(name##2, T, bytes2)                                                    \
    EMU_VECTOR_4(name##4, T, bytes4)
// CUDA 13's names for vectors of four 8-byte elements say their alignment.
#define EMU_WIDE_VECTORS(name, T)                                                       \
    EMU_VECTORS(name, T, 16, 16)                                                        \
    EMU_VECTOR_4(name##4_16a, T, 16)                                                    \
    EMU_VECTOR_4(name##4_32a, T, 32)

EMU_VECTORS(char, signed char, 2, 4)
EMU_VECTORS(uchar, unsigned char, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(ushort, unsigned short, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(uint, unsigned int, 8, 16)
EMU_VECTORS(float, float, 8, 16)
EMU_WIDE_VECTORS(long, long)
EMU_WIDE_VECTORS(ulong, unsigned long)
EMU_WIDE_VECTORS(longlong, long long)
EMU_WIDE_VECTORS(ulonglong, unsigned long long)
EMU_WIDE_VECTORS(double, double)

#undef EMU_WIDE_VECTORS
#undef EMU_VECTORS
#undef EMU_VECTOR_4
#undef EMU_VECTOR_2
#undef EMU_VECTOR_1_AND_3

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
