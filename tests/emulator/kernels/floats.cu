// float and double functions. A result takes row r of `out`.
#include <math_constants.h>

__global__ void directed(float* out, const float* a, const float* b, const float* c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = a[i], y = b[i], z = c[i];
    const float results[] = {
        __fadd_rn(x, y), __fadd_rz(x, y), __fadd_ru(x, y), __fadd_rd(x, y),
        __fsub_rn(x, y), __fsub_rz(x, y), __fsub_ru(x, y), __fsub_rd(x, y),
        __fmul_rn(x, y), __fmul_rz(x, y), __fmul_ru(x, y), __fmul_rd(x, y),
        __fdiv_rn(x, y), __fdiv_rz(x, y), __fdiv_ru(x, y), __fdiv_rd(x, y),
        __fmaf_rn(x, y, z), __fmaf_rz(x, y, z), __fmaf_ru(x, y, z), __fmaf_rd(x, y, z),
        __frcp_rn(x), __frcp_rz(x), __frcp_ru(x), __frcp_rd(x),
        __fsqrt_rn(x), __fsqrt_rz(x), __fsqrt_ru(x), __fsqrt_rd(x)};
    for (int r = 0; r < 28; ++r) out[r * n + i] = results[r];
}

__global__ void conversions(long long* out, float* back, const float* a, const double* b, const long long* whole,
                            int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = a[i];
    const double y = b[i];
    const long long w = whole[i];
    const long long results[] = {
        __float2int_rn(x), __float2int_rz(x), __float2int_ru(x), __float2int_rd(x),
        __float2uint_rn(x), __float2uint_rz(x), __float2uint_ru(x), __float2uint_rd(x),
        __float2ll_rn(x), __float2ll_rz(x), __float2ll_ru(x), __float2ll_rd(x),
        __double2int_rn(y), __double2int_rz(y), __double2int_ru(y), __double2int_rd(y),
        (long long)__float2ull_rz(x), (long long)__double2ull_rn(y), __double2ll_rd(y), __double2uint_rz(y)};
    for (int r = 0; r < 20; ++r) out[r * n + i] = results[r];
    const float returned[] = {
        __int2float_rn((int)w), __int2float_rz((int)w), __int2float_ru((int)w), __int2float_rd((int)w),
        __ll2float_rn(w), __ll2float_rz(w), __ll2float_ru(w), __ll2float_rd(w),
        __ull2float_rn((unsigned long long)w), __ull2float_ru((unsigned long long)w), __uint2float_rz((unsigned)w),
        __double2float_rn(y), __double2float_rz(y), __double2float_ru(y), __double2float_rd(y)};
    for (int r = 0; r < 15; ++r) back[r * n + i] = returned[r];
}

// Accurate and fast functions of x in (0, 8).
__global__ void functions(float* out, double* wide, const float* a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = a[i];
    float sine, cosine, fast_sine, fast_cosine;
    sincosf(x, &sine, &cosine);
    __sincosf(x, &fast_sine, &fast_cosine);
    const float results[] = {
        rsqrtf(x), rsqrt(x), sqrtf(x), expf(x), exp2f(x), logf(x), log2f(x), log10f(x), log1pf(x), expm1f(x), sinf(x),
        cosf(x), tanhf(x), erff(x), erfcf(x), normcdff(x), rcbrtf(x), cbrtf(x), sinpif(x), cospif(x), powf(x, 1.5f),
        fmaf(x, x, 1.0f), hypotf(x, 2.0f), norm3df(x, 1.0f, 2.0f), fdividef(x, 3.0f), __saturatef(x - 3), __expf(x),
        __logf(x), __log2f(x), __log10f(x), __powf(x, 1.5f), __sinf(x), __cosf(x), __tanf(x), __exp10f(x),
        __fdividef(x, 3.0f), __frsqrt_rn(x), sine, cosine, fast_sine, fast_cosine, exp10f(x), fminf(x, 2.0f),
        fmaxf(x, 2.0f), truncf(x), rintf(x), copysignf(x, -1.0f), fmodf(x, 1.5f), min(x, 2.0f), max(x, 2.0f)};
    for (int r = 0; r < 50; ++r) out[r * n + i] = results[r];
    const double y = x;
    const double doubles[] = {
        rsqrt(y), sqrt(y), exp(y), log(y), erf(y), normcdf(y), sinpi(y), rcbrt(y), __dadd_rn(y, 1.0), __dmul_rn(y, y),
        __fma_rn(y, y, 1.0), __ddiv_rn(y, 3.0), min(y, 2.0), max(x, 2.0)};
    for (int r = 0; r < 14; ++r) wide[r * n + i] = doubles[r];
}

__global__ void special(float* out) {
    const float nan = CUDART_NAN_F, inf = CUDART_INF_F;
    const float results[] = {
        min(nan, 1.0f), max(1.0f, nan), 1.0f / min(-0.0f, 0.0f), 1.0f / max(-0.0f, 0.0f), fminf(nan, 2.0f),
        __fdividef(1.0f, 1.5e38f), __fdividef(inf, 1.5e38f), (float)isnan(nan), (float)isinf(inf),
        (float)isfinite(1.0f), __saturatef(nan), rsqrtf(0.0f), __expf(-inf), CUDART_PI_F,
        min(1.0f, nan), max(nan, 1.0f), fminf(2.0f, nan)};
    for (int r = 0; r < 17; ++r) out[r] = results[r];
}
