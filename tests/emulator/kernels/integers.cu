// Integer intrinsics, bit casts and integer min/max. A result takes row r of `out`.
template <class A, class B> constexpr bool kSame = false;
template <class A> constexpr bool kSame<A, A> = true;

static_assert(kSame<decltype(min(1, 2u)), unsigned int> && kSame<decltype(max(1ll, 2ull)), unsigned long long>, "");
static_assert(kSame<decltype(min(1l, 2l)), long> && kSame<decltype(max(1.0f, 2.0)), double>, "");
static_assert(kSame<decltype(__popc(1u)), int> && kSame<decltype(__umul64hi(1ull, 1ull)), unsigned long long>, "");

__global__ void integers(unsigned int* out, const unsigned int* a, const unsigned int* b, const unsigned int* c,
                         int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const unsigned x = a[i], y = b[i], z = c[i];
    const int s = (int)x, t = (int)y;
    const unsigned results[] = {
        (unsigned)__popc(x), (unsigned)__clz(s), (unsigned)__ffs(s), __brev(x), __umulhi(x, y), (unsigned)__mulhi(s, t),
        __umul24(x, y), (unsigned)__mul24(s, t), __usad(x, y, z), __sad(s, t, z), (unsigned)__hadd(s, t),
        (unsigned)__rhadd(s, t), __uhadd(x, y), __urhadd(x, y), __byte_perm(x, y, z), __funnelshift_l(x, y, z),
        __funnelshift_r(x, y, z), __funnelshift_lc(x, y, z), __funnelshift_rc(x, y, z), (unsigned)__dp4a(s, t, (int)z),
        __dp4a(x, y, z), min(x, y), max(x, y), (unsigned)min(s, t), (unsigned)max(s, t), min(s, y), max(x, t),
        __float_as_uint(__uint_as_float(x)), (unsigned)__float_as_int(__int_as_float(s)),
        (unsigned)__double2hiint(__hiloint2double(s, t)), (unsigned)__double2loint(__hiloint2double(s, t)),
        __fns(x, z & 31, (int)(y % 7) - 3)};
    for (int r = 0; r < 32; ++r) out[r * n + i] = results[r];
}

__global__ void wide_integers(unsigned long long* out, const unsigned long long* a, const unsigned long long* b,
                              int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const unsigned long long x = a[i], y = b[i];
    const long long s = (long long)x, t = (long long)y;
    const unsigned long long results[] = {
        (unsigned long long)__popcll(x), (unsigned long long)__clzll(s), (unsigned long long)__ffsll(s), __brevll(x),
        __umul64hi(x, y), (unsigned long long)__mul64hi(s, t), min(x, y), max(x, y), (unsigned long long)min(s, t),
        (unsigned long long)max(s, t), (unsigned long long)__double_as_longlong(__longlong_as_double(s))};
    for (int r = 0; r < 11; ++r) out[r * n + i] = results[r];
}
