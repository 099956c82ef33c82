// The passes over rows, in plain loops that a compiler turns into vector instructions; built once per instruction set,
// with PASSES naming the table. Only this file depends on it, and all in it is local, so that no function built for a
// newer processor can be taken for its namesake in another build.
#include "passes.h"

#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

// R rows side by side, in registers: only unrolled do they become vector instructions.
#define FOR_EACH_ROW _Pragma("GCC unroll 4") for (int i = 0; i < R; ++i)

namespace {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

void widen(const bfloat16* from, float* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) to[j] = as_float(static_cast<uint32_t>(from[j].bits) << 16);
}

void narrow(const float* from, bfloat16* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t bits = as_bits(from[j]);
    const uint32_t nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to[j].bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest_even);
  }
}

#if defined(__aarch64__)
void widen(const float16* from, float* to, int64_t n) {
  const __fp16* half = reinterpret_cast<const __fp16*>(from);
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) to[j] = half[j];
}

void narrow(const float* from, float16* to, int64_t n) {
  __fp16* half = reinterpret_cast<__fp16*>(to);
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) half[j] = static_cast<__fp16>(from[j]);
}
#else
inline float widened(float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinite or not a number
  // Below: exponent and fraction at their places, then the difference of the exponents' biases, subnormals included.
  return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000u)));
}

inline float16 narrowed(float value) {
  const uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x477ff000u) {  // rounds beyond the largest float16
    half = 0x7c00u;
  } else if (rest < 0x38800000u) {  // subnormal: adding 0.5 lets the processor round at the place of the last bit
    half = as_bits(as_float(rest) + 0.5f) - 0x3f000000u;
  } else {
    half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  }
  return float16{static_cast<uint16_t>(sign | half)};
}

void widen(const float16* from, float* to, int64_t n) {
  int64_t j = 0;
#if defined(__F16C__)
  for (; j + 8 <= n; j += 8)
    _mm256_storeu_ps(to + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j))));
#endif
  for (; j < n; ++j) to[j] = widened(from[j]);
}

void narrow(const float* from, float16* to, int64_t n) {
  int64_t j = 0;
#if defined(__F16C__)
  for (; j + 8 <= n; j += 8)
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to + j), _mm256_cvtps_ph(_mm256_loadu_ps(from + j), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; j < n; ++j) to[j] = narrowed(from[j]);
}
#endif

template <class S>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};

inline float root(float value) { return __builtin_sqrtf(value); }
inline double root(double value) { return __builtin_sqrt(value); }

// A row to read: in place, or widened into scratch.
template <class T>
const T* readable(const T* row, T*, int64_t) {
  return row;
}
template <class S, class T>
const T* readable(const S* row, T* scratch, int64_t n) {
  widen(row, scratch, n);
  return scratch;
}

// A row to write: in place, or in scratch until `finished`.
template <class T>
T* writable(T* row, T*) {
  return row;
}
template <class S, class T>
T* writable(S*, T* scratch) {
  return scratch;
}
template <class T>
void finished(const T*, T*, int64_t) {}
template <class S, class T>
void finished(const T* values, S* row, int64_t n) {
  narrow(values, row, n);
}

template <class T>
void set_zero(T* values, int64_t n) {
  if (values != nullptr) std::memset(static_cast<void*>(values), 0, n * sizeof(T));
}

// Calls visit(rows, number) for the real rows of [begin, end), BLOCK rows at a time while there are as many, and
// padded(row) for the others.
template <int BLOCK, class Visit, class Padded>
void for_real_rows(const uint8_t* padding, int64_t begin, int64_t end, Visit visit, Padded padded) {
  int64_t rows[BLOCK];
  int number = 0;
  for (int64_t row = begin; row < end; ++row) {
    if (padding != nullptr && padding[row]) {
      padded(row);
      continue;
    }
    rows[number++] = row;
    if (number == BLOCK) {
      visit.template operator()<BLOCK>(rows);
      number = 0;
    }
  }
  for (int i = 0; i < number; ++i) visit.template operator()<1>(rows + i);
}

// 1 / sqrt(mean square + eps) of one channel group of R rows.
template <int R, class T>
void inverse_rms(const T* const* x, int64_t begin, int64_t end, T eps, T* scale) {
  T sum[R] = {};
  for (int64_t j = begin; j < end; ++j)
    FOR_EACH_ROW sum[i] += x[i][j] * x[i][j];
  FOR_EACH_ROW scale[i] = 1 / root(sum[i] / static_cast<T>(end - begin) + eps);
}

template <class S, bool SHIFT, bool Y, bool SUM>
struct ForwardRows {
  using T = typename Arithmetic<S>::type;
  const ForwardPass& p;
  T* scratch;
  T* sum_sq;

  template <int R>
  void operator()(const int64_t* rows) const {
    const int64_t channels = p.channels, groups = p.groups ? p.groups : 1, width = channels / groups;
    const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b), *shift = static_cast<const T*>(p.shift);
    const T* x[R];
    T* y[R];
    FOR_EACH_ROW {
      const int64_t at = rows[i] * channels;
      x[i] = readable(static_cast<const S*>(p.x) + at, scratch + i * channels, channels);
      if (Y) y[i] = writable(static_cast<S*>(p.y) + at, scratch + i * channels);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * width, end = begin + width;
      T scale[R];
      if (p.groups && p.s_in != nullptr) {
        FOR_EACH_ROW scale[i] = static_cast<const T*>(p.s_in)[rows[i] * groups + g];
      } else if (p.groups) {
        inverse_rms<R>(x, begin, end, static_cast<T>(p.eps), scale);
        if (p.s_out != nullptr)
          FOR_EACH_ROW static_cast<T*>(p.s_out)[rows[i] * groups + g] = scale[i];
      } else {
        FOR_EACH_ROW scale[i] = 1;
      }
#pragma GCC ivdep
      for (int64_t j = begin; j < end; ++j) {
        T total = 0;
        FOR_EACH_ROW {
          const T h = x[i][j] * scale[i];
          if (SUM) total += h * h;
          if (Y) y[i][j] = (SHIFT ? h - shift[j] : h) * a[j] + b[j];
        }
        if (SUM) sum_sq[j] += total;
      }
    }
    if (Y)
      FOR_EACH_ROW finished(y[i], static_cast<S*>(p.y) + rows[i] * channels, channels);
  }
};

template <class S, bool SHIFT, bool Y, bool SUM, int BLOCK>
void forward_as(const ForwardPass& p, int64_t begin, int64_t end, void* scratch, void* sum_sq) {
  using T = typename Arithmetic<S>::type;
  T* sums = static_cast<T*>(sum_sq);
  if (SUM) set_zero(sums, p.channels);
  const ForwardRows<S, SHIFT, Y, SUM> visit{p, static_cast<T*>(scratch), sums};
  const T at_zero = 1 / root(static_cast<T>(p.eps));
  for_real_rows<BLOCK>(p.padding, begin, end, visit, [&](int64_t row) {
    if (Y) set_zero(static_cast<S*>(p.y) + row * p.channels, p.channels);
    if (p.s_out != nullptr && p.s_in == nullptr)
      for (int64_t g = 0; g < p.groups; ++g) static_cast<T*>(p.s_out)[row * p.groups + g] = at_zero;
  });
}

template <class S, int BLOCK>
void forward_in_blocks(const ForwardPass& p, int64_t begin, int64_t end, void* scratch, void* sum_sq) {
  const bool y = p.y != nullptr, sum = p.want_sum_sq;
  if (y && p.shift != nullptr)  // sums of h^2 and a shift are never wanted together
    forward_as<S, true, true, false, BLOCK>(p, begin, end, scratch, sum_sq);
  else if (y && sum)
    forward_as<S, false, true, true, BLOCK>(p, begin, end, scratch, sum_sq);
  else if (y)
    forward_as<S, false, true, false, BLOCK>(p, begin, end, scratch, sum_sq);
  else
    forward_as<S, false, false, true, BLOCK>(p, begin, end, scratch, sum_sq);
}

template <class S>
void forward(const ForwardPass& p, int64_t begin, int64_t end, int block, void* scratch, void* sum_sq) {
  if (block == 1)
    forward_in_blocks<S, 1>(p, begin, end, scratch, sum_sq);
  else
    forward_in_blocks<S, 4>(p, begin, end, scratch, sum_sq);
}

// Rows times four vectors a, b, d, shift: dh = dy * a - (h - shift) * b - d; without SHIFT d and shift are zero.
template <class S, bool SHIFT, bool DX, bool SUMS>
struct BackwardRows {
  using T = typename Arithmetic<S>::type;
  const BackwardPass& p;
  T* scratch;
  T* sum_dy;
  T* sum_dy_h;

  template <int R>
  void operator()(const int64_t* rows) const {
    const int64_t channels = p.channels, groups = p.groups ? p.groups : 1, width = channels / groups;
    const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b), *d = static_cast<const T*>(p.d);
    const T* shift = static_cast<const T*>(p.shift);
    const T *x[R], *dy[R];
    T* dx[R];
    FOR_EACH_ROW {
      const int64_t at = rows[i] * channels;
      x[i] = readable(static_cast<const S*>(p.x) + at, scratch + 2 * i * channels, channels);
      dy[i] = readable(static_cast<const S*>(p.dy) + at, scratch + (2 * i + 1) * channels, channels);
      if (DX) dx[i] = writable(static_cast<S*>(p.dx) + at, scratch + 2 * i * channels);
    }
    const auto dh_of = [&](T g, T off, int64_t j) {
      const T dh = g * a[j] - off * b[j];
      return SHIFT ? dh - d[j] : dh;
    };
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * width, end = begin + width;
      T scale[R], along[R] = {};
      FOR_EACH_ROW
        scale[i] = p.groups ? static_cast<const T*>(p.s)[rows[i] * groups + group] : static_cast<T>(1);
      if (SUMS || p.groups) {
#pragma GCC ivdep
        for (int64_t j = begin; j < end; ++j) {
          T total = 0, total_h = 0;
          FOR_EACH_ROW {
            const T h = x[i][j] * scale[i], off = SHIFT ? h - shift[j] : h, g = dy[i][j];
            if (SUMS) {
              total += g;
              total_h += g * off;
            }
            if (DX) along[i] += dh_of(g, off, j) * h;
          }
          if (SUMS) {
            sum_dy[j] += total;
            sum_dy_h[j] += total_h;
          }
        }
      }
      if (DX) {
        FOR_EACH_ROW along[i] = p.groups ? along[i] / static_cast<T>(width) : static_cast<T>(0);
#pragma GCC ivdep
        for (int64_t j = begin; j < end; ++j)
          FOR_EACH_ROW {
            const T h = x[i][j] * scale[i], off = SHIFT ? h - shift[j] : h;
            dx[i][j] = scale[i] * (dh_of(dy[i][j], off, j) - h * along[i]);
          }
      }
    }
    if (DX)
      FOR_EACH_ROW finished(dx[i], static_cast<S*>(p.dx) + rows[i] * channels, channels);
  }
};

template <class S, bool SHIFT, bool DX, bool SUMS, int BLOCK>
void backward_as(const BackwardPass& p, int64_t begin, int64_t end, void* scratch, void* sum_dy, void* sum_dy_h) {
  using T = typename Arithmetic<S>::type;
  T *sums = static_cast<T*>(sum_dy), *sums_h = static_cast<T*>(sum_dy_h);
  if (SUMS) set_zero(sums, p.channels);
  if (SUMS) set_zero(sums_h, p.channels);
  const BackwardRows<S, SHIFT, DX, SUMS> visit{p, static_cast<T*>(scratch), sums, sums_h};
  for_real_rows<BLOCK>(p.padding, begin, end, visit, [&](int64_t row) {
    if (DX) set_zero(static_cast<S*>(p.dx) + row * p.channels, p.channels);
  });
}

template <class S, bool SHIFT, int BLOCK>
void backward_in_blocks(const BackwardPass& p, int64_t begin, int64_t end, void* scratch, void* sum, void* sum_h) {
  if (p.dx != nullptr && p.want_sums)
    backward_as<S, SHIFT, true, true, BLOCK>(p, begin, end, scratch, sum, sum_h);
  else if (p.dx != nullptr)
    backward_as<S, SHIFT, true, false, BLOCK>(p, begin, end, scratch, sum, sum_h);
  else
    backward_as<S, SHIFT, false, true, BLOCK>(p, begin, end, scratch, sum, sum_h);
}

template <class S>
void backward(const BackwardPass& p, int64_t begin, int64_t end, int block, void* scratch, void* sum, void* sum_h) {
  if (p.shift != nullptr)
    block == 1 ? backward_in_blocks<S, true, 1>(p, begin, end, scratch, sum, sum_h)
               : backward_in_blocks<S, true, 4>(p, begin, end, scratch, sum, sum_h);
  else
    block == 1 ? backward_in_blocks<S, false, 1>(p, begin, end, scratch, sum, sum_h)
               : backward_in_blocks<S, false, 4>(p, begin, end, scratch, sum, sum_h);
}

// h of R rows added up, or the squares of what they are off the mean; the inverse root mean squares are in p.s_in.
template <class S, bool SQUARES>
struct MomentRows {
  using T = typename Arithmetic<S>::type;
  const ForwardPass& p;
  T* scratch;
  const T* mean;
  T* sum;

  template <int R>
  void operator()(const int64_t* rows) const {
    const int64_t channels = p.channels, groups = p.groups ? p.groups : 1, width = channels / groups;
    const T* x[R];
    FOR_EACH_ROW
      x[i] = readable(static_cast<const S*>(p.x) + rows[i] * channels, scratch + i * channels, channels);
    for (int64_t g = 0; g < groups; ++g) {
      T scale[R];
      FOR_EACH_ROW
        scale[i] = p.groups ? static_cast<const T*>(p.s_in)[rows[i] * groups + g] : static_cast<T>(1);
#pragma GCC ivdep
      for (int64_t j = g * width; j < (g + 1) * width; ++j) {
        T total = 0;
        FOR_EACH_ROW {
          const T h = x[i][j] * scale[i], off = SQUARES ? h - mean[j] : h;
          total += SQUARES ? off * off : off;
        }
        sum[j] += total;
      }
    }
  }
};

template <class S>
struct ScaleRows {
  using T = typename Arithmetic<S>::type;
  const ForwardPass& p;
  T* scratch;

  template <int R>
  void operator()(const int64_t* rows) const {
    const int64_t width = p.channels / p.groups;
    const T* x[R];
    FOR_EACH_ROW
      x[i] = readable(static_cast<const S*>(p.x) + rows[i] * p.channels, scratch + i * p.channels, p.channels);
    for (int64_t g = 0; g < p.groups; ++g) {
      T scale[R];
      inverse_rms<R>(x, g * width, (g + 1) * width, static_cast<T>(p.eps), scale);
      FOR_EACH_ROW static_cast<T*>(p.s_out)[rows[i] * p.groups + g] = scale[i];
    }
  }
};

// Two passes over rows that the cache holds: the mean first, so that nothing cancels.
template <class S, int BLOCK>
int64_t moments_in_blocks(const ForwardPass& given, int64_t begin, int64_t end, void* scratch, void* mean, void* off) {
  using T = typename Arithmetic<S>::type;
  T *mean_of = static_cast<T*>(mean), *off_of = static_cast<T*>(off), *space = static_cast<T*>(scratch);
  int64_t padded = 0;
  ForwardPass p = given;
  p.s_in = given.s_out;
  const auto skip = [](int64_t) {};
  if (p.groups) {
    const T at_zero = 1 / root(static_cast<T>(p.eps));
    for_real_rows<BLOCK>(p.padding, begin, end, ScaleRows<S>{p, space}, [&](int64_t row) {
      for (int64_t g = 0; g < p.groups; ++g) static_cast<T*>(p.s_out)[row * p.groups + g] = at_zero;
    });
  }
  if (p.padding != nullptr)
    for (int64_t row = begin; row < end; ++row) padded += p.padding[row] ? 1 : 0;
  const int64_t count = end - begin - padded;
  set_zero(mean_of, p.channels);
  set_zero(off_of, p.channels);
  if (count == 0) return 0;
  for_real_rows<BLOCK>(p.padding, begin, end, MomentRows<S, false>{p, space, nullptr, mean_of}, skip);
  for (int64_t j = 0; j < p.channels; ++j) mean_of[j] /= static_cast<T>(count);
  for_real_rows<BLOCK>(p.padding, begin, end, MomentRows<S, true>{p, space, mean_of, off_of}, skip);
  return count;
}

template <class S>
int64_t moments(const ForwardPass& p, int64_t begin, int64_t end, int block, void* scratch, void* mean, void* off) {
  return block == 1 ? moments_in_blocks<S, 1>(p, begin, end, scratch, mean, off)
                    : moments_in_blocks<S, 4>(p, begin, end, scratch, mean, off);
}

template <class S>
struct StandardizeRows {
  using T = typename Arithmetic<S>::type;
  const StandardizePass& p;
  T* scratch;

  template <int R>
  void operator()(const int64_t* rows) const {
    const int64_t n = p.channels;
    const T eps = static_cast<T>(p.eps), scale = static_cast<T>(p.scale), slope = static_cast<T>(p.scale * p.k);
    const T* x[R];
    T *z[R], mean[R] = {}, squares[R] = {}, inverse[R];
    FOR_EACH_ROW {
      x[i] = readable(static_cast<const S*>(p.x) + rows[i] * n, scratch + i * n, n);
      z[i] = writable(static_cast<S*>(p.out) + rows[i] * n, scratch + i * n);
    }
    for (int64_t j = 0; j < n; ++j)
      FOR_EACH_ROW mean[i] += x[i][j];
    FOR_EACH_ROW mean[i] /= static_cast<T>(n);
    for (int64_t j = 0; j < n; ++j)
      FOR_EACH_ROW squares[i] += (x[i][j] - mean[i]) * (x[i][j] - mean[i]);
    FOR_EACH_ROW {
      const T unbiased = squares[i] / static_cast<T>(n > 1 ? n - 1 : 1);
      inverse[i] = p.released ? 1 / (root(unbiased) + eps) : 1 / root(squares[i] / static_cast<T>(n) + eps);
      static_cast<T*>(p.mean)[rows[i]] = mean[i];
      static_cast<T*>(p.inverse)[rows[i]] = inverse[i];
    }
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j)
      FOR_EACH_ROW {
        const T y = (x[i][j] - mean[i]) * inverse[i];
        z[i][j] = y * scale - y * y * slope;
      }
    FOR_EACH_ROW finished(z[i], static_cast<S*>(p.out) + rows[i] * n, n);
  }
};

template <class S>
struct StandardizeBackwardRows {
  using T = typename Arithmetic<S>::type;
  const StandardizePass& p;
  T* scratch;

  template <int R>
  void operator()(const int64_t* rows) const {
    const int64_t n = p.channels;
    const T k = static_cast<T>(p.k);
    const T *x[R], *dz[R];
    T *dx[R], mean[R], inverse[R], ahead[R] = {}, along[R] = {}, factor[R];
    FOR_EACH_ROW {
      const int64_t at = rows[i] * n;
      x[i] = readable(static_cast<const S*>(p.x) + at, scratch + 2 * i * n, n);
      dz[i] = readable(static_cast<const S*>(p.dz) + at, scratch + (2 * i + 1) * n, n);
      dx[i] = writable(static_cast<S*>(p.out) + at, scratch + 2 * i * n);
      mean[i] = static_cast<const T*>(p.mean)[rows[i]];
      inverse[i] = static_cast<const T*>(p.inverse)[rows[i]];
    }
    for (int64_t j = 0; j < n; ++j)
      FOR_EACH_ROW {
        const T y = (x[i][j] - mean[i]) * inverse[i], g = dz[i][j] * (1 - k * y);
        ahead[i] += g;
        along[i] += g * y;
      }
    FOR_EACH_ROW {
      ahead[i] = p.detach_mean ? 0 : ahead[i] / static_cast<T>(n);
      along[i] = p.detach_sigma ? 0 : along[i] / static_cast<T>(n);
      if (p.released) {
        // sigma + eps for sigma, C - 1 for C; where sigma is 0, y is 0 and the factor does not matter.
        const T sigma = 1 / inverse[i] - static_cast<T>(p.eps);
        const T ratio = static_cast<T>(n) / static_cast<T>(n > 1 ? n - 1 : 1) / (sigma * inverse[i]);
        along[i] = sigma > 0 ? along[i] * ratio : 0;
      }
      factor[i] = inverse[i] * static_cast<T>(p.scale);
    }
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j)
      FOR_EACH_ROW {
        const T y = (x[i][j] - mean[i]) * inverse[i], g = dz[i][j] * (1 - k * y);
        dx[i][j] = (g - ahead[i] - y * along[i]) * factor[i];
      }
    FOR_EACH_ROW finished(dx[i], static_cast<S*>(p.out) + rows[i] * n, n);
  }
};

template <class S, template <class> class Rows>
void standardized(const StandardizePass& p, int64_t begin, int64_t end, int block, void* scratch) {
  using T = typename Arithmetic<S>::type;
  const Rows<S> visit{p, static_cast<T*>(scratch)};
  const auto none = [](int64_t) {};
  if (block == 1)
    for_real_rows<1>(nullptr, begin, end, visit, none);
  else
    for_real_rows<4>(nullptr, begin, end, visit, none);
}

template <class S>
constexpr Passes passes_for() {
  return {
      sizeof(S), forward<S>, backward<S>, moments<S>, standardized<S, StandardizeRows>,
      standardized<S, StandardizeBackwardRows>};
}

}  // namespace

extern const Passes PASSES[STORAGE_TYPES] = {
    passes_for<float>(), passes_for<double>(), passes_for<bfloat16>(), passes_for<float16>()};
