// Cross-entropy loss: losses[b, t] = -log(probs[b, t, targets[b, t]]).
//
// There is one version:
//
//   1  one thread per (b, t): one gather of a probability, wherever it lies, and one logarithm
#include "common.cuh"

template <class T>
__global__ void crossentropy_forward1(float* __restrict__ losses, const T* __restrict__ probs,
                                      const int* __restrict__ targets, int rows, int V) {
    const Offset row = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    losses[row] = -logf(to_float(probs[row * V + targets[row]]));
}
