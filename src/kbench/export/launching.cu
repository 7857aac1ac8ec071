namespace exported {

constexpr int kWrong = 1, kFailed = 2;  // exit statuses beside 0

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "error: %s\n", what.c_str());
    std::exit(kFailed);
}

inline void require(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(status));
}

// An argument as the kernel declares it: pointers may point to packets of the elements, numbers must fit.
template <class To, class From>
To argument(From value) {
    if constexpr (std::is_pointer_v<To>) {
        return reinterpret_cast<To>(value);
    } else {
        static_assert(!std::is_pointer_v<From>, "the kernel takes a number");
        static_assert(!std::is_integral_v<To> || std::is_integral_v<From>, "the kernel takes a whole number");
        const To converted = static_cast<To>(value);
        if (std::is_integral_v<To> && static_cast<From>(converted) != value) fail("an argument does not fit");
        return converted;
    }
}

// More than 48 KiB of a block, static and dynamic together, has to be asked for.
template <class... P>
void allow_shared(const char* name, void (*kernel)(P...), int bytes) {
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
}

inline bool wait_for_each_launch = false;  // so that an error names its kernel

template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
            A... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "the plan passes another number of arguments than the kernel takes");
    kernel<<<grid, block, shared, stream>>>(argument<P>(arguments)...);
    require(cudaGetLastError(), name);
    if (wait_for_each_launch) require(cudaStreamSynchronize(stream), name);
}

// clang-format off
#define EXPORTED_LAUNCH(kernel, ...) ::exported::launch(#kernel, kernel, __VA_ARGS__)
#define EXPORTED_ALLOW_SHARED(kernel, bytes) ::exported::allow_shared(#kernel, kernel, bytes)
#define EXPORTED_CALL(call) ::exported::require(call, #call)
// clang-format on

}  // namespace exported
