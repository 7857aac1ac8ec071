// All-reduce over GPUs: recv[r, i] = sum over ranks r2 of send[r2, i], for every rank r.
//
// Each rank is a GPU with a process of its own; it contributes one row of `send` and receives the sum into its row of
// `recv`. What makes this fast is how rows travel between GPUs, which no kernel that sees one GPU alone can do.
//
// There is one version:
//
//   1  NCCL's all-reduce: chunks of partial sums travel from GPU to GPU, around a ring for instance, so that every link
//      between two GPUs carries each element twice at most, however many GPUs there are
//
// There is no kernel of our own: NCCL brings its own, with block sizes that it chooses itself.
