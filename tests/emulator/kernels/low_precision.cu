// Every function of __half and __nv_bfloat16, over arrays. A result takes row r of `out`, n elements wide.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Half {
    using T = __half;
    using T2 = __half2;
    static __device__ T of(unsigned short bits) { return __ushort_as_half(bits); }
    static __device__ unsigned short bits(T value) { return __half_as_ushort(value); }
    static __device__ T2 pair(T a, T b) { return __halves2half2(a, b); }
    static __device__ T rn(float a) { return __float2half_rn(a); }
    static __device__ T rz(float a) { return __float2half_rz(a); }
    static __device__ T ru(float a) { return __float2half_ru(a); }
    static __device__ T rd(float a) { return __float2half_rd(a); }
    static __device__ T of_double(double a) { return __double2half(a); }
    static __device__ float widen(T a) { return __half2float(a); }
    static __device__ long long to(T a, int which) {
        switch (which) {
            case 0: return __half2int_rn(a);
            case 1: return __half2int_rz(a);
            case 2: return __half2uint_ru(a);
            case 3: return __half2short_rd(a);
            case 4: return __half2ushort_rn(a);
            case 5: return __half2ll_rz(a);
            case 6: return (long long)__half2ull_rd(a);
            case 7: return __half2char_rz(a);
            default: return __half2uchar_rz(a);
        }
    }
    static __device__ T from(long long a, int which) {
        switch (which) {
            case 0: return __int2half_rn((int)a);
            case 1: return __int2half_rz((int)a);
            case 2: return __uint2half_ru((unsigned)a);
            case 3: return __short2half_rd((short)a);
            case 4: return __ushort2half_rn((unsigned short)a);
            case 5: return __ll2half_rn(a);
            default: return __ull2half_rn((unsigned long long)a);
        }
    }
    static __device__ void pairs(T2 a, T2 b, T* out) {
        const float2 f = __half22float2(a);
        const T2 results[] = {__low2half2(a), __high2half2(a), __lows2half2(a, b), __highs2half2(a, b),
                              __half2half2(__low2half(b)), __float22half2_rn(f), __floats2half2_rn(f.y, f.x),
                              __float2half2_rn(f.y), make_half2(__high2half(a), __low2half(b)), __lowhigh2highlow(a)};
        for (int i = 0; i < 10; ++i) out[2 * i] = results[i].x, out[2 * i + 1] = results[i].y;
    }
};

struct Bfloat {
    using T = __nv_bfloat16;
    using T2 = __nv_bfloat162;
    static __device__ T of(unsigned short bits) { return __ushort_as_bfloat16(bits); }
    static __device__ unsigned short bits(T value) { return __bfloat16_as_ushort(value); }
    static __device__ T2 pair(T a, T b) { return __halves2bfloat162(a, b); }
    static __device__ T rn(float a) { return __float2bfloat16_rn(a); }
    static __device__ T rz(float a) { return __float2bfloat16_rz(a); }
    static __device__ T ru(float a) { return __float2bfloat16_ru(a); }
    static __device__ T rd(float a) { return __float2bfloat16_rd(a); }
    static __device__ T of_double(double a) { return __double2bfloat16(a); }
    static __device__ float widen(T a) { return __bfloat162float(a); }
    static __device__ long long to(T a, int which) {
        switch (which) {
            case 0: return __bfloat162int_rn(a);
            case 1: return __bfloat162int_rz(a);
            case 2: return __bfloat162uint_ru(a);
            case 3: return __bfloat162short_rd(a);
            case 4: return __bfloat162ushort_rn(a);
            case 5: return __bfloat162ll_rz(a);
            case 6: return (long long)__bfloat162ull_rd(a);
            case 7: return __bfloat162char_rz(a);
            default: return __bfloat162uchar_rz(a);
        }
    }
    static __device__ T from(long long a, int which) {
        switch (which) {
            case 0: return __int2bfloat16_rn((int)a);
            case 1: return __int2bfloat16_rz((int)a);
            case 2: return __uint2bfloat16_ru((unsigned)a);
            case 3: return __short2bfloat16_rd((short)a);
            case 4: return __ushort2bfloat16_rn((unsigned short)a);
            case 5: return __ll2bfloat16_rn(a);
            default: return __ull2bfloat16_rn((unsigned long long)a);
        }
    }
    static __device__ void pairs(T2 a, T2 b, T* out) {
        const float2 f = __bfloat1622float2(a);
        const T2 results[] = {__low2bfloat162(a), __high2bfloat162(a), __lows2bfloat162(a, b), __highs2bfloat162(a, b),
                              __bfloat162bfloat162(__low2bfloat16(b)), __float22bfloat162_rn(f),
                              __floats2bfloat162_rn(f.y, f.x), __float2bfloat162_rn(f.y),
                              make_bfloat162(__high2bfloat16(a), __low2bfloat16(b)), __lowhigh2highlow(a)};
        for (int i = 0; i < 10; ++i) out[2 * i] = results[i].x, out[2 * i + 1] = results[i].y;
    }
};

__device__ int element() { return blockIdx.x * blockDim.x + threadIdx.x; }

template <class F> __global__ void widen(float* out, const unsigned short* bits, int n) {
    const int i = element();
    if (i < n) {
        const typename F::T value = F::of(bits[i]);
        out[i] = F::widen(value);
        out[n + i] = value;
        out[2 * n + i] = (float)value;
    }
}

template <class F> __global__ void narrow(unsigned short* out, const float* in, int n) {
    const int i = element();
    if (i < n) {
        const typename F::T results[] = {F::rn(in[i]), F::rz(in[i]), F::ru(in[i]), F::rd(in[i]), in[i]};
        for (int r = 0; r < 5; ++r) out[r * n + i] = F::bits(results[r]);
    }
}

template <class F> __global__ void narrow_double(unsigned short* out, const double* in, int n) {
    const int i = element();
    if (i < n) out[i] = F::bits(F::of_double(in[i])), out[n + i] = F::bits(typename F::T(in[i]));
}

template <class F> __global__ void integers(long long* to, unsigned short* from, const unsigned short* bits,
                                            const long long* whole, int n) {
    const int i = element();
    if (i < n) {
        for (int r = 0; r < 9; ++r) to[r * n + i] = F::to(F::of(bits[i]), r);
        for (int r = 0; r < 7; ++r) from[r * n + i] = F::bits(F::from(whole[i], r));
    }
}

template <class F> __global__ void arithmetic(unsigned short* out, const unsigned short* a, const unsigned short* b,
                                              const unsigned short* c, int n) {
    using T = typename F::T;
    const int i = element();
    if (i >= n) return;
    const T x = F::of(a[i]), y = F::of(b[i]), z = F::of(c[i]);
    T sum = x, difference = x, product = x, quotient = x;
    sum += y, difference -= y, product *= y, quotient /= y;
    T up = x, down = x;
    ++up, down--;
    const T results[] = {x + y, x - y, x * y, x / y, __hadd(x, y), __hsub(x, y), __hmul(x, y), __hdiv(x, y),
                         __hfma(x, y, z), sum, difference, product, quotient, -x, __hneg(x), __habs(x),
                         __hmax(x, y), __hmin(x, y), __hmax_nan(x, y), __hmin_nan(x, y), __hadd_sat(x, y),
                         __hmul_sat(x, y), __hfma_relu(x, y, z), up, down, hsqrt(x)};
    for (int r = 0; r < 26; ++r) out[r * n + i] = F::bits(results[r]);
}

// Each result of a function of pairs next to that of the function of numbers: they must be the same.
template <class F> __global__ void pairs(unsigned short* out, const unsigned short* a, const unsigned short* b,
                                         const unsigned short* c, int n) {
    using T = typename F::T;
    using T2 = typename F::T2;
    const int i = element();
    if (i >= n) return;
    const int j = n - 1 - i;
    const T x = F::of(a[i]), y = F::of(b[i]), z = F::of(c[i]), u = F::of(a[j]), v = F::of(b[j]), w = F::of(c[j]);
    const T2 p = F::pair(x, u), q = F::pair(y, v), r = F::pair(z, w);
    T2 sum = p, product = p;
    sum += q, product *= q;
    const T2 results[] = {p + q, p - q, p * q, p / q, __hadd2(p, q), __hsub2(p, q), __hmul2(p, q), __h2div(p, q),
                          __hfma2(p, q, r), sum, product, -p, __hneg2(p), __habs2(p), __hmax2(p, q), __hmin2(p, q),
                          h2exp(p), h2sqrt(p), h2rsqrt(p), h2rcp(p), h2log(p), h2sin(p), h2cos(p), h2exp2(p),
                          h2trunc(p), h2ceil(p), h2floor(p), h2rint(p)};
    const T low[] = {x + y, x - y, x * y, x / y, x + y, x - y, x * y, x / y, __hfma(x, y, z), x + y, x * y, -x, -x,
                     __habs(x), __hmax(x, y), __hmin(x, y), hexp(x), hsqrt(x), hrsqrt(x), hrcp(x), hlog(x), hsin(x),
                     hcos(x), hexp2(x), htrunc(x), hceil(x), hfloor(x), hrint(x)};
    const T high[] = {u + v, u - v, u * v, u / v, u + v, u - v, u * v, u / v, __hfma(u, v, w), u + v, u * v, -u, -u,
                      __habs(u), __hmax(u, v), __hmin(u, v), hexp(u), hsqrt(u), hrsqrt(u), hrcp(u), hlog(u), hsin(u),
                      hcos(u), hexp2(u), htrunc(u), hceil(u), hfloor(u), hrint(u)};
    for (int k = 0; k < 28; ++k) {
        out[(4 * k + 0) * n + i] = F::bits(results[k].x);
        out[(4 * k + 1) * n + i] = F::bits(low[k]);
        out[(4 * k + 2) * n + i] = F::bits(results[k].y);
        out[(4 * k + 3) * n + i] = F::bits(high[k]);
    }
    T moved[20];
    F::pairs(p, q, moved);
    for (int k = 0; k < 20; ++k) out[(112 + k) * n + i] = F::bits(moved[k]);
}

template <class F> __global__ void compare(unsigned int* out, const unsigned short* a, const unsigned short* b, int n) {
    using T = typename F::T;
    using T2 = typename F::T2;
    const int i = element();
    if (i >= n) return;
    const T x = F::of(a[i]), y = F::of(b[i]);
    const T2 p = F::pair(x, y), q = F::pair(y, x), same = F::pair(x, x);
    const unsigned results[] = {
        x == y, x != y, x < y, x <= y, x > y, x >= y, __heq(x, y), __hne(x, y), __hlt(x, y), __hle(x, y), __hgt(x, y),
        __hge(x, y), __hequ(x, y), __hneu(x, y), __hltu(x, y), __hleu(x, y), __hgtu(x, y), __hgeu(x, y), __hisnan(x),
        (unsigned)__hisinf(x), (bool)x, __hlt2_mask(p, q), __hneu2_mask(p, q), __hbeq2(p, q), __hbleu2(p, q),
        p == q, p != q, F::bits(__hgt2(p, q).x), F::bits(__hgt2(p, q).y), F::bits(__hequ2(p, q).y),
        (same < p) + 2u * (same <= p) + 4u * (same > p) + 8u * (same >= p), (q < same) + 2u * (q > same)};
    for (int r = 0; r < 32; ++r) out[r * n + i] = results[r];
}

template <class F> __global__ void functions(float* out, const unsigned short* a, int n) {
    using T = typename F::T;
    const int i = element();
    if (i >= n) return;
    const T x = F::of(a[i]);
    const T results[] = {hexp(x), hexp2(x), hexp10(x), hlog(x), hlog2(x), hlog10(x), hsin(x), hcos(x), htanh(x),
                         hsqrt(x), hrsqrt(x), hrcp(x), htrunc(x), hceil(x), hfloor(x), hrint(x), htanh_approx(x)};
    for (int r = 0; r < 17; ++r) out[r * n + i] = F::widen(results[r]);
}

// Constructors, conversions and storage that code relies on.
__global__ void classes(float* out) {
    __shared__ __half shared_half[4];
    __shared__ __nv_bfloat162 shared_pair[2];
    union { __half2 pair; unsigned int word; } both;
    both.pair = __half2(__half(1), __half(2.0));
    shared_half[0] = 3, shared_half[1] = both.pair.y;
    shared_pair[0] = __nv_bfloat162(__nv_bfloat16(4u), __nv_bfloat16(5ll));
    const half ternary = both.pair.x > shared_half[0] ? both.pair.x : shared_half[0];
    const __half_raw raw = ternary;
    out[0] = (float)both.word;
    out[1] = ternary;
    out[2] = raw.x;
    out[3] = shared_pair[0].y;
    out[4] = static_cast<float>(static_cast<nv_bfloat16>(static_cast<half>(1.00390625f)));
    out[5] = (int)__half(-2.75f);
    out[6] = (unsigned char)__nv_bfloat16(300.0f);
    out[7] = sizeof(half2) + 10 * alignof(half2) + 100 * sizeof(nv_bfloat16) + 1000 * alignof(nv_bfloat162);
}
