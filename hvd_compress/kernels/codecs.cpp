// The loops of codecs: numbers to codes and back.  The classes of hvd_compress.codecs say in NumPy
// what each of them computes, bit for bit; see kernels/codecs.py.

#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "common.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the compiler's own headers
#endif

namespace {

constexpr Index kSummed = 4096;   // elements that are added up in one go, which defines the sum
constexpr Index kTaken = 4096;    // elements that a thread takes at a time, or a few more: 16 KiB
constexpr Index kShared = 1 << 18;  // a run of more elements is divided among threads
constexpr Index kDrawn = 2560;    // random numbers that stay in the first-level cache

enum Kind { kLinear, kUniform, kExponential, kTernary, kFloat8 };
enum Term { kPlain, kMagnitude, kSquare, kZeros };
enum Sign { kNegative, kPositive, kNotNegative, kZero };

// How the elements of a run, which share a scale, become digits.
struct Rule {
  int kind, base, levels;
  Index length;  // of a run; 0: all elements
  bool l2;       // the scale is a norm: l2, or the largest magnitude
  double limit;  // of magnitudes
  int mantissa, bias;
  std::vector<double> grid;
  std::vector<float> grid32;

  Rule(int kind, int base, int levels, Index length, bool l2, double limit, int mantissa, int bias,
       std::vector<double> grid)
      : kind(kind), base(base), levels(levels), length(length), l2(l2), limit(limit),
        mantissa(mantissa), bias(bias), grid(std::move(grid)),
        grid32(this->grid.begin(), this->grid.end()) {
    if (base < 2 || base > 256 || length < 0 || kind < kLinear || kind > kFloat8 ||
        (kind == kExponential && static_cast<int>(this->grid.size()) != levels + 1))
      throw std::invalid_argument("no such rule");
  }
  const float* grid_of(float) const { return grid32.data(); }
  const double* grid_of(double) const { return grid.data(); }
};

// A place in the stream of a counter-based generator.
struct Philox {
  std::uint64_t key[2], counter[4];
  Index first;  // in halves of words, from the start of the block of `counter`
};

// How a word of 64 bits, of `each` digits, is taken apart: into parts of less than 2^32, which
// become fractions of 2^64, of which a product moves a group of digits to the upper half.
struct Words {
  std::uint64_t base, limit = 1, power = 1, inverse = 0;
  int each, part = 0, group = 0;
  std::uint8_t digits[256][8] = {};  // of each group

  Words(int base, int each) : base(base), each(each) {
    while (power * base <= 256) power *= base, ++group;
    while (limit * power < std::uint64_t{1} << 32 && part + group <= each)
      limit *= power, part += group;
    inverse = ~std::uint64_t{0} / limit + 1;
    for (std::uint64_t value = 0; value < power; ++value) {
      std::uint64_t left = value;
      for (int i = group; i-- > 0; left /= base) digits[value][i] = left % base;
    }
  }
};

template <class T>
struct LoopsOf {
  T (*largest)(const T*, Index);
  double (*sum[4])(const T*, Index, double);                       // by Term
  Index (*halves)(const T*, Index, double*, double*);
  void (*signs[4][2])(const T*, Index, std::uint8_t*);             // by Sign, and order of bits
  void (*from_bits[2])(const std::uint8_t*, Index, Index, bool, T, T, bool, T*);
  void (*quantise)(const Rule&, const T*, Index, T, const float*, std::uint8_t*);
  void (*from_digits[2])(const std::uint8_t*, Index, const T*, int, T, bool, T*);
  void (*natural)(const T*, Index, const float*, std::uint8_t*);
  void (*from_natural[2])(const std::uint8_t*, const std::uint8_t*, Index, bool, T*);
  void (*joined)(const T*, const T*, Index, T*, T*);
  void (*divided)(const T*, Index, T, bool, T*);
};

struct Loops {
  LoopsOf<float> of_float;
  LoopsOf<double> of_double;
  void (*pack_fields)(const std::uint8_t*, Index, int, std::uint8_t*);
  void (*unpack_fields)(const std::uint8_t*, Index, Index, int, int, std::uint8_t*);
  void (*pack_words)(const std::uint8_t*, Index, int, int, Index, std::uint8_t*);
  void (*unpack_words)(const std::uint8_t*, Index, Index, const Words&, std::uint8_t*);
  void (*philox)(const Philox&, std::uint64_t, Index, std::uint64_t*);
  void (*uniforms)(const Philox&, Index, Index, std::uint64_t*, float*);

  const LoopsOf<float>& of(float) const { return of_float; }
  const LoopsOf<double>& of(double) const { return of_double; }
};

#define HVD_LOOPS "codecs.h"
#include "every_set.h"

#include "codes.h"

// What is finite: numbers before they are coded, and what their code leaves out.
using Finite = std::pair<bool, bool>;

// left = base + x + the values of codes; then its code is taken off it.  Each chunk is read once.
// `x`: nothing, if it is null.  `kept`: where base is written, if it is not null; it may be x, and
// left may be base.  What is not finite has no code.
Finite feed(Chunks<float>& chunks, const float* base, const float* x, float* kept,
            const std::vector<const std::uint8_t*>& codes, float* left, std::uint8_t* out,
            int threads) {
  const auto& own = loops->of_float;
  std::atomic<bool> finite{true}, rest{true};
  const auto is_finite = [&](Index start, Index stop) {
    return own.largest(left + start, stop - start) < std::numeric_limits<float>::infinity();
  };
  const auto add_up = [&](Index start, Index stop) {
    own.joined(base + start, x ? x + start : nullptr, stop - start, kept ? kept + start : nullptr,
               left + start);
    for (const auto* code : codes) chunks.get(code, start, stop, 1, true, false, left + start);
    if (!is_finite(start, stop)) finite = false;
  };
  const auto take_off = [&](Index start, Index stop) {
    chunks.put(left, start, stop, out);
    chunks.get(out, start, stop, -1, true, false, left + start);
    if (!is_finite(start, stop)) rest = false;
  };
  if (!chunks.heads_first) {
    chunks.by_chunks(threads, [&](Index start, Index stop) {
      add_up(start, stop);
      if (finite) take_off(start, stop);
    });
  } else {
    chunks.by_chunks(threads, [&](Index start, Index stop) {
      add_up(start, stop);
      chunks.look(left, start, stop);
    });
    if (finite) {
      chunks.put_heads(left, out, threads);
      chunks.by_chunks(threads, take_off);
    }
  }
  return {finite, finite && rest};
}

// Write the values of a code, or with `add` the sum of zero and several, divided by a number, to
// `out`; returns whether they were finite before.
bool mean(const Chunks<float>& chunks, const std::vector<const std::uint8_t*>& codes, float by,
          bool add, float* out, int threads) {
  const bool streamed = chunks.n * static_cast<Index>(sizeof(float)) > kStreamed;
  std::atomic<bool> finite{true};
  chunks.by_taken(threads, [&](Index start, Index stop) {
    const Index count = stop - start;
    float total[kTaken + 64];  // a chunk is a few elements longer, or not at all
    if (add) std::fill(total, total + count, 0.0f);
    for (const auto* code : codes) chunks.get(code, start, stop, 1, add, false, total);
    if (!(loops->of_float.largest(total, count) < std::numeric_limits<float>::infinity()))
      finite = false;
    loops->of_float.divided(total, count, by, streamed, out + start);
    fence();
  });
  return finite;
}

// -- for Python: arrays are contiguous and aligned, of float or double ----------------------------

template <class Work>
auto with_type(const py::array& x, const Work& work) {
  const bool is_float = py::isinstance<Array<float>>(x);  // which other byte orders are not
  if ((!is_float && !py::isinstance<Array<double>>(x)) ||
      reinterpret_cast<std::uintptr_t>(x.data()) % x.itemsize())
    throw std::invalid_argument("an array of float32 or float64, contiguous and aligned");
  return is_float ? work(float()) : work(double());
}

template <class T>
const T* data(const py::array& x, T) {
  return static_cast<const T*>(x.data());
}

template <class T>
T* room(py::array& x, T) {
  return static_cast<T*>(x.mutable_data());
}

void check(bool fits) {
  if (!fits) throw std::invalid_argument("arrays of other sizes");
}

Draws draws_of(const py::object& draws, Philox& stream, Index n) {
  Draws found;
  if (py::isinstance<py::tuple>(draws)) {
    const auto [key, counter, first] =
        draws.cast<std::tuple<std::vector<std::uint64_t>, std::vector<std::uint64_t>, Index>>();
    check(key.size() == 2 && counter.size() == 4 && first >= 0);
    std::copy(key.begin(), key.end(), stream.key);
    std::copy(counter.begin(), counter.end(), stream.counter);
    stream.first = first;
    found.stream = &stream;
  } else if (!draws.is_none()) {
    // Not a copy that would be gone with this block.
    check(py::isinstance<Array<float>>(draws));
    const auto numbers = py::reinterpret_borrow<Array<float>>(draws);
    check(numbers.size() == n);
    found.given = numbers.data();
  }
  return found;
}

void encode_(const Code& code, const py::array& x, const py::object& draws,
             Array<std::uint8_t>& out, int threads) {
  with_type(x, [&](auto t) {
    const Index n = x.size();
    check(out.size() == code.bytes(n, x.itemsize()));
    Philox stream;
    const Draws own = draws_of(draws, stream, n);
    check(!code.draws() || own.given || own.stream);
    const auto* from = data(x, t);
    auto* to = out.mutable_data();
    py::gil_scoped_release release;
    code.chunks(t, n, own)->encode(from, to, threads);
  });
}

void decode_(const Code& code, const Array<std::uint8_t>& bytes, int sign, bool add, py::array& out,
             int threads) {
  with_type(out, [&](auto t) {
    const Index n = out.size();
    check(bytes.size() == code.bytes(n, out.itemsize()) && std::abs(sign) == 1);
    const auto* from = bytes.data();
    auto* to = room(out, t);
    py::gil_scoped_release release;
    code.chunks(t, n, Draws())->decode(from, sign, add, to, threads);
  });
}

// The bytes of codes of n float32; the arrays, which are no copies, live as long as their list.
std::vector<const std::uint8_t*> bytes_of(const Code& code, const py::list& codes, Index n) {
  std::vector<const std::uint8_t*> found;
  for (const auto& one : codes) {
    check(py::isinstance<Array<std::uint8_t>>(one));
    const auto bytes = py::reinterpret_borrow<Array<std::uint8_t>>(one);
    check(bytes.size() == code.bytes(n, sizeof(float)));
    found.push_back(bytes.data());
  }
  return found;
}

// An array of n float32, or nothing.
float* numbers(const py::object& x, Index n, bool written) {
  if (x.is_none()) return nullptr;
  check(py::isinstance<Array<float>>(x));
  auto own = py::reinterpret_borrow<Array<float>>(x);
  check(own.size() == n && reinterpret_cast<std::uintptr_t>(own.data()) % sizeof(float) == 0);
  return written ? own.mutable_data() : const_cast<float*>(own.data());
}

Finite feed_(const Code& code, const Array<float>& base, const py::object& x,
             const py::object& kept, const py::list& codes, const py::object& draws,
             Array<float>& left, Array<std::uint8_t>& out, int threads) {
  const Index n = left.size();
  check(out.size() == code.bytes(n, sizeof(float)) && base.size() == n);
  Philox stream;
  const Draws own = draws_of(draws, stream, n);
  check(!code.draws() || own.given || own.stream);
  const auto theirs = bytes_of(code, codes, n);
  const float* from = numbers(base, n, false);
  const float* added = numbers(x, n, false);
  float* old = numbers(kept, n, true);
  float* to = numbers(left, n, true);
  auto* bytes = out.mutable_data();
  py::gil_scoped_release release;
  return feed(*code.chunks(float(), n, own), from, added, old, theirs, to, bytes, threads);
}

bool mean_(const Code& code, const py::list& codes, float by, Array<float>& out, bool add,
           int threads) {
  const Index n = out.size();
  check(add || codes.size() == 1);
  const auto theirs = bytes_of(code, codes, n);
  float* to = numbers(out, n, true);
  py::gil_scoped_release release;
  return mean(*code.chunks(float(), n, Draws()), theirs, by, add, to, threads);
}

double sum_(const py::array& x, int term, double shift, int threads) {
  return with_type(x, [&](auto t) {
    check(term >= kPlain && term <= kZeros);
    const auto* from = data(x, t);
    py::gil_scoped_release release;
    return sum(from, x.size(), static_cast<Term>(term), shift, threads);
  });
}

// A bit an element; returns the number of zeros.
Index signs_(const py::array& x, Array<std::uint8_t>& out, int threads) {
  return with_type(x, [&](auto t) {
    const Index n = x.size();
    check(out.size() == (n + 7) / 8);
    const auto* from = data(x, t);
    auto* to = out.mutable_data();
    std::atomic<Index> zeros{0};
    py::gil_scoped_release release;
    parallel(pieces(n, kSummed), threads, [&](Index c) {
      const Index start = c * kSummed, count = std::min(kSummed, n - start);
      zeros += static_cast<Index>(loops->of(t).sum[kZeros](from + start, count, 0));
      loops->of(t).signs[kPositive][false](from + start, count, to + start / 8);
    });
    return zeros.load();
  });
}

// Words of blocks of the stream, from `block` on.
std::vector<std::uint64_t> philox_(const py::tuple& draws, std::uint64_t block, Index count) {
  Philox stream;
  draws_of(draws, stream, 0);
  std::vector<std::uint64_t> words(4 * count);
  loops->philox(stream, block, count, words.data());
  return words;
}

bool all_finite_(const py::array& x, int threads) {
  return with_type(x, [&](auto t) {
    const Index n = x.size();
    const auto* from = data(x, t);
    py::gil_scoped_release release;
    std::atomic<bool> finite{true};
    parallel(pieces(n, kTaken), threads, [&](Index c) {
      const Index start = c * kTaken;
      const auto most = loops->of(t).largest(from + start, std::min(kTaken, n - start));
      if (!(most < std::numeric_limits<decltype(t)>::infinity())) finite = false;
    });
    return finite.load();
  });
}

void uniforms_(const py::tuple& draws, Array<float>& out, int threads) {
  const Index n = out.size();
  Philox stream;
  draws_of(draws, stream, n);
  auto* to = out.mutable_data();
  py::gil_scoped_release release;
  parallel(pieces(n, kTaken), threads, [&](Index c) {
    std::uint64_t words[kDrawn / 2 + 16];
    const Index stop = std::min(n, (c + 1) * kTaken);
    for (Index at = c * kTaken; at < stop; at += kDrawn)
      loops->uniforms(stream, at, std::min(kDrawn, stop - at), words, to + at);
  });
}

void fill(std::uint8_t* out, Index n, bool streamed) {
  Index i = 0;
#if defined(__x86_64__)
  for (; streamed && i < n && reinterpret_cast<std::uintptr_t>(out + i) % 16; ++i) out[i] = 0;
  for (; streamed && i + 16 <= n; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_setzero_si128());
#endif
  std::memset(out + i, 0, n - i);
  fence();
}

// Read all bytes of one array while all of another are written: the floor, for benchmarks.
void copy_(const Array<std::uint8_t>& from, Array<std::uint8_t>& to, int threads) {
  const Index n = from.size(), m = to.size(), parts = pieces(std::max(n, m), 1 << 16);
  const auto* x = from.data();
  auto* out = to.mutable_data();
  std::atomic<int> kept{0};
  py::gil_scoped_release release;
  parallel(parts, threads, [&](Index c) {
    std::uint64_t all[8] = {};
    const Index stop = (c + 1) * n / parts;
    for (Index i = c * n / parts; i + 64 <= stop; i += 64) {
      std::uint64_t own[8];
      std::memcpy(own, x + i, sizeof own);
      for (int j = 0; j < 8; ++j) all[j] ^= own[j];
    }
    for (int j = 1; j < 8; ++j) all[0] ^= all[j];
    fill(out + c * m / parts, (c + 1) * m / parts - c * m / parts, m > kStreamed);
    kept ^= static_cast<int>(all[0]);
  });
}

}  // namespace

void add_codecs(py::module_& m) {
  py::class_<Rule>(m, "Rule")
      .def(py::init<int, int, int, Index, bool, double, int, int, std::vector<double>>());
  py::class_<Code>(m, "Code");
  py::class_<Digits, Code>(m, "Digits")
      .def(py::init<Rule, std::vector<double>, int, double>());
  py::class_<Signs, Code>(m, "Signs").def(py::init<int, double>());
  py::class_<Halves, Code>(m, "Halves").def(py::init<Index>());
  py::class_<Natural, Code>(m, "Natural").def(py::init<bool>());
  // What is written to is never a copy.
  const auto out = py::arg().noconvert();
  const py::arg in;
  m.def("encode", encode_, in, in, in, out, in);
  m.def("decode", decode_, in, in, in, in, out, in);
  m.def("feed", feed_, in, out, in, in, in, in, out, out, in);
  m.def("mean", mean_, in, in, in, out, in, in);
  m.def("sum", sum_);
  m.def("signs", signs_, in, out, in);
  m.def("philox", philox_);
  m.def("all_finite", all_finite_);
  m.def("uniforms", uniforms_, in, out, in);
  m.def("copy", copy_, in, out, in);
  m.def("use_instructions", use_instructions);
}
