namespace exported {

enum Type { fp32, fp64, fp16, bf16, int32, uint32, uint8 };

constexpr size_t size_of(Type type) {
    return type == fp64 ? 8 : type == fp16 || type == bf16 ? 2 : type == uint8 ? 1 : 4;
}

using Text = const char* const*;  // lines of hexadecimal digits; the last one is null

// Element i is words[pieces[rows[i / row] * (pieces in a row) + i % row / piece]][i % piece]. Without `rows`, which has
// the different rows of a tensor stand here once, words follow each other.
struct Input {
    const char* name;
    Type type;
    size_t count;
    void** device;
    bool changes;  // it is an output, too
    Text words;
    size_t row, piece;
    Text rows, pieces;
};

// Of elements `places` (all of them without): the least and the greatest word that is right.
struct Output {
    const char* name;
    Type type;
    size_t count;
    void** device;
    bool exact;   // the very same bits
    bool finite;  // everywhere, also where it is not compared
    std::vector<size_t> shape;
    Text bounds, places;
};

struct Scratch {
    size_t bytes;
    void** device;
};

extern const std::vector<Input> inputs;
extern const std::vector<Output> outputs;
extern const std::vector<Scratch> scratches;

// ------------------------------------------------------------------------------------------------------ numbers

inline std::vector<uint64_t> numbers(Text lines, size_t digits) {
    std::vector<uint64_t> found;
    uint64_t number = 0;
    size_t read = 0;
    for (; *lines; ++lines) {
        for (const char* digit = *lines; *digit; ++digit) {
            number = number << 4 | uint64_t(*digit <= '9' ? *digit - '0' : *digit - 'a' + 10);
            if (++read % digits) continue;
            found.push_back(number);
            number = 0;
        }
    }
    return found;
}

inline std::vector<uint64_t> words_of(const Input& input) {
    const std::vector<uint64_t> words = numbers(input.words, 2 * size_of(input.type));
    if (!input.rows) return words;
    const std::vector<uint64_t> rows = numbers(input.rows, 4), pieces = numbers(input.pieces, 4);
    const size_t in_row = (input.row + input.piece - 1) / input.piece;
    std::vector<uint64_t> all(input.count);
    for (size_t i = 0; i < input.count; ++i) {
        const size_t column = i % input.row;
        const size_t piece = pieces[rows[i / input.row] * in_row + column / input.piece];
        all[i] = words[piece * input.piece + column % input.piece];
    }
    return all;
}

inline std::vector<unsigned char> bytes_of(const Input& input) {
    const size_t size = size_of(input.type);
    std::vector<unsigned char> bytes(input.count * size);
    const std::vector<uint64_t> words = words_of(input);
    if (words.size() != input.count) fail(std::string("the data of ") + input.name + " are not complete");
    for (size_t i = 0; i < input.count; ++i) std::memcpy(&bytes[i * size], &words[i], size);  // little-endian
    return bytes;
}

inline uint64_t word_at(const std::vector<unsigned char>& bytes, Type type, size_t i) {
    uint64_t word = 0;
    std::memcpy(&word, &bytes[i * size_of(type)], size_of(type));
    return word;
}

inline double value_of(Type type, uint64_t word) {
    const uint32_t low = static_cast<uint32_t>(word);
    float single;
    double wide;
    switch (type) {
        case fp64: std::memcpy(&wide, &word, 8); return wide;
        case fp32: std::memcpy(&single, &low, 4); return single;
        case bf16: {
            const uint32_t bits = low << 16;
            std::memcpy(&single, &bits, 4);
            return single;
        }
        case fp16: {
            const int exponent = int(low >> 10 & 31);
            const double fraction = double(low & 1023);
            const double magnitude = exponent == 31  ? (fraction != 0 ? NAN : double(INFINITY))
                                     : exponent == 0 ? std::ldexp(fraction, -24)
                                                     : std::ldexp(fraction + 1024, exponent - 25);
            return low >> 15 & 1 ? -magnitude : magnitude;
        }
        case int32: return static_cast<int32_t>(low);
        default: return double(word);
    }
}

// -------------------------------------------------------------------------------------------------------- check

// Inputs with their values; outputs and scratch with bytes 0xff, which are NaN: what is not written shows.
inline void reset() {
    for (const Output& output : outputs) {
        EXPORTED_CALL(cudaMemset(*output.device, 0xff, output.count * size_of(output.type)));
    }
    for (const Scratch& scratch : scratches) EXPORTED_CALL(cudaMemset(*scratch.device, 0xff, scratch.bytes));
    for (const Input& input : inputs) {
        const std::vector<unsigned char> bytes = bytes_of(input);
        EXPORTED_CALL(cudaMemcpy(*input.device, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    EXPORTED_CALL(cudaDeviceSynchronize());
}

inline void allocate() {
    for (const Input& input : inputs) EXPORTED_CALL(cudaMalloc(input.device, input.count * size_of(input.type)));
    for (const Output& output : outputs) {
        if (!*output.device) EXPORTED_CALL(cudaMalloc(output.device, output.count * size_of(output.type)));
    }
    for (const Scratch& scratch : scratches) EXPORTED_CALL(cudaMalloc(scratch.device, scratch.bytes));
}

inline std::vector<unsigned char> download(const void* device, size_t bytes) {
    std::vector<unsigned char> host(bytes);
    EXPORTED_CALL(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
    return host;
}

inline std::string index_of(const std::vector<size_t>& shape, size_t place) {
    std::string text;
    for (size_t axis = shape.size(); axis-- > 0; place /= shape[axis]) {
        text = (axis ? ", " : "[") + std::to_string(place % shape[axis]) + text;
    }
    return text + "]";
}

inline bool is_right(const Output& output, uint64_t got, uint64_t least, uint64_t greatest) {
    const uint64_t all_bits = ~uint64_t(0) >> (64 - 8 * size_of(output.type));
    if (least == all_bits && greatest == 0) return true;  // it may hold anything
    if (output.exact) return got == least;
    const double value = value_of(output.type, got);
    return value_of(output.type, least) <= value && value <= value_of(output.type, greatest);  // no NaN is
}

inline bool check(const Output& output) {
    const std::vector<unsigned char> got = download(*output.device, output.count * size_of(output.type));
    const std::vector<uint64_t> bounds = numbers(output.bounds, 2 * size_of(output.type));
    const std::vector<uint64_t> places = output.places ? numbers(output.places, 8) : std::vector<uint64_t>();
    const size_t compared = bounds.size() / 2;
    size_t wrong = 0;
    for (size_t i = 0; i < compared; ++i) {
        const size_t place = output.places ? places[i] : i;
        const uint64_t word = word_at(got, output.type, place), least = bounds[2 * i], greatest = bounds[2 * i + 1];
        if (is_right(output, word, least, greatest) || wrong++) continue;
        const double low = value_of(output.type, least), high = value_of(output.type, greatest);
        std::printf("%s: WRONG, first at %s: expected %.9g", output.name, index_of(output.shape, place).c_str(),
                    low == high ? low : low + (high - low) / 2);
        if (low != high) std::printf(" (%.9g to %.9g)", low, high);
        std::printf(", got %.9g\n", value_of(output.type, word));
    }
    size_t not_finite = 0, first = 0;
    for (size_t i = 0; output.finite && i < output.count; ++i) {
        if (std::isfinite(value_of(output.type, word_at(got, output.type, i)))) continue;
        if (!not_finite++) first = i;
    }
    if (not_finite) {
        std::printf("%s: WRONG, %zu elements NaN (as before the launch) or infinite, the first at %s\n", output.name,
                    not_finite, index_of(output.shape, first).c_str());
    }
    std::printf("%s: %zu of %zu elements compared, %zu wrong\n", output.name, compared, output.count, wrong);
    return wrong == 0 && not_finite == 0;
}

inline bool is_unchanged(const Input& input) {
    if (input.changes || download(*input.device, input.count * size_of(input.type)) == bytes_of(input)) return true;
    std::printf("%s: WRONG, it is an input and was written to\n", input.name);
    return false;
}

inline bool check_all(const char* when) {
    std::printf("%s\n", when);
    bool right = true;
    for (const Output& output : outputs) right = check(output) && right;
    for (const Input& input : inputs) right = is_unchanged(input) && right;
    return right;
}

}  // namespace exported
