// The loops of codecs: numbers to codes and back.  The classes of hvd_compress.codecs say in NumPy
// what each of them computes, bit for bit; see kernels/codecs.py.

#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "common.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the compiler's own headers
#endif

namespace {

constexpr Index kSummed = 4096;   // elements that are added up in one go, which defines the sum
constexpr Index kTaken = 16384;   // elements that a thread takes at a time, or a few more
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

template <class T>
T stored(const std::uint8_t* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// The sum of n terms: of every kSummed elements, and of these sums in the same way.
template <class T>
double sum(const T* x, Index n, Term term, double shift, int threads) {
  const auto block = loops->of(T()).sum[term];
  if (n <= kSummed) return block(x, n, shift);
  std::vector<double> parts(pieces(n, kSummed));
  parallel(pieces(n, 8 * kSummed), threads, [&](Index c) {
    for (Index at = 8 * c * kSummed; at < std::min(n, 8 * (c + 1) * kSummed); at += kSummed)
      parts[at / kSummed] = block(x + at, std::min(kSummed, n - at), shift);
  });
  return sum<double>(parts.data(), static_cast<Index>(parts.size()), kPlain, 0, 1);
}

template <class T>
T largest(const T* x, Index n, int threads) {
  if (n <= kShared) return loops->of(T()).largest(x, n);
  std::vector<T> parts(pieces(n, kTaken));
  parallel(static_cast<Index>(parts.size()), threads, [&](Index c) {
    parts[c] = loops->of(T()).largest(x + c * kTaken, std::min(kTaken, n - c * kTaken));
  });
  return loops->of(T()).largest(parts.data(), static_cast<Index>(parts.size()));
}

// What is sent with the n elements of a run.
template <class T>
T head_of(const Rule& rule, const T* x, Index n, int threads) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  if (rule.l2) return static_cast<T>(std::sqrt(sum(x, n, kSquare, 0, threads)));
  const T most = largest(x, n, threads), limit = static_cast<T>(rule.limit);
  if (rule.kind == kLinear) {
    // What would overflow when decoded has to arrive as something that is not finite.
    const T scale = most / static_cast<T>(rule.levels);
    return scale * static_cast<T>(rule.levels) < kInfinity ? scale : kInfinity;
  }
  if (rule.kind == kTernary) return limit < most ? limit : most;
  if (rule.kind == kFloat8) {
    // Of subnormal numbers the quotient may be 0.
    const T scale = most / limit;
    return scale > 0 ? scale : most > 0 ? most : 0;
  }
  return most;
}

// How digits are packed: so many bits each, or so many in a word of 64 bits.
struct Packing {
  int base, bits = 0, each = 0;

  explicit Packing(int base) : base(base) {
    while (1 << bits < base) ++bits;
    for (unsigned __int128 power = base; power <= static_cast<unsigned __int128>(1) << 64;
         power *= base)
      ++each;
    if (bits * each <= 64) each = 0;
  }
  // After so many digits a byte begins.
  Index unit() const { return each ? each : 8; }
  // Bytes of so many digits, a number of units, or all there are.
  Index bytes(Index n) const {
    if (!each) return (n * bits + 7) / 8;
    unsigned __int128 most = 1;
    for (Index i = 0; i < n % each; ++i) most *= base;
    Index length = 0;
    for (most -= 1; most; most >>= 1) ++length;
    return n / each * 8 + (length + 7) / 8;
  }
  void pack(const std::uint8_t* digits, Index n, std::uint8_t* out) const {
    if (each)
      loops->pack_words(digits, n, each, base, bytes(n), out);
    else
      loops->pack_fields(digits, n, bits, out);
  }
  void unpack(const std::uint8_t* packed, Index n, const Words& words,
              std::uint8_t* digits) const {
    if (each)
      loops->unpack_words(packed, bytes(n), n, words, digits);
    else
      loops->unpack_fields(packed, bytes(n), n, bits, base, digits);
  }
};

// Elements that are coded at a time: whole runs, unless these are long, and whole bytes.
Index chunk_of(Index length, Index unit) {
  const Index step = std::lcm(length, unit);
  const Index whole = step <= kShared ? step : unit;
  return pieces(kTaken, whole) * whole;
}

// Random numbers from 0 to 1, given as they are or as a place in a stream.
struct Draws {
  const float* given = nullptr;
  const Philox* stream = nullptr;

  // Numbers start..start+n-1 of at most kDrawn.
  const float* at(Index start, Index n, std::uint64_t* words, float* room) const {
    if (given) return given + start;
    if (!stream) return nullptr;
    loops->uniforms(*stream, start, n, words, room);
    return room;
  }
};

template <class T>
void encode(const Rule& rule, const T* x, Index n, const Draws& draws, std::uint8_t* out,
            int threads) {
  const Index length = rule.length ? rule.length : std::max<Index>(n, 1);
  const Packing packing(rule.base);
  const Index chunk = chunk_of(length, packing.unit()), heads = pieces(n, length);
  const bool shared = chunk % length;  // runs go beyond chunks
  std::uint8_t* const packed = out + heads * sizeof(T);
  const auto put_head = [&](Index run, int threads) {
    const T head = head_of(rule, x + run * length, std::min(length, n - run * length), threads);
    std::memcpy(out + run * sizeof(T), &head, sizeof(T));
  };
  if (shared)
    for (Index run = 0; run < heads; ++run) put_head(run, threads);
  parallel(pieces(n, chunk), threads, [&](Index c) {
    const Index start = c * chunk, stop = std::min(n, start + chunk);
    std::vector<std::uint8_t> digits(stop - start);
    std::uint64_t words[kDrawn / 2 + 16];
    float room[kDrawn];
    // Of a shared run the head is there already.
    Index run = shared ? start / length : start / length - 1;
    Index end = shared ? (run + 1) * length : start;
    for (Index at = start; at < stop;) {
      const Index last = std::min(stop, at + kDrawn);
      const float* drawn = draws.at(at, last - at, words, room);
      while (at < last) {
        if (at == end) {
          end = ++run * length + length;
          if (!shared) put_head(run, 1);
        }
        const Index count = std::min(end, last) - at;
        loops->of(T()).quantise(rule, x + at, count, stored<T>(out + run * sizeof(T)), drawn,
                                digits.data() + (at - start));
        at += count;
        if (drawn) drawn += count;
      }
    }
    packing.pack(digits.data(), stop - start, packed + packing.bytes(start));
  });
}

template <class T>
void decode(const std::uint8_t* code, Index n, int base, Index length, const T* table, int zero,
            T unit, T* out, bool add, int threads) {
  if (!length) length = std::max<Index>(n, 1);
  const Packing packing(base);
  const Words words(base, packing.each ? packing.each : 1);
  const Index chunk = pieces(kTaken, packing.unit()) * packing.unit();
  const std::uint8_t* const packed = code + pieces(n, length) * sizeof(T);
  const bool streamed = n * static_cast<Index>(sizeof(T)) > kStreamed;
  parallel(pieces(n, chunk), threads, [&](Index c) {
    const Index start = c * chunk, stop = std::min(n, start + chunk);
    std::vector<std::uint8_t> digits(stop - start);
    packing.unpack(packed + packing.bytes(start), stop - start, words, digits.data());
    for (Index at = start; at < stop;) {
      const Index run = at / length, end = std::min(stop, (run + 1) * length);
      const T scale = stored<T>(code + run * sizeof(T)) / unit;
      loops->of(T()).from_digits[add](digits.data() + (at - start), end - at, table, zero, scale,
                                      streamed, out + at);
      at = end;
    }
    fence();
  });
}

// A bit an element; returns the sum of a term of all.
template <class T>
double put_signs(const T* x, Index n, Sign sign, bool big, int term, std::uint8_t* out,
                 int threads) {
  const auto& own = loops->of(T());
  std::vector<double> parts(pieces(n, kSummed));
  parallel(pieces(n, kTaken), threads, [&](Index c) {
    for (Index at = c * kTaken; at < std::min(n, (c + 1) * kTaken); at += kSummed) {
      const Index count = std::min(kSummed, n - at);
      if (term >= 0) parts[at / kSummed] = own.sum[term](x + at, count, 0);
      own.signs[sign][big](x + at, count, out + at / 8);
    }
  });
  return sum<double>(parts.data(), static_cast<Index>(parts.size()), kPlain, 0, 1);
}

// The means of the elements of each run that are negative and of those that are not; and a bit an
// element.
template <class T>
void put_halves(const T* x, Index n, Index length, std::uint8_t* out, int threads) {
  const auto& own = loops->of(T());
  const Index chunk = chunk_of(length, 8), heads = pieces(n, length);
  const bool shared = chunk % length;
  std::uint8_t* const bits = out + 2 * heads * sizeof(T);
  const auto put_head = [&](Index run, int threads) {
    const T* part = x + run * length;
    const Index count = std::min(length, n - run * length);
    const Index blocks = pieces(count, kSummed);
    std::vector<double> low(blocks), high(blocks);
    std::atomic<Index> others{0};
    parallel(blocks, threads, [&](Index b) {
      const Index at = b * kSummed;
      others += own.halves(part + at, std::min(kSummed, count - at), &low[b], &high[b]);
    });
    const Index many = others, few = count - many;
    const double sums[2] = {sum(low.data(), blocks, kPlain, 0, 1),
                            sum(high.data(), blocks, kPlain, 0, 1)};
    const T levels[2] = {static_cast<T>(sums[0] / std::max<Index>(few, 1)),
                         static_cast<T>(sums[1] / std::max<Index>(many, 1))};
    std::memcpy(out + 2 * run * sizeof(T), levels, sizeof levels);
  };
  if (shared)
    for (Index run = 0; run < heads; ++run) put_head(run, threads);
  parallel(pieces(n, chunk), threads, [&](Index c) {
    const Index start = c * chunk, stop = std::min(n, start + chunk);
    if (!shared)
      for (Index run = start / length; run * length < stop; ++run) put_head(run, 1);
    own.signs[kNotNegative][true](x + start, stop - start, bits + start / 8);
  });
}

template <class T>
void from_bits(const std::uint8_t* code, Index n, Index length, bool big, const T* levels, T* out,
               bool add, int threads) {
  if (!length) length = std::max<Index>(n, 1);
  const bool streamed = n * static_cast<Index>(sizeof(T)) > kStreamed;
  parallel(pieces(n, kTaken), threads, [&](Index c) {
    const Index start = c * kTaken, stop = std::min(n, start + kTaken);
    for (Index at = start; at < stop;) {
      const Index run = at / length, end = std::min(stop, (run + 1) * length);
      loops->of(T()).from_bits[add](code, at, end - at, big, levels[2 * run], levels[2 * run + 1],
                                    streamed, out + at);
      at = end;
    }
    fence();
  });
}

template <class T>
void natural(const T* x, Index n, const Draws& draws, std::uint8_t* out, int threads) {
  parallel(pieces(n, kTaken), threads, [&](Index c) {
    std::uint64_t words[kDrawn / 2 + 16];
    float room[kDrawn];
    const Index stop = std::min(n, (c + 1) * kTaken);
    for (Index at = c * kTaken; at < stop; at += kDrawn) {
      const Index count = std::min(kDrawn, stop - at);
      loops->of(T()).natural(x + at, count, draws.at(at, count, words, room), out + at);
      loops->of(T()).signs[kNegative][false](x + at, count, out + n + at / 8);
    }
  });
}

template <class T>
void from_natural(const std::uint8_t* code, Index n, T* out, bool add, int threads) {
  const bool streamed = n * static_cast<Index>(sizeof(T)) > kStreamed;
  parallel(pieces(n, kTaken), threads, [&](Index c) {
    const Index start = c * kTaken;
    loops->of(T()).from_natural[add](code + start, code + n + start / 8,
                                     std::min(kTaken, n - start), streamed, out + start);
    fence();
  });
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

void encode_(const Rule& rule, const py::array& x, const py::object& draws,
             Array<std::uint8_t>& out, int threads) {
  with_type(x, [&](auto t) {
    const Index n = x.size(), heads = rule.length ? pieces(n, rule.length) : n > 0;
    check(out.size() == heads * x.itemsize() + Packing(rule.base).bytes(n));
    Philox stream;
    const Draws own = draws_of(draws, stream, n);
    check(rule.kind == kLinear || rule.kind == kFloat8 || own.given || own.stream);
    auto* to = out.mutable_data();
    py::gil_scoped_release release;
    encode(rule, data(x, t), n, own, to, threads);
  });
}

void decode_(const Array<std::uint8_t>& code, int base, Index length, const py::object& table,
             int zero, double unit, py::array& out, bool add, int threads) {
  with_type(out, [&](auto t) {
    using T = decltype(t);
    const Index n = out.size(), heads = length ? pieces(n, length) : n > 0;
    check(base >= 2 && base <= 256 && length >= 0 &&
          code.size() == heads * out.itemsize() + Packing(base).bytes(n));
    const T* values = nullptr;
    Array<T> kept;
    if (!table.is_none()) {
      kept = table.cast<Array<T>>();
      check(kept.size() >= base);
      values = kept.data();
    }
    const auto* from = code.data();
    auto* to = room(out, t);
    py::gil_scoped_release release;
    decode(from, n, base, length, values, zero, static_cast<T>(unit), to, add, threads);
  });
}

double sum_(const py::array& x, int term, double shift, int threads) {
  return with_type(x, [&](auto t) {
    check(term >= kPlain && term <= kZeros);
    const auto* from = data(x, t);
    py::gil_scoped_release release;
    return sum(from, x.size(), static_cast<Term>(term), shift, threads);
  });
}

double signs_(const py::array& x, int sign, bool big, int term, Array<std::uint8_t>& out,
              int threads) {
  return with_type(x, [&](auto t) {
    const Index n = x.size();
    check(out.size() == (n + 7) / 8 && sign >= kNegative && sign <= kZero && term <= kZeros);
    auto* to = out.mutable_data();
    const auto* from = data(x, t);
    py::gil_scoped_release release;
    return put_signs(from, n, static_cast<Sign>(sign), big, term, to, threads);
  });
}

void halves_(const py::array& x, Index length, Array<std::uint8_t>& out, int threads) {
  with_type(x, [&](auto t) {
    const Index n = x.size();
    check(length > 0 && out.size() == 2 * pieces(n, length) * x.itemsize() + (n + 7) / 8);
    auto* to = out.mutable_data();
    const auto* from = data(x, t);
    py::gil_scoped_release release;
    put_halves(from, n, length, to, threads);
  });
}

void from_bits_(const Array<std::uint8_t>& code, Index length, bool big, const py::array& levels,
                py::array& out, bool add, int threads) {
  with_type(out, [&](auto t) {
    const Index n = out.size(), runs = length ? pieces(n, length) : n > 0;
    check(length >= 0 && code.size() == (n + 7) / 8 && levels.size() >= 2 * runs &&
          py::isinstance<Array<decltype(t)>>(levels));
    const auto* from = code.data();
    const auto* own = data(levels, t);
    auto* to = room(out, t);
    py::gil_scoped_release release;
    from_bits(from, n, length, big, own, to, add, threads);
  });
}

void natural_(const py::array& x, const py::object& draws, Array<std::uint8_t>& out, int threads) {
  with_type(x, [&](auto t) {
    const Index n = x.size();
    check(out.size() == n + (n + 7) / 8);
    Philox stream;
    const Draws own = draws_of(draws, stream, n);
    auto* to = out.mutable_data();
    const auto* from = data(x, t);
    py::gil_scoped_release release;
    natural(from, n, own, to, threads);
  });
}

void from_natural_(const Array<std::uint8_t>& code, py::array& out, bool add, int threads) {
  with_type(out, [&](auto t) {
    const Index n = out.size();
    check(code.size() == n + (n + 7) / 8);
    const auto* from = code.data();
    auto* to = room(out, t);
    py::gil_scoped_release release;
    from_natural(from, n, to, add, threads);
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
  // What is written to is never a copy.
  const auto out = py::arg().noconvert();
  const py::arg in;
  m.def("encode", encode_, in, in, in, out, in);
  m.def("decode", decode_, in, in, in, in, in, in, out, in, in);
  m.def("sum", sum_);
  m.def("signs", signs_, in, in, in, in, out, in);
  m.def("halves", halves_, in, in, out, in);
  m.def("from_bits", from_bits_, in, in, in, in, out, in, in);
  m.def("natural", natural_, in, in, out, in);
  m.def("from_natural", from_natural_, in, out, in, in);
  m.def("philox", philox_);
  m.def("all_finite", all_finite_);
  m.def("uniforms", uniforms_, in, out, in);
  m.def("copy", copy_, in, out, in);
  m.def("use_instructions", use_instructions);
}
