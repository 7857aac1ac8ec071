// All of CUDA's device side is in the header that is force-included.
#pragma once
#include "cuda_emulator.h"
