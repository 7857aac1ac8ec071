namespace exported {

// Keeps the GPU busy until the host has queued what is timed, or the time would be that of queueing. It waits for
// nobody, so that a profiler that runs kernels one by one does not hang.
__global__ void hold(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) continue;
}

struct Settings {
    bool check_only = false, hot = false;
    int samples = 50;
};

// A tensor that the plan changes, and its start values on the device.
struct Kept {
    void *device, *start;
    size_t bytes;
};

inline std::vector<Kept> keep_start_values() {
    std::vector<Kept> kept;
    for (const Input& input : inputs) {
        if (!input.changes) continue;
        kept.push_back({*input.device, nullptr, input.count * size_of(input.type)});
        EXPORTED_CALL(cudaMalloc(&kept.back().start, kept.back().bytes));
        EXPORTED_CALL(cudaMemcpy(kept.back().start, *input.device, kept.back().bytes, cudaMemcpyDeviceToDevice));
    }
    return kept;
}

// Between two of the sorted samples where the share falls there.
inline double quantile(const std::vector<float>& sorted, double share) {
    const double place = share * double(sorted.size() - 1);
    const size_t below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (place - double(below)) * (sorted[above] - sorted[below]);
}

// Restore what the plan changes, flush L2, hold the stream, then between two events the plan: one sample.
inline void measure(const Settings& settings, void (*run)(cudaStream_t), int steps, cudaStream_t stream) {
    const std::vector<Kept> kept = keep_start_values();
    int l2 = 0;
    EXPORTED_CALL(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
    const size_t flushed = std::max(size_t(4) * size_t(l2), size_t(128) << 20);
    void* flush = nullptr;
    if (!settings.hot) EXPORTED_CALL(cudaMalloc(&flush, flushed));
    const long long cycles = 100000 + 40000LL * steps;  // some 20 us a step, and twice as long for the first
    cudaEvent_t start, stop;
    EXPORTED_CALL(cudaEventCreate(&start));
    EXPORTED_CALL(cudaEventCreate(&stop));

    const auto sample = [&] {
        for (const Kept& one : kept) {
            EXPORTED_CALL(cudaMemcpyAsync(one.device, one.start, one.bytes, cudaMemcpyDeviceToDevice, stream));
        }
        if (!settings.hot) EXPORTED_CALL(cudaMemsetAsync(flush, 0, flushed, stream));
        EXPORTED_LAUNCH((hold), dim3(1), dim3(1), 0, stream, cycles);
        EXPORTED_CALL(cudaEventRecord(start, stream));
        run(stream);
        EXPORTED_CALL(cudaEventRecord(stop, stream));
        EXPORTED_CALL(cudaEventSynchronize(stop));
        float milliseconds = 0.0f;
        EXPORTED_CALL(cudaEventElapsedTime(&milliseconds, start, stop));
        return milliseconds * 1000.0f;
    };

    // Clocks rise while there is work.
    for (float total = 0.0f, count = 0.0f; count < 5 || (total < 20000 && count < 200); ++count) total += sample();
    std::vector<float> samples;
    for (int i = 0; i < settings.samples; ++i) samples.push_back(sample());
    std::sort(samples.begin(), samples.end());
    std::printf("time: median %.2f us of %d samples, quartiles %.2f to %.2f us, L2 %s before each\n",
                quantile(samples, 0.5), settings.samples, quantile(samples, 0.25), quantile(samples, 0.75),
                settings.hot ? "not flushed" : "flushed");
}

inline Settings parse(int count, char** words) {
    Settings settings;
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word == "--check-only") {
            settings.check_only = true;
        } else if (word == "--hot") {
            settings.hot = true;
        } else if (word == "--samples" && i + 1 < count) {
            char* end = nullptr;
            const long number = std::strtol(words[++i], &end, 10);
            if (*end || number < 1 || number > 1000000) fail(std::string("--samples ") + words[i] + " is not 1 to 1000000");
            settings.samples = int(number);
        } else {
            if (word != "--help" && word != "-h") std::fprintf(stderr, "error: unknown option %s\n", words[i]);
            std::printf("options: --check-only, --hot (L2 not flushed), --samples N\n");
            std::exit(word == "--help" || word == "-h" ? 0 : kFailed);
        }
    }
    return settings;
}

inline int run_program(int count, char** words, void (*prepare)(), void (*run)(cudaStream_t), int steps) {
    const Settings settings = parse(count, words);
    cudaDeviceProp properties;
    require(cudaGetDeviceProperties(&properties, 0), "no GPU");
    std::printf("%s, sm_%d%d, %d multiprocessors\n", properties.name, properties.major, properties.minor,
                properties.multiProcessorCount);
    allocate();
    prepare();
    reset();
    cudaStream_t stream;
    EXPORTED_CALL(cudaStreamCreate(&stream));

    wait_for_each_launch = true;
    run(stream);
    require(cudaStreamSynchronize(stream), "the plan");
    wait_for_each_launch = false;
    if (!check_all("check:")) return kWrong;
    if (settings.check_only) return 0;

    reset();
    measure(settings, run, steps, stream);
    return check_all("after the last of the timed launches:") ? 0 : kWrong;
}

}  // namespace exported
