// What all loops share: types, and the division of work among threads.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions alone
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HVD_DISPATCHES  // for several instruction sets
#endif

#define INLINE inline __attribute__((always_inline))

namespace py = pybind11;

using Index = std::int64_t;
using Bits = std::uint32_t;
template <class T>
using Array = py::array_t<T, py::array::c_style>;

// Of what Python calls, and how: kernels/__init__.py has the same number.
constexpr int kInterface = 7;

constexpr Index kStreamed = 1 << 21;  // results of more bytes go around the caches

// What was streamed is there for all threads.
inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// How many parts of `length` elements there are in n.
inline Index pieces(Index n, Index length) { return (n + length - 1) / length; }

// Run work(i) for all i in 0..count-1 on several threads, on fewer if there are no more to be had.
// What is computed must not depend on which thread takes which i.  If work throws, what has begun is
// finished, and the first exception comes out.
template <class Work>
void parallel(Index count, int threads, const Work& work) {
  threads = static_cast<int>(std::min<Index>(threads, count));
  if (threads <= 1) {
    for (Index i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<Index> next{0};
  std::exception_ptr problem;
  std::mutex lock;
  const auto loop = [&]() noexcept {
    try {
      for (Index i; (i = next.fetch_add(1)) < count;) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard<std::mutex> own(lock);
      if (!problem) problem = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  try {
    others.reserve(threads - 1);
    while (static_cast<int>(others.size()) < threads - 1) others.emplace_back(loop);
  } catch (const std::exception&) {  // those that there are do it
  }
  loop();
  for (auto& other : others) other.join();
  if (problem) std::rethrow_exception(problem);
}
