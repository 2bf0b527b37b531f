// What all loops share: types, threads, and the inclusion of a file once for every instruction set.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HVD_DISPATCHES
#endif

#define INLINE inline __attribute__((always_inline))

namespace py = pybind11;

using Index = std::int64_t;
using Bits = std::uint32_t;
template <class T>
using Array = py::array_t<T, py::array::c_style>;

constexpr Index kStreamed = 1 << 21;  // results of more bytes go around the caches

// Run work(i) for all i in 0..count-1 on several threads.  What is computed must not depend on
// which thread takes which i.
template <class Work>
void parallel(Index count, int threads, const Work& work) {
  threads = static_cast<int>(std::min<Index>(threads, count));
  if (threads <= 1) {
    for (Index i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<Index> next{0};
  const auto loop = [&] {
    for (Index i; (i = next.fetch_add(1)) < count;) work(i);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(loop);
  loop();
  for (auto& other : others) other.join();
}
