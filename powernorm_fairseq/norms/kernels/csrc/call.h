// What all calls share: memory, threads, and the sums over strips of rows.
//
// Rows are cut into strips whose number depends on the shape alone; each strip has sums of its own, which are added up
// in their order. So results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

#include "passes.h"

namespace {

constexpr int64_t STRIP_ROWS = 64, MOST_STRIPS = 128;
constexpr int64_t MOMENT_STRIP_BYTES = 1 << 17;  // read twice, so it should stay in the cache
constexpr int64_t CACHE_BYTES = 1 << 22;         // beyond, fewer streams at once are faster: one row at a time
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;   // per thread; less is not worth waking one

// ---- memory and threads ------------------------------------------------------------------------------------------

// Working memory of the calling thread, kept from call to call: fresh pages cost more than the arithmetic on them.
class Arena {
 public:
  ~Arena() { std::free(memory_); }
  // Makes room for `bytes` in all; what was taken before is given up.
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(memory_);
    memory_ = static_cast<char*>(std::malloc(bytes));
    size_ = memory_ == nullptr ? 0 : bytes;
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  template <class T>
  T* take(int64_t number) {
    char* at = memory_ + used_;
    used_ += size_of<T>(number);
    return reinterpret_cast<T*>(at);
  }
  template <class T>
  static size_t size_of(int64_t number) {
    return (static_cast<size_t>(number) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

thread_local Arena arena;

// OpenMP's thread pool that torch has loaded already (a second pool would compete with it for the cores), or threads
// of our own where there is none.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_number)() = nullptr;
  int (*threads)() = nullptr;
  OpenMP() {
#if defined(__unix__) || defined(__APPLE__)
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread_number = reinterpret_cast<decltype(thread_number)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    threads = reinterpret_cast<decltype(threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
#endif
  }
  bool whole() const { return parallel != nullptr && thread_number != nullptr && threads != nullptr; }
};

// work(item, thread) for each item of [0, items), each thread a stretch of them.
template <class Work>
void for_all(int64_t items, int threads, const Work& work) {
  threads = static_cast<int>(std::min<int64_t>(threads, items));
  const auto stretch = [&](int thread, int of) {
    for (int64_t item = items * thread / of; item < items * (thread + 1) / of; ++item) work(item, thread);
  };
  if (threads <= 1) {
    stretch(0, 1);
    return;
  }
  static const OpenMP openmp;
  if (openmp.whole()) {
    struct Team {
      const decltype(stretch)& run;
    } team{stretch};
    openmp.parallel(
        [](void* data) { static_cast<Team*>(data)->run(openmp.thread_number(), openmp.threads()); }, &team,
        static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(stretch, thread, threads);
  stretch(0, threads);
  for (std::thread& other : others) other.join();
}

// ---- shapes ------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t rows, channels, groups;
  const uint8_t* padding;
  int threads;  // at most
};

struct Strips {
  int64_t rows, number;
  int block, threads;
  int64_t begin(int64_t strip) const { return strip * rows; }
  int64_t end(int64_t strip, int64_t of) const { return std::min(of, (strip + 1) * rows); }
};

template <class T>
Strips strips_of(const Shape& shape, int64_t element_bytes, int64_t most_bytes) {
  Strips strips;
  const int64_t row_bytes = std::max<int64_t>(shape.channels, 1) * static_cast<int64_t>(sizeof(T));
  if (most_bytes)
    strips.rows = std::max<int64_t>(most_bytes / row_bytes / 4 * 4, 8);
  else
    strips.rows = std::max(STRIP_ROWS, (shape.rows + MOST_STRIPS - 1) / MOST_STRIPS + 3) / 4 * 4;
  strips.number = (shape.rows + strips.rows - 1) / strips.rows;
  strips.block = shape.rows * shape.channels * element_bytes <= CACHE_BYTES ? 4 : 1;
  strips.threads = static_cast<int>(
      std::min<int64_t>(shape.threads, std::max<int64_t>(shape.rows * shape.channels / PARALLEL_ELEMENTS, 1)));
  return strips;
}

int64_t real_rows(const Shape& shape) {
  if (shape.padding == nullptr) return shape.rows;
  int64_t padded = 0;
  for (int64_t row = 0; row < shape.rows; ++row) padded += shape.padding[row] ? 1 : 0;
  return shape.rows - padded;
}

// What the passes of one call share. Vectors come from the arena of the calling thread.
template <class T>
struct Call {
  const Passes& passes;
  Shape shape;
  Strips strips;
  T* partial;  // two sums per strip
  T* scratch;
  double* sum;  // two sums over all strips

  // `vectors`: how many more vectors of type T the caller will take.
  Call(const Passes& best, const Shape& of, int vectors, int64_t most_bytes = 0)
      : passes(best), shape(of), strips(strips_of<T>(of, best.element_bytes, most_bytes)) {
    const int64_t channels = shape.channels;
    arena.reserve(
        Arena::size_of<T>(2 * strips.number * channels) +
        Arena::size_of<T>(strips.threads * SCRATCH_VECTORS * channels) + Arena::size_of<double>(2 * channels) +
        vectors * Arena::size_of<T>(channels));
    partial = arena.take<T>(2 * strips.number * channels);
    scratch = arena.take<T>(strips.threads * SCRATCH_VECTORS * channels);
    sum = arena.take<double>(2 * channels);
  }

  T* vector(double value) {
    T* values = arena.take<T>(shape.channels);
    std::fill(values, values + shape.channels, static_cast<T>(value));
    return values;
  }
  T* partial_of(int64_t strip, int which) { return partial + (2 * strip + which) * shape.channels; }
  T* scratch_of(int thread) { return scratch + thread * SCRATCH_VECTORS * shape.channels; }

  // Adds up the strips' sums, `which` of two.
  const double* total(int which) {
    double* sums = sum + which * shape.channels;
    std::fill(sums, sums + shape.channels, 0.0);
    for (int64_t strip = 0; strip < strips.number; ++strip) {
      const T* part = partial_of(strip, which);
      for (int64_t j = 0; j < shape.channels; ++j) sums[j] += part[j];
    }
    return sums;
  }

  void run(const ForwardPass& pass) {
    for_all(strips.number, strips.threads, [&](int64_t strip, int thread) {
      passes.forward(
          pass, strips.begin(strip), strips.end(strip, shape.rows), strips.block, scratch_of(thread),
          partial_of(strip, 0));
    });
  }

  void run(const BackwardPass& pass) {
    for_all(strips.number, strips.threads, [&](int64_t strip, int thread) {
      passes.backward(
          pass, strips.begin(strip), strips.end(strip, shape.rows), strips.block, scratch_of(thread),
          partial_of(strip, 0), partial_of(strip, 1));
    });
  }

  // Mean and sum of squared deviations into total(0) and total(1)'s places; the count of real rows.
  // Parts are joined as by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979.
  int64_t run_moments(const ForwardPass& pass) {
    std::vector<int64_t> counts(strips.number);
    for_all(strips.number, strips.threads, [&](int64_t strip, int thread) {
      counts[strip] = passes.moments(
          pass, strips.begin(strip), strips.end(strip, shape.rows), strips.block, scratch_of(thread),
          partial_of(strip, 0), partial_of(strip, 1));
    });
    double *mean = sum, *off = sum + shape.channels;
    std::fill(sum, sum + 2 * shape.channels, 0.0);
    int64_t count = 0;
    for (int64_t strip = 0; strip < strips.number; ++strip) {
      if (counts[strip] == 0) continue;
      const T *new_mean = partial_of(strip, 0), *new_off = partial_of(strip, 1);
      const double n = static_cast<double>(counts[strip]), share = n / static_cast<double>(count + counts[strip]);
      const double weight = static_cast<double>(count) * share;
      for (int64_t j = 0; j < shape.channels; ++j) {
        const double delta = new_mean[j] - mean[j];
        off[j] += new_off[j] + delta * delta * weight;
        mean[j] += delta * share;
      }
      count += counts[strip];
    }
    return count;
  }
};

}  // namespace
