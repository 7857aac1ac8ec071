// float and double functions that CUDA has and the C library lacks, and the ones with a rounding mode.
#pragma once

namespace emu {

// A product or sum that the compiler must not fuse into a multiply-add.
inline float unfused(float value) {
#if defined(__x86_64__)
    asm("" : "+x"(value));
#else
    asm("" : "+w"(value));
#endif
    return value;
}
inline double unfused(double value) {
#if defined(__x86_64__)
    asm("" : "+x"(value));
#else
    asm("" : "+w"(value));
#endif
    return value;
}

// fmin and fmax of the GPU: a NaN loses against a number, and -0 is smaller than +0.
template <class T> inline T smaller(T a, T b) {
    if (a == b) return std::signbit(a) ? a : b;
    return a < b || b != b ? a : b;
}
template <class T> inline T larger(T a, T b) {
    if (a == b) return std::signbit(a) ? b : a;
    return a > b || b != b ? a : b;
}

}  // namespace emu

inline float min(float a, float b) { return emu::smaller(a, b); }
inline float max(float a, float b) { return emu::larger(a, b); }
inline double min(double a, double b) { return emu::smaller(a, b); }
inline double max(double a, double b) { return emu::larger(a, b); }
inline double min(float a, double b) { return emu::smaller<double>(a, b); }
inline double max(float a, double b) { return emu::larger<double>(a, b); }
inline double min(double a, float b) { return emu::smaller<double>(a, b); }
inline double max(double a, float b) { return emu::larger<double>(a, b); }

#if !defined(__GLIBC_PREREQ)
#define EMU_GLIBC_HAS_C23_MATH 0
#else
#define EMU_GLIBC_HAS_C23_MATH __GLIBC_PREREQ(2, 41)  // declares these itself, with C linkage
#endif
#if !EMU_GLIBC_HAS_C23_MATH
inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
namespace emu {
// Reduced to [-1, 1] first, where a multiple of pi is still exact enough.
template <class T> inline T turns(T x) { return static_cast<T>(x - 2 * rint(x / 2)); }
}  // namespace emu
inline double sinpi(double x) { return sin(M_PI * emu::turns(x)); }
inline double cospi(double x) { return cos(M_PI * emu::turns(x)); }
inline float sinpif(float x) { return static_cast<float>(sinpi(static_cast<double>(x))); }
inline float cospif(float x) { return static_cast<float>(cospi(static_cast<double>(x))); }
#endif
inline float rsqrt(float x) { return rsqrtf(x); }
inline float sinpi(float x) { return sinpif(x); }
inline float cospi(float x) { return cospif(x); }
inline void sincospi(double x, double* sine, double* cosine) { *sine = sinpi(x), *cosine = cospi(x); }
inline void sincospif(float x, float* sine, float* cosine) { *sine = sinpif(x), *cosine = cospif(x); }
inline void sincos(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float exp10(float x) { return exp10f(x); }
inline double rcbrt(double x) { return 1.0 / cbrt(x); }
inline float rcbrtf(float x) { return static_cast<float>(1.0 / cbrt(static_cast<double>(x))); }
inline double rhypot(double x, double y) { return 1.0 / hypot(x, y); }
inline float rhypotf(float x, float y) { return static_cast<float>(rhypot(x, y)); }
inline double norm3d(double x, double y, double z) { return hypot(hypot(x, y), z); }
inline double norm4d(double x, double y, double z, double w) { return hypot(norm3d(x, y, z), w); }
inline float norm3df(float x, float y, float z) { return static_cast<float>(norm3d(x, y, z)); }
inline float norm4df(float x, float y, float z, float w) { return static_cast<float>(norm4d(x, y, z, w)); }
inline double rnorm3d(double x, double y, double z) { return 1.0 / norm3d(x, y, z); }
inline float rnorm3df(float x, float y, float z) { return static_cast<float>(rnorm3d(x, y, z)); }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
inline float normcdff(float x) { return static_cast<float>(normcdf(static_cast<double>(x))); }
inline float normcdf(float x) { return normcdff(x); }
inline float fdividef(float x, float y) { return x / y; }
inline double fdivide(double x, double y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN becomes 0

// float arithmetic, one function per rounding. Nearest must not be fused with its neighbours. The others start from
// a double: exact (products), rounded to odd (sums), or simply nearest: a quotient or root that is no float differs
// from every float by 2^-48 of its size or more, which a double's 2^-53 cannot hide.
#define EMU_DIRECTED(suffix, mode)                                                                                    \
    inline float __fadd_##suffix(float x, float y) { return emu::round_float(emu::odd_sum(x, y), mode); }             \
    inline float __fsub_##suffix(float x, float y) { return emu::round_float(emu::odd_sum(x, -y), mode); }            \
    inline float __fmul_##suffix(float x, float y) { return emu::round_float(static_cast<double>(x) * y, mode); }     \
    inline float __fmaf_##suffix(float x, float y, float z) { return emu::round_float(emu::odd_fma(x, y, z), mode); } \
    inline float __fdiv_##suffix(float x, float y) { return emu::round_float(static_cast<double>(x) / y, mode); }     \
    inline float __frcp_##suffix(float x) { return emu::round_float(1.0 / x, mode); }                                  \
    inline float __fsqrt_##suffix(float x) { return emu::round_float(sqrt(static_cast<double>(x)), mode); }
EMU_DIRECTED(rz, emu::Rounding::kZero)
EMU_DIRECTED(ru, emu::Rounding::kUp)
EMU_DIRECTED(rd, emu::Rounding::kDown)
#undef EMU_DIRECTED
inline float __fadd_rn(float x, float y) { return emu::unfused(x + y); }
inline float __fsub_rn(float x, float y) { return emu::unfused(x - y); }
inline float __fmul_rn(float x, float y) { return emu::unfused(x * y); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return emu::unfused(x + y); }
inline double __dsub_rn(double x, double y) { return emu::unfused(x - y); }
inline double __dmul_rn(double x, double y) { return emu::unfused(x * y); }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// Conversions between numbers, one function per rounding.
#define EMU_CONVERSIONS(suffix, mode)                                                                               \
    inline int __float2int_##suffix(float x) { return emu::round_integer<int>(x, mode); }                           \
    inline unsigned int __float2uint_##suffix(float x) { return emu::round_integer<unsigned int>(x, mode); }        \
    inline long long __float2ll_##suffix(float x) { return emu::round_integer<long long>(x, mode); }                \
    inline unsigned long long __float2ull_##suffix(float x) { return emu::round_integer<uint64_t>(x, mode); }       \
    inline int __double2int_##suffix(double x) { return emu::round_integer<int>(x, mode); }                         \
    inline unsigned int __double2uint_##suffix(double x) { return emu::round_integer<unsigned int>(x, mode); }      \
    inline long long __double2ll_##suffix(double x) { return emu::round_integer<long long>(x, mode); }              \
    inline unsigned long long __double2ull_##suffix(double x) { return emu::round_integer<uint64_t>(x, mode); }     \
    inline float __int2float_##suffix(int x) { return emu::round_float(x, mode); }                                  \
    inline float __uint2float_##suffix(unsigned int x) { return emu::round_float(x, mode); }                        \
    inline float __ll2float_##suffix(long long x) { return emu::round_float(emu::odd_double(x), mode); }            \
    inline float __ull2float_##suffix(unsigned long long x) { return emu::round_float(emu::odd_double(x), mode); }  \
    inline float __double2float_##suffix(double x) { return emu::round_float(x, mode); }
EMU_CONVERSIONS(rn, emu::Rounding::kNearest)
EMU_CONVERSIONS(rz, emu::Rounding::kZero)
EMU_CONVERSIONS(ru, emu::Rounding::kUp)
EMU_CONVERSIONS(rd, emu::Rounding::kDown)
#undef EMU_CONVERSIONS
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned int x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
