// CUDA C++ device code, compiled for the CPU: force-included (-include) in front of every .cu file.
//
// Names, overloads and results are those of CUDA 13 for sm_90; what is not here is a compile error, never a
// guess. Each header below holds one subject. The standard headers come first, because some names of theirs
// (printf, assert) and some of glibc's own (__expf) are macros from here on.
#pragma once
#include <float.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmath>
#include <cstdio>
#include <math.h>
#include <type_traits>
#include <utility>

#include "abi.h"

#include "emulator/language.h"
#include "emulator/vector_types.h"
#include "emulator/builtin_variables.h"
#include "emulator/control.h"
#include "emulator/integers.h"
#include "emulator/rounding.h"
#include "emulator/floats.h"
#include "emulator/fast_floats.h"
#include "emulator/low_precision.h"
#include "emulator/warp.h"
#include "emulator/memory.h"
#include "emulator/atomics.h"
#include "emulator/kernel_export.h"
