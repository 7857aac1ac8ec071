namespace exported {

template <class Word>
__global__ void fill(Word* first, size_t count, Word word) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) first[i] = word;
}

// Set `count` elements to a word that cudaMemset cannot write: its bytes differ.
template <class Word, class T>
void fill_words(T* first, size_t count, Word word, cudaStream_t stream) {
    static_assert(sizeof(Word) == sizeof(T), "one word for each element");
    const unsigned blocks = static_cast<unsigned>((count + 255) / 256);
    launch("fill", fill<Word>, dim3(blocks), dim3(256), 0, stream, first, count, word);
}

}  // namespace exported
