// Vector types, cached loads and stores.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define LAYOUT(type, bytes, alignment) \
    static_assert(sizeof(type) == bytes && alignof(type) == alignment, "layout of " #type)
#define LAYOUTS(name, size, alignment2, alignment4) \
    LAYOUT(name##1, size, size);                    \
    LAYOUT(name##2, 2 * size, alignment2);          \
    LAYOUT(name##3, 3 * size, size);                \
    LAYOUT(name##4, 4 * size, alignment4)
LAYOUTS(char, 1, 2, 4);
LAYOUTS(uchar, 1, 2, 4);
LAYOUTS(short, 2, 4, 8);
LAYOUTS(ushort, 2, 4, 8);
LAYOUTS(int, 4, 8, 16);
LAYOUTS(uint, 4, 8, 16);
LAYOUTS(float, 4, 8, 16);
LAYOUT(long2, 16, 16);
LAYOUT(longlong2, 16, 16);
LAYOUT(ulonglong3, 24, 8);
LAYOUT(double2, 16, 16);
LAYOUT(double3, 24, 8);
LAYOUT(dim3, 12, 4);
LAYOUT(__half2, 4, 4);
LAYOUT(__nv_bfloat16, 2, 2);

struct __align__(16) Packet {
    float values[4];
};
LAYOUT(Packet, 16, 16);

// Copies each element by all loads and stores in turn: `to` equals `from` unless one of them is wrong.
template <class T> __global__ void copy(unsigned char* to, const unsigned char* from, int bytes) {
    const T* source = reinterpret_cast<const T*>(from);
    T* target = reinterpret_cast<T*>(to);
    for (int i = threadIdx.x; i < bytes / (int)sizeof(T); i += blockDim.x) {
        T value;
        switch (i % 6) {
            case 0: value = __ldg(source + i); break;
            case 1: value = __ldca(source + i); break;
            case 2: value = __ldcg(source + i); break;
            case 3: value = __ldcs(source + i); break;
            case 4: value = __ldlu(source + i); break;
            default: value = __ldcv(source + i); break;
        }
        switch (i % 4) {
            case 0: __stwb(target + i, value); break;
            case 1: __stcg(target + i, value); break;
            case 2: __stcs(target + i, value); break;
            default: __stwt(target + i, value); break;
        }
    }
}

__global__ void vectors(float* out) {
    const float4 f = make_float4(1, 2, 3, 4);
    const int3 i = make_int3(5, 6, 7);
    const uchar2 u = make_uchar2(255, 256 - 1);
    const dim3 two(8, 9);
    const uint3 three = two;
    const double2 zero = {};
    __stcs(out + 7, 3);  // the pointer decides the type
    out[0] = f.x + 10 * f.w, out[1] = i.z, out[2] = u.y, out[3] = two.z + 10 * three.y, out[4] = zero.y;
    out[5] = __ldcs(reinterpret_cast<const float2*>(out) + 1).x;
    out[6] = make_longlong2(1, 2).y + make_double2(0.5, 0).x;
}
