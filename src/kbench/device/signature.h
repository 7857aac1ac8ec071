// The parameter list of a kernel as text, written by the very compiler that compiles the kernel, so that
// arguments can be typed and counted before launch. Taken by NVRTC, nvcc and g++ alike; includes nothing,
// because NVRTC has no standard headers.
//
// Two characters per parameter. First: ' ' by value, '*' pointer, '&' pointer to const. Second, the type:
//   f float   d double   h half   b bfloat16   o bool   x anything else
//   i u 32-bit, l q 64-bit, s t 16-bit, c y 8-bit integers, signed and unsigned
#pragma once

// NVRTC takes an unannotated function for host code, which it refuses.
#ifdef __CUDACC__
#define KBENCH_SIGNATURE_FUNCTION __host__ __device__ constexpr
#else
#define KBENCH_SIGNATURE_FUNCTION constexpr
#endif

namespace kbench {

template <class T> struct Type {};

template <class T> KBENCH_SIGNATURE_FUNCTION char letter(Type<T>) { return 'x'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<float>) { return 'f'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<double>) { return 'd'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<__half>) { return 'h'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<__nv_bfloat16>) { return 'b'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<bool>) { return 'o'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<int>) { return 'i'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<unsigned int>) { return 'u'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<long>) { return sizeof(long) == 8 ? 'l' : 'i'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<unsigned long>) { return sizeof(long) == 8 ? 'q' : 'u'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<long long>) { return 'l'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<unsigned long long>) { return 'q'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<short>) { return 's'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<unsigned short>) { return 't'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<char>) { return 'c'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<signed char>) { return 'c'; }
KBENCH_SIGNATURE_FUNCTION char letter(Type<unsigned char>) { return 'y'; }

template <class T> struct Parameter {
    static constexpr char form = ' ', type = letter(Type<T>{});
};
template <class T> struct Parameter<T*> {
    static constexpr char form = '*', type = letter(Type<T>{});
};
template <class T> struct Parameter<const T*> {
    static constexpr char form = '&', type = letter(Type<T>{});
};
template <class T> struct Parameter<T* __restrict__> : Parameter<T*> {};
template <class T> struct Parameter<const T* __restrict__> : Parameter<const T*> {};

template <class Kernel> struct Signature;
template <class... P> struct Signature<void (*)(P...)> {
    char text[2 * sizeof...(P) + 1] = {};
    KBENCH_SIGNATURE_FUNCTION Signature() {
        const char pairs[] = {Parameter<P>::form..., Parameter<P>::type..., '\0'};
        for (unsigned i = 0; i != sizeof...(P); ++i) {
            text[2 * i] = pairs[i];
            text[2 * i + 1] = pairs[sizeof...(P) + i];
        }
    }
};

}  // namespace kbench
