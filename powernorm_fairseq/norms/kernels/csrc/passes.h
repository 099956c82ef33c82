// What the parts of the library know of each other: the passes over rows, built once per instruction set.
//
// Notation as in norms/rows.py. S is the type in memory, T the type of all arithmetic: double for double, float for
// float, bfloat16 and float16.
#pragma once

#include <cstdint>

enum StorageType { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3, STORAGE_TYPES = 4 };

// Shapes: x, y, dy, dx (rows, channels) of type S; padding (rows,) bytes; s (rows, groups) and vectors (channels,) of
// type T.
// Null: padding - there is none; s_in - to be computed; shift - zero; any output - not wanted.
struct ForwardPass {
  const void* x;
  void* y;
  const uint8_t* padding;
  const void* s_in;
  void* s_out;
  const void* a;
  const void* b;
  const void* shift;
  bool want_sum_sq;
  int64_t rows, channels, groups;
  double eps;
};

struct BackwardPass {
  const void* x;
  const void* dy;
  void* dx;
  const uint8_t* padding;
  const void* s;
  const void* a;
  const void* b;
  const void* d;
  const void* shift;
  bool want_sums;
  int64_t rows, channels, groups;
};

struct StandardizePass {
  const void* x;
  const void* dz;  // null in the forward pass
  void* out;       // z or dx
  void* mean;      // (rows,) of type T, as inverse
  void* inverse;
  bool released, detach_mean, detach_sigma;
  double eps, scale, k;
  int64_t rows, channels;
};

// One function per pass; each treats the rows [begin, end) with `block` rows at a time (1 or 4). Sums go to (channels,)
// of type T, which it sets; `scratch` holds SCRATCH_VECTORS vectors of type T.
constexpr int SCRATCH_VECTORS = 8;

struct Passes {
  int64_t element_bytes;  // of type S
  void (*forward)(const ForwardPass&, int64_t begin, int64_t end, int block, void* scratch, void* sum_sq);
  void (*backward)(
      const BackwardPass&, int64_t begin, int64_t end, int block, void* scratch, void* sum_dy, void* sum_dy_h);
  // Count, mean and sum of squared deviations of the real rows.
  int64_t (*moments)(const ForwardPass&, int64_t begin, int64_t end, int block, void* scratch, void* mean, void* off);
  void (*standardize)(const StandardizePass&, int64_t begin, int64_t end, int block, void* scratch);
  void (*standardize_backward)(const StandardizePass&, int64_t begin, int64_t end, int block, void* scratch);
};

// By storage type.
extern const Passes passes_portable[STORAGE_TYPES];
#ifdef X86_BUILDS
extern const Passes passes_avx2[STORAGE_TYPES];
extern const Passes passes_avx512[STORAGE_TYPES];
#endif
