// The C interface that norms/kernels/native.py calls: passes over all rows by several threads, and whole norms.
#include "native.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>

#include "call.h"
#include "passes.h"

namespace {

using Table = const Passes*;

Table best_table() {
#ifdef X86_BUILDS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
    return passes_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return passes_avx2;
#endif
  return passes_portable;
}

Table table = best_table();

template <class T>
ForwardPass forward_pass(const Shape& shape, const void* x, const void* s_in, void* s_out, double eps) {
  ForwardPass pass{};
  pass.x = x;
  pass.padding = shape.padding;
  pass.s_in = s_in;
  pass.s_out = s_out;
  pass.rows = shape.rows;
  pass.channels = shape.channels;
  pass.groups = shape.groups;
  pass.eps = eps;
  return pass;
}

BackwardPass backward_pass(const Shape& shape, const void* x, const void* dy, const void* s) {
  BackwardPass pass{};
  pass.x = x;
  pass.dy = dy;
  pass.padding = shape.padding;
  pass.s = s;
  pass.rows = shape.rows;
  pass.channels = shape.channels;
  pass.groups = shape.groups;
  return pass;
}

// Whether a real row holds anything but zeros; nearly always the first row says so.
template <class S>
bool any_nonzero(const Shape& shape, const S* dy) {
  for (int64_t row = 0; row < shape.rows; ++row) {
    if (shape.padding != nullptr && shape.padding[row]) continue;
    const S* values = dy + row * shape.channels;
    for (int64_t j = 0; j < shape.channels; ++j)
      if (static_cast<S>(values[j] << 1) != 0) return true;  // not the sign: minus zero is zero
  }
  return false;
}

bool live_gradient(int type, const Shape& shape, const void* dy) {
  if (type == FLOAT64) return any_nonzero(shape, static_cast<const uint64_t*>(dy));
  if (type == FLOAT32) return any_nonzero(shape, static_cast<const uint32_t*>(dy));
  return any_nonzero(shape, static_cast<const uint16_t*>(dy));
}

// One update's contribution of a backward pass, (dropped, count, sums...): zeros if nothing came back, and all of it
// dropped if a sum is not finite (norms/rows.py: contribution).
void guard(double* row, int64_t sums, bool live, int64_t count) {
  bool finite = true;
  for (int64_t j = 0; j < sums; ++j) finite = finite && std::isfinite(row[2 + j]);
  row[0] = live && !finite ? 1.0 : 0.0;
  row[1] = live && finite ? static_cast<double>(count) : 0.0;
  if (!live || !finite) std::fill(row + 2, row + 2 + sums, 0.0);
}

template <class T>
void copy(const double* from, void* to, int64_t n) {
  if (to == nullptr) return;
  for (int64_t j = 0; j < n; ++j) static_cast<T*>(to)[j] = static_cast<T>(from[j]);
}

template <class T>
T at(const void* vector, int64_t j, T otherwise) {
  return vector == nullptr ? otherwise : static_cast<const T*>(vector)[j];
}

// ---- passes ------------------------------------------------------------------------------------------------------

template <class T>
void forward_rows(
    int type, const Shape& shape, const void* x, const void* s_in, void* s_out, const void* a, const void* gain,
    const void* b, const void* shift, void* y, void* sum_sq, double eps) {
  Call<T> call(table[type], shape, 2);
  ForwardPass pass = forward_pass<T>(shape, x, s_in, s_out, eps);
  pass.y = y;
  T* factor = call.vector(1);
  for (int64_t j = 0; j < shape.channels; ++j) factor[j] = at<T>(a, j, 1) * at<T>(gain, j, 1);
  pass.a = factor;
  pass.b = b != nullptr ? b : call.vector(0);
  pass.shift = shift;
  pass.want_sum_sq = sum_sq != nullptr;
  call.run(pass);
  if (sum_sq != nullptr) copy<T>(call.total(0), sum_sq, shape.channels);
}

template <class T>
void backward_rows(
    int type, const Shape& shape, const void* x, const void* dy, const void* s, const void* a, const void* b,
    const void* d, const void* shift, void* dx, void* sum_dy, void* sum_dy_h) {
  Call<T> call(table[type], shape, 4);
  BackwardPass pass = backward_pass(shape, x, dy, s);
  pass.dx = dx;
  pass.a = a != nullptr ? a : call.vector(1);
  pass.b = b != nullptr ? b : call.vector(0);
  pass.d = d != nullptr ? d : call.vector(0);
  pass.shift = shift != nullptr || d == nullptr ? shift : call.vector(0);
  pass.want_sums = sum_dy != nullptr;
  call.run(pass);
  if (sum_dy == nullptr) return;
  copy<T>(call.total(0), sum_dy, shape.channels);
  copy<T>(call.total(1), sum_dy_h, shape.channels);
}

template <class T>
int64_t moment_rows(int type, const Shape& shape, const void* x, void* s, void* mean, void* off, double eps) {
  Call<T> call(table[type], shape, 0, MOMENT_STRIP_BYTES);
  const int64_t count = call.run_moments(forward_pass<T>(shape, x, nullptr, s, eps));
  copy<T>(call.sum, mean, shape.channels);
  copy<T>(call.sum + shape.channels, off, shape.channels);
  return count;
}

template <class T>
void standardize_rows(int type, const StandardizePass& pass, int threads) {
  Call<T> call(table[type], Shape{pass.rows, pass.channels, 0, nullptr, threads}, 0);
  // Its sums wait for each other: rows side by side hide that, and pay for more streams from beyond the cache too.
  if (pass.dz == nullptr && pass.rows * pass.channels * call.passes.element_bytes <= 4 * CACHE_BYTES)
    call.strips.block = 4;
  const auto run = pass.dz == nullptr ? call.passes.standardize : call.passes.standardize_backward;
  for_all(call.strips.number, call.strips.threads, [&](int64_t strip, int thread) {
    run(pass, call.strips.begin(strip), call.strips.end(strip, pass.rows), call.strips.block, call.scratch_of(thread));
  });
}

// ---- whole norms: PowerNorm, PN-V and BatchNorm (norms/functional.py has their formulas) ---------------------------

// stats: (3, C) sum of h^2 over real rows, r, and the r of the backward pass.
template <class T>
void power_forward(
    int type, const Shape& shape, const void* x, const void* psi_sq, const void* weight, const void* bias, void* y,
    void* s, void* stats, double eps, bool use_batch_psi, bool released) {
  Call<T> call(table[type], shape, 2);
  const int64_t channels = shape.channels;
  T *a = call.vector(0), *zeros = bias == nullptr ? call.vector(0) : nullptr;
  T *sum_sq = static_cast<T*>(stats), *r = sum_sq + channels, *r_back = r + channels;
  const double count = static_cast<double>(std::max<int64_t>(real_rows(shape), 1));
  ForwardPass pass = forward_pass<T>(shape, x, nullptr, s, eps);
  const auto batch_r = [&](int64_t j) {
    return static_cast<T>(1 / std::sqrt(sum_sq[j] / count + eps));
  };
  pass.want_sum_sq = true;
  if (use_batch_psi) {
    call.run(pass);
    copy<T>(call.total(0), sum_sq, channels);
    for (int64_t j = 0; j < channels; ++j) r[j] = r_back[j] = batch_r(j);
    pass.s_in = s;
    pass.want_sum_sq = false;
  } else {
    const T* running = static_cast<const T*>(psi_sq);
    for (int64_t j = 0; j < channels; ++j) r[j] = static_cast<T>(1 / std::sqrt(static_cast<double>(running[j]) + eps));
  }
  for (int64_t j = 0; j < channels; ++j) a[j] = r[j] * at<T>(weight, j, 1);
  pass.y = y;
  pass.a = a;
  pass.b = bias != nullptr ? bias : zeros;
  call.run(pass);
  if (use_batch_psi) return;
  copy<T>(call.total(0), sum_sq, channels);
  for (int64_t j = 0; j < channels; ++j) r_back[j] = released ? batch_r(j) : r[j];
}

// row: null, or (2 + 3 C,) (dropped, count, sums of h^2, xhat^2 and weight * dy * xhat / scale).
template <class T>
void power_backward(
    int type, const Shape& shape, const void* x, const void* dy, const void* s, const void* stats, const void* nu,
    const void* weight, double scale, void* dx, void* dweight, void* dbias, double* row) {
  Call<T> call(table[type], shape, 2);
  const int64_t channels = shape.channels;
  const T *sum_sq = static_cast<const T*>(stats), *r = sum_sq + channels, *r_back = r + channels;
  const bool live = live_gradient(type, shape, dy);
  T *a = call.vector(0), *b = call.vector(0);
  for (int64_t j = 0; j < channels; ++j) {
    a[j] = r_back[j] * at<T>(weight, j, 1);
    // Nothing came back, so nothing is passed on: the approximation would subtract nu * xhat all the same.
    if (live) b[j] = static_cast<const T*>(nu)[j] * static_cast<T>(scale) * r[j] * r_back[j];
  }
  BackwardPass pass = backward_pass(shape, x, dy, s);
  pass.dx = dx;
  pass.a = a;
  pass.b = b;
  pass.want_sums = true;
  call.run(pass);
  copy<T>(call.total(0), dbias, channels);
  const double* sum_dy_h = call.total(1);
  for (int64_t j = 0; j < channels; ++j) {
    const T sum_dy_xhat = static_cast<T>(sum_dy_h[j] * r[j]);
    if (dweight != nullptr) static_cast<T*>(dweight)[j] = sum_dy_xhat;
    if (row == nullptr) continue;
    row[2 + j] = sum_sq[j];
    row[2 + channels + j] = sum_sq[j] * r[j] * r[j];
    row[2 + 2 * channels + j] = sum_dy_xhat * at<T>(weight, j, 1) / static_cast<T>(scale);
  }
  if (row != nullptr) guard(row, 3 * channels, live, real_rows(shape));
}

// stats: (2, C) sum of h^2 over real rows, and r.
template <class T>
void power_v_forward(
    int type, const Shape& shape, const void* x, const void* weight, const void* bias, void* y, void* s, void* stats,
    double eps) {
  Call<T> call(table[type], shape, 2);
  const int64_t channels = shape.channels;
  T *a = call.vector(0), *zeros = bias == nullptr ? call.vector(0) : nullptr;
  T *sum_sq = static_cast<T*>(stats), *r = sum_sq + channels;
  const double count = static_cast<double>(std::max<int64_t>(real_rows(shape), 1));
  ForwardPass pass = forward_pass<T>(shape, x, nullptr, s, eps);
  pass.want_sum_sq = true;
  call.run(pass);
  copy<T>(call.total(0), sum_sq, channels);
  for (int64_t j = 0; j < channels; ++j) {
    r[j] = static_cast<T>(1 / std::sqrt(sum_sq[j] / count + eps));
    a[j] = r[j] * at<T>(weight, j, 1);
  }
  pass.s_in = s;
  pass.want_sum_sq = false;
  pass.y = y;
  pass.a = a;
  pass.b = bias != nullptr ? bias : zeros;
  call.run(pass);
}

// row: null, or (2 + C,) (dropped, count, sum of h^2).
template <class T>
void power_v_backward(
    int type, const Shape& shape, const void* x, const void* dy, const void* s, const void* stats, const void* weight,
    void* dx, void* dweight, void* dbias, double* row) {
  Call<T> call(table[type], shape, 2);
  const int64_t channels = shape.channels, count = real_rows(shape);
  const T *sum_sq = static_cast<const T*>(stats), *r = sum_sq + channels;
  T *a = call.vector(0), *b = call.vector(0);
  BackwardPass pass = backward_pass(shape, x, dy, s);
  pass.want_sums = true;
  call.run(pass);
  copy<T>(call.total(0), dbias, channels);
  const double* sum_dy_h = call.total(1);
  for (int64_t j = 0; j < channels; ++j) {
    a[j] = r[j] * at<T>(weight, j, 1);
    b[j] = a[j] * r[j] * r[j] * static_cast<T>(sum_dy_h[j] / static_cast<double>(std::max<int64_t>(count, 1)));
    if (dweight != nullptr) static_cast<T*>(dweight)[j] = static_cast<T>(sum_dy_h[j] * r[j]);
    if (row != nullptr) row[2 + j] = sum_sq[j];
  }
  if (row != nullptr) guard(row, channels, live_gradient(type, shape, dy), count);
  if (dx == nullptr) return;
  pass.dx = dx;
  pass.a = a;
  pass.b = b;
  pass.want_sums = false;
  call.run(pass);
}

// stats: (3, C) mean, sum of squared deviations, and r.
template <class T>
void batch_forward(
    int type, const Shape& shape, const void* x, const void* weight, const void* bias, void* y, void* s, void* stats,
    double eps) {
  const int64_t channels = shape.channels;
  T *mean = static_cast<T*>(stats), *off = mean + channels, *r = off + channels;
  const double count = static_cast<double>(std::max<int64_t>(moment_rows<T>(type, shape, x, s, mean, off, eps), 1));
  Call<T> call(table[type], shape, 2);
  T *a = call.vector(0), *zeros = bias == nullptr ? call.vector(0) : nullptr;
  for (int64_t j = 0; j < channels; ++j) {
    r[j] = static_cast<T>(1 / std::sqrt(off[j] / count + eps));
    a[j] = r[j] * at<T>(weight, j, 1);
  }
  ForwardPass pass = forward_pass<T>(shape, x, s, nullptr, eps);
  pass.y = y;
  pass.a = a;
  pass.b = bias != nullptr ? bias : zeros;
  pass.shift = mean;
  call.run(pass);
}

// row: null, or (2 + 2 C,) (dropped, count, sum of h, sum of h^2).
template <class T>
void batch_backward(
    int type, const Shape& shape, const void* x, const void* dy, const void* s, const void* stats, const void* weight,
    void* dx, void* dweight, void* dbias, double* row) {
  Call<T> call(table[type], shape, 3);
  const int64_t channels = shape.channels, real = real_rows(shape);
  const double count = static_cast<double>(real), n = std::max(count, 1.0);
  const T *mean = static_cast<const T*>(stats), *off = mean + channels, *r = off + channels;
  T *a = call.vector(0), *b = call.vector(0), *d = call.vector(0);
  BackwardPass pass = backward_pass(shape, x, dy, s);
  pass.shift = mean;
  pass.want_sums = true;
  call.run(pass);
  const double *sum_dy = call.total(0), *sum_dy_h = call.total(1);
  copy<T>(sum_dy, dbias, channels);
  for (int64_t j = 0; j < channels; ++j) {
    a[j] = r[j] * at<T>(weight, j, 1);
    b[j] = a[j] * r[j] * r[j] * static_cast<T>(sum_dy_h[j] / n);
    d[j] = a[j] * static_cast<T>(sum_dy[j] / n);
    if (dweight != nullptr) static_cast<T*>(dweight)[j] = static_cast<T>(sum_dy_h[j] * r[j]);
    if (row == nullptr) continue;
    const double centre = mean[j];
    row[2 + j] = centre * count;
    row[2 + channels + j] = off[j] + centre * centre * count;
  }
  if (row != nullptr) guard(row, 2 * channels, live_gradient(type, shape, dy), real);
  if (dx == nullptr) return;
  pass.dx = dx;
  pass.a = a;
  pass.b = b;
  pass.d = d;
  pass.want_sums = false;
  call.run(pass);
}

// ---- the end of an update: norms' statistics (float or double) and counters absorb a contribution -----------------

// counters: updates tracked, skipped, bounded. Returns whether any tokens counted.
template <class T>
bool count_update(const double* row, T* const* counters) {
  if (row[0] > 0) *counters[1] += 1;
  if (row[1] > 0) *counters[0] += 1;
  return row[1] > 0;
}

// PowerNorm.absorb in norms/power.py has the recursion and why its step is bounded.
template <class T>
void power_absorb(
    const double* row, int64_t channels, T* psi_sq, T* nu, T* const* counters, double alpha_fwd, double alpha_bkw,
    double update, double warmup, bool released) {
  const double done = std::min(static_cast<double>(*counters[0]), update), step = 1 - alpha_bkw;
  if (!count_update(row, counters)) return;
  const double *sum_sq = row + 2, *sum_xhat = sum_sq + channels, *sum_g_xhat = sum_xhat + channels;
  const bool in_warmup = update + (released ? 1 : 0) < warmup;
  bool bounded = false;
  for (int64_t j = 0; j < channels; ++j) {
    const double batch = sum_sq[j] / row[1], gamma = sum_xhat[j] / row[1], lambda = sum_g_xhat[j] / row[1];
    double mean = psi_sq[j];
    if (in_warmup) mean += (batch - mean) / (done + 1);
    if (released || !in_warmup) mean = alpha_fwd * mean + (1 - alpha_fwd) * batch;
    psi_sq[j] = static_cast<T>(mean);
    nu[j] = static_cast<T>(nu[j] + std::min(1 / gamma, step) * (lambda - nu[j] * gamma));
    bounded = bounded || gamma * step > 1;
  }
  if (bounded) *counters[2] += 1;
}

template <class T>
void power_v_absorb(const double* row, int64_t channels, T* psi_sq, T* const* counters, double alpha_fwd) {
  if (!count_update(row, counters)) return;
  for (int64_t j = 0; j < channels; ++j)
    psi_sq[j] = static_cast<T>(alpha_fwd * psi_sq[j] + (1 - alpha_fwd) * row[2 + j] / row[1]);
}

// A momentum below 0 weighs all updates the same.
template <class T>
void batch_absorb(const double* row, int64_t channels, T* mean, T* var, T* const* counters, double momentum) {
  const double weight = momentum < 0 ? 1 / (static_cast<double>(*counters[0]) + 1) : momentum, count = row[1];
  if (!count_update(row, counters)) return;
  for (int64_t j = 0; j < channels; ++j) {
    const double sum = row[2 + j], sum_sq = row[2 + channels + j], centre = sum / count;
    const double unbiased = std::max(sum_sq - sum * centre, 0.0) / std::max(count - 1, 1.0);
    mean[j] = static_cast<T>(mean[j] + weight * (centre - mean[j]));
    var[j] = static_cast<T>(var[j] + weight * (unbiased - var[j]));
  }
}

}  // namespace

// ---- the interface -----------------------------------------------------------------------------------------------

#define FOR_ARITHMETIC(function, ...) \
  try {                               \
    if (type == FLOAT64)              \
      function<double>(__VA_ARGS__);  \
    else                              \
      function<float>(__VA_ARGS__);   \
  } catch (const std::bad_alloc&) {   \
    return 1;                         \
  }                                   \
  return 0

#define SHAPE Shape{rows, channels, groups, padding, threads}

extern "C" {

PUBLIC int powernorm_abi() { return ABI; }

// The instruction set in use: 0 portable, 1 AVX2, 2 AVX-512.
PUBLIC int powernorm_instructions() {
#ifdef X86_BUILDS
  if (table == passes_avx512) return 2;
  if (table == passes_avx2) return 1;
#endif
  return 0;
}

// For tests: another one that this processor has. Returns whether it has it.
PUBLIC bool powernorm_use_instructions(int wanted) {
  const Table best = best_table();
  if (wanted == 0) table = passes_portable;
#ifdef X86_BUILDS
  if (wanted == 1 && best != passes_portable) table = passes_avx2;
  if (wanted == 2 && best == passes_avx512) table = passes_avx512;
#endif
  return powernorm_instructions() == wanted;
}

PUBLIC int powernorm_forward_pass(
    SHAPE_ARGUMENTS, const void* x, const void* s_in, void* s_out, const void* a, const void* gain, const void* b,
    const void* shift, void* y, void* sum_sq) {
  FOR_ARITHMETIC(forward_rows, type, SHAPE, x, s_in, s_out, a, gain, b, shift, y, sum_sq, eps);
}

PUBLIC int powernorm_backward_pass(
    SHAPE_ARGUMENTS, const void* x, const void* dy, const void* s, const void* a, const void* b, const void* d,
    const void* shift, void* dx, void* sum_dy, void* sum_dy_h) {
  static_cast<void>(eps);
  FOR_ARITHMETIC(backward_rows, type, SHAPE, x, dy, s, a, b, d, shift, dx, sum_dy, sum_dy_h);
}

PUBLIC int powernorm_moments(SHAPE_ARGUMENTS, const void* x, void* s, void* mean, void* off) {
  FOR_ARITHMETIC(moment_rows, type, SHAPE, x, s, mean, off, eps);
}

PUBLIC int powernorm_standardize(
    int type, int threads, int64_t rows, int64_t channels, double eps, double scale, double k, bool released,
    bool detach_mean, bool detach_sigma, const void* x, const void* dz, void* mean, void* inverse, void* out) {
  const StandardizePass pass{
      x, dz, out, mean, inverse, released, detach_mean, detach_sigma, eps, scale, k, rows, channels};
  FOR_ARITHMETIC(standardize_rows, type, pass, threads);
}

PUBLIC int powernorm_power_forward(
    SHAPE_ARGUMENTS, bool use_batch_psi, bool released, const void* x, const void* psi_sq, const void* weight,
    const void* bias, void* y, void* s, void* stats) {
  FOR_ARITHMETIC(
      power_forward, type, SHAPE, x, psi_sq, weight, bias, y, s, stats, eps, use_batch_psi, released);
}

PUBLIC int powernorm_power_backward(
    SHAPE_ARGUMENTS, double scale, const void* x, const void* dy, const void* s, const void* stats, const void* nu,
    const void* weight, void* dx, void* dweight, void* dbias, double* row) {
  static_cast<void>(eps);
  FOR_ARITHMETIC(power_backward, type, SHAPE, x, dy, s, stats, nu, weight, scale, dx, dweight, dbias, row);
}

PUBLIC int powernorm_power_v_forward(
    SHAPE_ARGUMENTS, const void* x, const void* weight, const void* bias, void* y, void* s, void* stats) {
  FOR_ARITHMETIC(power_v_forward, type, SHAPE, x, weight, bias, y, s, stats, eps);
}

PUBLIC int powernorm_power_v_backward(
    SHAPE_ARGUMENTS, const void* x, const void* dy, const void* s, const void* stats, const void* weight, void* dx,
    void* dweight, void* dbias, double* row) {
  static_cast<void>(eps);
  FOR_ARITHMETIC(power_v_backward, type, SHAPE, x, dy, s, stats, weight, dx, dweight, dbias, row);
}

PUBLIC int powernorm_batch_forward(
    SHAPE_ARGUMENTS, const void* x, const void* weight, const void* bias, void* y, void* s, void* stats) {
  FOR_ARITHMETIC(batch_forward, type, SHAPE, x, weight, bias, y, s, stats, eps);
}

PUBLIC int powernorm_batch_backward(
    SHAPE_ARGUMENTS, const void* x, const void* dy, const void* s, const void* stats, const void* weight, void* dx,
    void* dweight, void* dbias, double* row) {
  static_cast<void>(eps);
  FOR_ARITHMETIC(batch_backward, type, SHAPE, x, dy, s, stats, weight, dx, dweight, dbias, row);
}

#define COUNTERS \
  T* const counters[] = {static_cast<T*>(tracked), static_cast<T*>(skipped), static_cast<T*>(bounded)}

PUBLIC int powernorm_power_absorb(
    int type, int64_t channels, double alpha_fwd, double alpha_bkw, double update, double warmup, bool released,
    const double* row, void* tracked, void* skipped, void* bounded, void* psi_sq, void* nu) {
  const auto absorb = [&](auto zero) {
    using T = decltype(zero);
    COUNTERS;
    power_absorb(
        row, channels, static_cast<T*>(psi_sq), static_cast<T*>(nu), counters, alpha_fwd, alpha_bkw, update, warmup,
        released);
  };
  type == FLOAT64 ? absorb(double{}) : absorb(float{});
  return 0;
}

PUBLIC int powernorm_power_v_absorb(
    int type, int64_t channels, double alpha_fwd, const double* row, void* tracked, void* skipped, void* bounded,
    void* psi_sq) {
  const auto absorb = [&](auto zero) {
    using T = decltype(zero);
    COUNTERS;
    power_v_absorb(row, channels, static_cast<T*>(psi_sq), counters, alpha_fwd);
  };
  type == FLOAT64 ? absorb(double{}) : absorb(float{});
  return 0;
}

PUBLIC int powernorm_batch_absorb(
    int type, int64_t channels, double momentum, const double* row, void* tracked, void* skipped, void* bounded,
    void* mean, void* var) {
  const auto absorb = [&](auto zero) {
    using T = decltype(zero);
    COUNTERS;
    batch_absorb(row, channels, static_cast<T*>(mean), static_cast<T*>(var), counters, momentum);
  };
  type == FLOAT64 ? absorb(double{}) : absorb(float{});
  return 0;
}
}
