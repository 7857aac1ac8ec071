namespace exported {

inline void require(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) fail(std::string(what) + ": cuBLASLt status " + std::to_string(int(status)));
}

// A column-major matrix, as cuBLASLt thinks: of a row-major one, rows and columns are exchanged. Sizes in elements.
struct Matrix {
    const void* data;
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld, stride;
    uint32_t alignment;  // bytes
    bool transpose;
};

// out = epilogue(alpha * left * right + beta * out), for `batch` members. With the first algorithm that cuBLASLt
// suggests: kbench measures several and takes the fastest.
class Gemm {
public:
    void create(const char* name, cublasComputeType_t compute, Matrix left, Matrix right, Matrix out, float alpha,
                float beta, int32_t batch, cublasLtEpilogue_t epilogue, const void* bias, void* aux, int64_t aux_ld) {
        name_ = name, left_ = left.data, right_ = right.data, out_ = const_cast<void*>(out.data);
        alpha_ = alpha, beta_ = beta;
        if (!handle_) {
            require(cublasLtCreate(&handle_), name);
            EXPORTED_CALL(cudaMalloc(&workspace_, kWorkspace));
        }
        require(cublasLtMatmulDescCreate(&desc_, compute, CUDA_R_32F), name);
        set(CUBLASLT_MATMUL_DESC_TRANSA, left.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, right.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        if (bias) {
            set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out.type);
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        }
        if (aux) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_ld);
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
        }
        left_layout_ = layout(left, batch), right_layout_ = layout(right, batch), out_layout_ = layout(out, batch);
        choose(left, right, out);
    }

    void run(cudaStream_t stream) const {
        require(cublasLtMatmul(handle_, desc_, &alpha_, left_, left_layout_, right_, right_layout_, &beta_, out_,
                               out_layout_, out_, out_layout_, &algorithm_, workspace_, kWorkspace, stream), name_);
        if (wait_for_each_launch) require(cudaStreamSynchronize(stream), name_);
    }

private:
    static constexpr size_t kWorkspace = size_t(32) << 20;  // bytes: what cuBLAS itself takes on sm_90

    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        require(cublasLtMatmulDescSetAttribute(desc_, attribute, &value, sizeof(value)), name_);
    }

    template <class T>
    void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
        require(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), name_);
    }

    cublasLtMatrixLayout_t layout(const Matrix& matrix, int32_t batch) {
        cublasLtMatrixLayout_t made;
        require(cublasLtMatrixLayoutCreate(&made, matrix.type, matrix.rows, matrix.cols, matrix.ld), name_);
        require(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)), name_);
        require(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &matrix.stride,
                                                 sizeof(matrix.stride)), name_);
        return made;
    }

    void choose(const Matrix& left, const Matrix& right, const Matrix& out) {
        cublasLtMatmulPreference_t preference;
        require(cublasLtMatmulPreferenceCreate(&preference), name_);
        prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
        prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, left.alignment);
        prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, right.alignment);
        prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out.alignment);
        prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out.alignment);
        // Partial sums must not be rounded to a 16-bit output's type.
        const uint32_t reductions =
            out.type == CUDA_R_32F ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
        cublasLtMatmulHeuristicResult_t found;
        int count = 0;
        require(cublasLtMatmulAlgoGetHeuristic(handle_, desc_, left_layout_, right_layout_, out_layout_, out_layout_,
                                               preference, 1, &found, &count), name_);
        if (count == 0) fail(std::string(name_) + ": cuBLASLt has no algorithm for it");
        algorithm_ = found.algo;
        cublasLtMatmulPreferenceDestroy(preference);
    }

    // For all of them: they run one after the other.
    static inline cublasLtHandle_t handle_ = nullptr;
    static inline void* workspace_ = nullptr;

    const char* name_ = "";
    const void *left_ = nullptr, *right_ = nullptr;
    void* out_ = nullptr;
    float alpha_ = 1.0f, beta_ = 0.0f;
    cublasLtMatmulDesc_t desc_ = nullptr;
    cublasLtMatrixLayout_t left_layout_ = nullptr, right_layout_ = nullptr, out_layout_ = nullptr;
    cublasLtMatmulAlgo_t algorithm_ = {};
};

}  // namespace exported
