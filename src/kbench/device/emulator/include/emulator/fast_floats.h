// The fast functions: computed as the hardware does, through base-2 exponentials and logarithms, so that most of
// their error is here too. Never bit for bit a GPU's.
//
// glibc declares several of these names for itself, with C linkage: hence other names behind macros.
#pragma once

namespace emu {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.69314718055994531f;
inline constexpr float kLog2Of10 = 3.3219280948873623f, kLog10Of2 = 0.30102999566398120f;

inline float fast_exp(float x) { return exp2f(x * kLog2E); }
inline float fast_exp10(float x) { return exp2f(x * kLog2Of10); }
inline float fast_log(float x) { return log2f(x) * kLn2; }
inline float fast_log2(float x) { return log2f(x); }
inline float fast_log10(float x) { return log2f(x) * kLog10Of2; }
inline float fast_pow(float x, float y) { return exp2f(y * log2f(x)); }
inline float fast_sin(float x) { return sinf(x); }
inline float fast_cos(float x) { return cosf(x); }
inline float fast_tan(float x) { return sinf(x) / cosf(x); }
inline float fast_tanh(float x) { return tanhf(x); }
inline void fast_sincos(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
// The approximation of a quotient becomes 0 where 1/y would be subnormal.
inline float fast_divide(float x, float y) {
    const float size = fabsf(y);
    return size > 0x1p126f && size <= FLT_MAX ? (std::isinf(x) ? NAN : copysignf(0.0f, x) * copysignf(1.0f, y)) : x / y;
}

}  // namespace emu

#define __expf emu::fast_exp
#define __exp10f emu::fast_exp10
#define __logf emu::fast_log
#define __log2f emu::fast_log2
#define __log10f emu::fast_log10
#define __powf emu::fast_pow
#define __sinf emu::fast_sin
#define __cosf emu::fast_cos
#define __tanf emu::fast_tan
#define __tanhf emu::fast_tanh
#define __sincosf emu::fast_sincos
#define __fdividef emu::fast_divide
