// Does nothing: what is timed of it is what launching costs.
__global__ void empty() {}
