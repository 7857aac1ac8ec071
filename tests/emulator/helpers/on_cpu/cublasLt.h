// The part of cuBLASLt that exported programs call, computed in double: column-major, as the library documents it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32 };
enum cudaDataType_t { CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F };
enum cublasLtEpilogue_t : uint32_t {
    CUBLASLT_EPILOGUE_DEFAULT = 0, CUBLASLT_EPILOGUE_BIAS = 1, CUBLASLT_EPILOGUE_GELU = 2, CUBLASLT_EPILOGUE_GELU_BIAS = 3,
    CUBLASLT_EPILOGUE_GELU_AUX = 6, CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 7, CUBLASLT_EPILOGUE_DGELU = 8,
};
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB, CUBLASLT_MATMUL_DESC_EPILOGUE,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, DESC_ATTRIBUTES,
};
enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
};
enum { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };

struct Description {
    uint64_t values[DESC_ATTRIBUTES];  // the attributes' bytes
};
struct Layout {
    cudaDataType_t type;
    int64_t rows, cols, ld;
    int32_t batch;
    int64_t stride;
};
using cublasLtHandle_t = int*;
using cublasLtMatmulDesc_t = Description*;
using cublasLtMatrixLayout_t = Layout*;
using cublasLtMatmulPreference_t = int*;
struct cublasLtMatmulAlgo_t {};
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
};

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return *handle = new int, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t, cudaDataType_t) {
    return *desc = new Description(), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which,
                                                     const void* value, size_t bytes) {
    return std::memcpy(&desc->values[which], value, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                                 uint64_t cols, int64_t ld) {
    return *layout = new Layout{type, int64_t(rows), int64_t(cols), ld, 1, 0}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t which, const void* value,
                                                       size_t bytes) {
    void* place = which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? static_cast<void*>(&layout->batch) : &layout->stride;
    return std::memcpy(place, value, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return *preference = nullptr, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                           cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                     cublasLtMatmulHeuristicResult_t*, int* count) {
    return *count = 1, CUBLAS_STATUS_SUCCESS;
}

inline double loaded(const void* data, cudaDataType_t type, int64_t i) {
    if (type == CUDA_R_32F) return static_cast<const float*>(data)[i];
    if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    return __half2float(static_cast<const __half*>(data)[i]);
}
inline void store(void* data, cudaDataType_t type, int64_t i, double value) {
    if (type == CUDA_R_32F) static_cast<float*>(data)[i] = float(value);
    if (type == CUDA_R_16BF) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(float(value));
    if (type == CUDA_R_16F) static_cast<__half*>(data)[i] = __float2half(float(value));
}
// GELU in its tanh form, and its derivative.
inline double gelu(double x) { return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
inline double gelu_slope(double x) { return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5; }

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t A, const void* b, cublasLtMatrixLayout_t B,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t, void* d,
                                     cublasLtMatrixLayout_t D, const cublasLtMatmulAlgo_t*, void*, size_t, void*) {
    const bool a_across = desc->values[CUBLASLT_MATMUL_DESC_TRANSA], b_across = desc->values[CUBLASLT_MATMUL_DESC_TRANSB];
    const uint32_t epilogue = uint32_t(desc->values[CUBLASLT_MATMUL_DESC_EPILOGUE]);
    const void* bias = reinterpret_cast<const void*>(desc->values[CUBLASLT_MATMUL_DESC_BIAS_POINTER]);
    void* aux = reinterpret_cast<void*>(desc->values[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER]);
    const int64_t aux_ld = int64_t(desc->values[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD]), inner = a_across ? A->rows : A->cols;
    for (int64_t member = 0; member < D->batch; ++member) {
        for (int64_t place = 0; place < D->rows * D->cols; ++place) {
            const int64_t i = place % D->rows, j = place / D->rows, at = member * D->stride + i + j * D->ld;
            double sum = 0;
            for (int64_t k = 0; k < inner; ++k) {
                sum += loaded(a, A->type, member * A->stride + (a_across ? k + i * A->ld : i + k * A->ld)) *
                       loaded(b, B->type, member * B->stride + (b_across ? j + k * B->ld : k + j * B->ld));
            }
            double value = *static_cast<const float*>(alpha) * sum;
            if (*static_cast<const float*>(beta) != 0) value += *static_cast<const float*>(beta) * loaded(c, D->type, at);
            if (epilogue & 1) value += loaded(bias, D->type, i);
            if (epilogue & 4) store(aux, D->type, i + j * aux_ld, value);
            if (epilogue & 2) value = gelu(value);
            if (epilogue & 8) value *= gelu_slope(loaded(aux, D->type, i + j * aux_ld));
            store(d, D->type, at, value);
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}
