// The C interface of the library: for norms/kernels/native.py by ctypes, and for binding.cpp.
//
// `type` is a StorageType (passes.h); all vectors and s have the type of the arithmetic. Returns 0, or 1 for want of
// memory.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define PUBLIC __attribute__((visibility("default")))
#else
#define PUBLIC
#endif

#define SHAPE_ARGUMENTS \
  int type, int threads, int64_t rows, int64_t channels, int64_t groups, double eps, const uint8_t* padding

// Changes with anything below; also with what binding.cpp offers. norms/kernels/native.py wants the same number.
constexpr int ABI = 2;

extern "C" {

PUBLIC int powernorm_abi();

PUBLIC int powernorm_instructions();

PUBLIC bool powernorm_use_instructions(int wanted);

PUBLIC int powernorm_forward_pass(
    SHAPE_ARGUMENTS, const void* x, const void* s_in, void* s_out, const void* a, const void* gain, const void* b,
    const void* shift, void* y, void* sum_sq);

PUBLIC int powernorm_backward_pass(
    SHAPE_ARGUMENTS, const void* x, const void* dy, const void* s, const void* a, const void* b, const void* d,
    const void* shift, void* dx, void* sum_dy, void* sum_dy_h);

PUBLIC int powernorm_moments(SHAPE_ARGUMENTS, const void* x, void* s, void* mean, void* off);

PUBLIC int powernorm_standardize(
    int type, int threads, int64_t rows, int64_t channels, double eps, double scale, double k, bool released,
    bool detach_mean, bool detach_sigma, const void* x, const void* dz, void* mean, void* inverse, void* out);

PUBLIC int powernorm_power_forward(
    SHAPE_ARGUMENTS, bool use_batch_psi, bool released, const void* x, const void* psi_sq, const void* weight,
    const void* bias, void* y, void* s, void* stats);

PUBLIC int powernorm_power_backward(
    SHAPE_ARGUMENTS, double scale, const void* x, const void* dy, const void* s, const void* stats, const void* nu,
    const void* weight, void* dx, void* dweight, void* dbias, double* row);

PUBLIC int powernorm_power_v_forward(
    SHAPE_ARGUMENTS, const void* x, const void* weight, const void* bias, void* y, void* s, void* stats);

PUBLIC int powernorm_power_v_backward(
    SHAPE_ARGUMENTS, const void* x, const void* dy, const void* s, const void* stats, const void* weight, void* dx,
    void* dweight, void* dbias, double* row);

PUBLIC int powernorm_batch_forward(
    SHAPE_ARGUMENTS, const void* x, const void* weight, const void* bias, void* y, void* s, void* stats);

PUBLIC int powernorm_batch_backward(
    SHAPE_ARGUMENTS, const void* x, const void* dy, const void* s, const void* stats, const void* weight, void* dx,
    void* dweight, void* dbias, double* row);

PUBLIC int powernorm_power_absorb(
    int type, int64_t channels, double alpha_fwd, double alpha_bkw, double update, double warmup, bool released,
    const double* row, void* tracked, void* skipped, void* bounded, void* psi_sq, void* nu);

PUBLIC int powernorm_power_v_absorb(
    int type, int64_t channels, double alpha_fwd, const double* row, void* tracked, void* skipped, void* bounded,
    void* psi_sq);

PUBLIC int powernorm_batch_absorb(
    int type, int64_t channels, double momentum, const double* row, void* tracked, void* skipped, void* bounded,
    void* mean, void* var);
}
