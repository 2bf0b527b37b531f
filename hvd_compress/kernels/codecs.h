// The loops of codecs over parts of an array.  codecs.cpp includes this once for every instruction
// set, each time in another namespace.  T is float or double; eight elements are a step.

template <class T>
struct Of;
template <>
struct Of<float> {
  typedef float Eight __attribute__((vector_size(32)));
  typedef std::int32_t Ints __attribute__((vector_size(32)));
  using Word = std::uint32_t;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: its sum with x ends at the ones
};
template <>
struct Of<double> {
  typedef double Eight __attribute__((vector_size(64)));
  typedef std::int64_t Ints __attribute__((vector_size(64)));
  using Word = std::uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
};
typedef Of<double>::Eight Doubles;

template <class T>
INLINE typename Of<T>::Eight eight(const T* from) {
  typename Of<T>::Eight x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
INLINE typename Of<T>::Word word_of(T x) {
  typename Of<T>::Word word;
  std::memcpy(&word, &x, sizeof word);
  return word;
}

template <class T>
INLINE T number_of(typename Of<T>::Word word) {
  T x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// Store without reading what is there into the caches; `to` is a multiple of 32 bytes.
INLINE void stream(float* to, Of<float>::Eight x) {
#if defined(HVD_AVX2) || defined(HVD_AVX512)
  _mm256_stream_ps(to, reinterpret_cast<__m256>(x));
#else
  std::memcpy(to, &x, sizeof x);
#endif
}
INLINE void stream(double* to, Doubles x) {
#if defined(HVD_AVX2) || defined(HVD_AVX512)
  double parts[8];
  std::memcpy(parts, &x, sizeof x);
  _mm256_stream_pd(to, _mm256_loadu_pd(parts));
  _mm256_stream_pd(to + 4, _mm256_loadu_pd(parts + 4));
#else
  std::memcpy(to, &x, sizeof x);
#endif
}

// -- reductions -----------------------------------------------------------------------------------

template <class T>
T largest(const T* x, Index n) {
  using Word = typename Of<T>::Word;
  constexpr Word kMost = ~Word{0} >> 1;
  typename Of<T>::Ints most = {};
  Index i = 0;
  for (; i + 8 <= n; i += 8) {
    const auto words = reinterpret_cast<typename Of<T>::Ints>(eight(x + i)) & kMost;
    most = words > most ? words : most;
  }
  Word found = 0;
  for (int lane = 0; lane < 8; ++lane) found = std::max(found, static_cast<Word>(most[lane]));
  for (; i < n; ++i) found = std::max(found, word_of(x[i]) & kMost);
  return number_of<T>(found);
}

// Sixteen sums of every sixteenth element each, added in halves.
INLINE double folded(Doubles low, Doubles high) {
  low += high;
  double lanes[8];
  std::memcpy(lanes, &low, sizeof lanes);
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <Term term>
INLINE Doubles term_of(Doubles x, double shift) {
  if constexpr (term == kMagnitude) return x < 0 ? -x : x;
  if constexpr (term == kSquare) return (x - shift) * (x - shift);
  if constexpr (term == kZeros) return x == 0 ? Doubles{} + 1 : Doubles{};
  return x;
}

// Of up to kSummed elements.
template <Term term, class T>
double block_sum(const T* x, Index n, double shift) {
  constexpr double missing = term == kZeros ? 1 : 0;
  Doubles low = {}, high = {};
  Index i = 0;
  for (; i + 16 <= n; i += 16) {
    low += term_of<term>(__builtin_convertvector(eight(x + i), Doubles), shift);
    high += term_of<term>(__builtin_convertvector(eight(x + i + 8), Doubles), shift);
  }
  if (i < n) {
    double rest[16];  // what is missing adds nothing
    for (Index j = 0; j < 16; ++j)
      rest[j] = i + j < n ? static_cast<double>(x[i + j]) : term == kSquare ? shift : missing;
    low += term_of<term>(eight(rest), shift);
    high += term_of<term>(eight(rest + 8), shift);
  }
  return folded(low, high);
}

// Of those elements that are negative, and of those that are not; returns the number of the latter.
template <class T>
Index block_halves(const T* x, Index n, double* negative, double* others) {
  Doubles sums[2][2] = {};
  typename Of<T>::Ints many = {};
  const auto add = [&](typename Of<T>::Eight own, int half) __attribute__((always_inline)) {
    const Doubles wide = __builtin_convertvector(own, Doubles);
    sums[0][half] += wide >= 0 ? Doubles{} : wide;
    sums[1][half] += wide >= 0 ? wide : Doubles{};
    many -= own >= 0;
  };
  Index i = 0;
  for (; i + 16 <= n; i += 16) {
    add(eight(x + i), 0);
    add(eight(x + i + 8), 1);
  }
  if (i < n) {
    T rest[16];
    for (Index j = 0; j < 16; ++j) rest[j] = i + j < n ? x[i + j] : T(-0.0);
    add(eight(rest), 0);
    add(eight(rest + 8), 1);
    many[0] -= static_cast<int>(16 - (n - i));
  }
  *negative = folded(sums[0][0], sums[0][1]);
  *others = folded(sums[1][0], sums[1][1]);
  Index found = 0;
  for (int lane = 0; lane < 8; ++lane) found += many[lane];
  return found;
}

// -- bits -----------------------------------------------------------------------------------------

// The lanes that are -1 rather than 0, as bits.
INLINE std::uint8_t bits_of_lanes(Of<float>::Ints x) {
#if defined(HVD_AVX512) || defined(HVD_AVX2)
  return static_cast<std::uint8_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x)));
#elif defined(__SSE2__)
  __m128 parts[2];
  std::memcpy(parts, &x, sizeof x);
  return static_cast<std::uint8_t>(_mm_movemask_ps(parts[0]) | _mm_movemask_ps(parts[1]) << 4);
#else
  std::uint8_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= (x[i] & 1) << i;
  return bits;
#endif
}
INLINE std::uint8_t bits_of_lanes(Of<double>::Ints x) {
#if defined(HVD_AVX512)
  return static_cast<std::uint8_t>(_mm512_movepi64_mask(reinterpret_cast<__m512i>(x)));
#elif defined(__SSE2__)
  __m128d parts[4];
  std::memcpy(parts, &x, sizeof x);
  int bits = 0;
  for (int i = 0; i < 4; ++i) bits |= _mm_movemask_pd(parts[i]) << 2 * i;
  return static_cast<std::uint8_t>(bits);
#else
  std::uint8_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= (x[i] & 1) << i;
  return bits;
#endif
}

// The lowest byte of each lane.
INLINE void store_bytes(Of<float>::Ints x, std::uint8_t* to) {
#if defined(HVD_AVX512)
  const __m128i bytes = _mm256_cvtepi32_epi8(reinterpret_cast<__m256i>(x));
  std::memcpy(to, &bytes, 8);
#elif defined(__SSE2__)
  x &= 255;
  __m128i parts[2];
  std::memcpy(parts, &x, sizeof x);
  const __m128i pairs = _mm_packs_epi32(parts[0], parts[1]), bytes = _mm_packus_epi16(pairs, pairs);
  std::memcpy(to, &bytes, 8);
#else
  for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint8_t>(x[i]);
#endif
}
INLINE void store_bytes(Of<double>::Ints x, std::uint8_t* to) {
#if defined(HVD_AVX512)
  const __m128i bytes = _mm512_cvtepi64_epi8(reinterpret_cast<__m512i>(x));
  std::memcpy(to, &bytes, 8);
#else
  for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint8_t>(x[i]);
#endif
}

// The bits of each byte in the other order.
INLINE std::uint64_t reversed(std::uint64_t bytes) {
  bytes = (bytes >> 4 & 0x0f0f0f0f0f0f0f0f) | (bytes & 0x0f0f0f0f0f0f0f0f) << 4;
  bytes = (bytes >> 2 & 0x3333333333333333) | (bytes & 0x3333333333333333) << 2;
  return (bytes >> 1 & 0x5555555555555555) | (bytes & 0x5555555555555555) << 1;
}

template <Sign sign, class T>
INLINE auto has_sign(T x) {
  if constexpr (sign == kNegative) return x < 0;
  if constexpr (sign == kPositive) return x > 0;
  if constexpr (sign == kZero) return x == 0;
  if constexpr (sign == kNotNegative) return x >= 0;
}

// A bit an element, the first the lowest of a byte, or the highest if `big`.
template <Sign sign, bool big, class T>
void signs(const T* x, Index n, std::uint8_t* out) {
  Index i = 0;
  for (; i + 64 <= n; i += 64, out += 8) {
    std::uint64_t bits = 0;
    for (int j = 0; j < 8; ++j)
      bits |= std::uint64_t{bits_of_lanes(has_sign<sign>(eight(x + i + 8 * j)))} << 8 * j;
    if (big) bits = reversed(bits);
    std::memcpy(out, &bits, 8);
  }
  std::uint64_t bits = 0;
  for (Index j = 0; i + j < n; ++j) bits |= std::uint64_t{has_sign<sign>(x[i + j])} << j;
  if (big) bits = reversed(bits);
  std::memcpy(out, &bits, (n - i + 7) / 8);
}

// out = high where a bit is set, else low; or that is added.  `first` is the number of a bit.
template <bool add, class T>
void from_bits(const std::uint8_t* code, Index first, Index n, bool big, T low, T high,
               bool streamed, T* out) {
  using Eight = typename Of<T>::Eight;
  using Ints = typename Of<T>::Ints;
  using Int = std::make_signed_t<typename Of<T>::Word>;
  const auto one = [&](Index i) {
    const Index at = first + i;
    const bool bit = code[at / 8] >> (big ? 7 - at % 8 : at % 8) & 1;
    const T value = bit ? high : low;
    out[i] = add ? out[i] + value : value;
  };
  Index i = 0;
  for (; i < n && (first + i) % 8; ++i) one(i);
  const Ints places = big ? Ints{128, 64, 32, 16, 8, 4, 2, 1} : Ints{1, 2, 4, 8, 16, 32, 64, 128};
  const Eight lows = low - Eight{}, highs = high - Eight{};  // not a sum: -0 stays
  streamed &= reinterpret_cast<std::uintptr_t>(out + i) % 32 == 0;
  const std::uint8_t* byte = code + (first + i) / 8;
  for (; i + 8 <= n; i += 8, ++byte) {
    const Ints bits = places & static_cast<Int>(*byte);
    Eight values = bits != 0 ? highs : lows;
    if constexpr (add) values = eight(out + i) + values;
    if (!add && streamed)
      stream(out + i, values);
    else
      std::memcpy(out + i, &values, sizeof values);
  }
  for (; i < n; ++i) one(i);
}

// -- digits in bytes, and packed ------------------------------------------------------------------

// Eight bytes with b bits each as b bytes, and back; `mask` has these bits.
INLINE std::uint64_t squeezed(std::uint64_t bytes, std::uint64_t mask, int b) {
#if defined(HVD_AVX512) || defined(HVD_AVX2)
  return _pext_u64(bytes, mask);
#else
  std::uint64_t packed = 0;
  for (int j = 0; j < 8; ++j) packed |= (bytes >> 8 * j & mask & 0xff) << b * j;
  return packed;
#endif
}
INLINE std::uint64_t spread(std::uint64_t packed, std::uint64_t mask, int b) {
#if defined(HVD_AVX512) || defined(HVD_AVX2)
  return _pdep_u64(packed, mask);
#else
  std::uint64_t bytes = 0;
  for (int j = 0; j < 8; ++j) bytes |= (packed >> b * j & mask & 0xff) << 8 * j;
  return bytes;
#endif
}

// Fields of b bits, from n digits of eight bits, the last byte filled with zeros.
void pack_fields(const std::uint8_t* digits, Index n, int b, std::uint8_t* out) {
  if (b == 8) {
    std::memcpy(out, digits, n);
    return;
  }
  const std::uint64_t mask = 0x0101010101010101u * ((1u << b) - 1);
  std::uint64_t bytes, packed;
  Index i = 0;
  for (; i + 64 <= n; i += 8, out += b) {
    std::memcpy(&bytes, digits + i, 8);
    packed = squeezed(bytes, mask, b);
    std::memcpy(out, &packed, 8);  // the next ones write over what is too much
  }
  for (; i < n; i += 8, out += b) {
    const Index count = std::min<Index>(8, n - i);
    bytes = 0;
    std::memcpy(&bytes, digits + i, count);
    packed = squeezed(bytes, mask, b);
    std::memcpy(out, &packed, (count * b + 7) / 8);
  }
}

// `size`: bytes of `packed`.
void unpack_fields(const std::uint8_t* packed, Index size, Index n, int b, int base,
                   std::uint8_t* digits) {
  const std::uint64_t mask = 0x0101010101010101u * ((1u << b) - 1);
  if (b == 8) {
    std::memcpy(digits, packed, n);
  } else {
    std::uint64_t fields, bytes;
    Index i = 0, at = 0;
    for (; i + 64 <= n; i += 8, at += b) {
      std::memcpy(&fields, packed + at, 8);
      bytes = spread(fields, mask, b);
      std::memcpy(digits + i, &bytes, 8);
    }
    for (; i < n; i += 8, at += b) {
      fields = 0;
      std::memcpy(&fields, packed + at, std::min<Index>(b, size - at));
      bytes = spread(fields, mask, b);
      std::memcpy(digits + i, &bytes, std::min<Index>(8, n - i));
    }
  }
  if (base == 1 << b) return;
  const std::uint8_t most = static_cast<std::uint8_t>(base - 1);
  for (Index i = 0; i < n; ++i) digits[i] = std::min(digits[i], most);  // others are damage
}

// Words of `each` digits, the first one the highest; the last word may have less.
void pack_words(const std::uint8_t* digits, Index n, int each, int base, Index size,
                std::uint8_t* out) {
  const std::uint64_t factor = base;
  Index i = 0, at = 0;
  for (; i + 4 * each <= n; i += 4 * each, at += 32) {
    std::uint64_t words[4] = {};
    const std::uint8_t* from = digits + i;
    for (int j = 0; j < each; ++j)
      for (int w = 0; w < 4; ++w) words[w] = words[w] * factor + from[w * each + j];
    std::memcpy(out + at, words, 32);
  }
  for (; i < n; i += each, at += 8) {
    std::uint64_t word = 0;
    for (Index j = i; j < std::min(n, i + each); ++j) word = word * factor + digits[j];
    std::memcpy(out + at, &word, std::min<Index>(8, size - at));
  }
}

void unpack_words(const std::uint8_t* packed, Index size, Index n, const Words& words,
                  std::uint8_t* digits) {
  const int parts = words.each / words.part, first = words.each % words.part;
  std::uint8_t room[80];
  for (Index i = 0; i < n; i += words.each) {
    const Index from = i / words.each * 8, count = std::min<Index>(words.each, n - i);
    // Eight digits are written at a time, the last ones too many.
    const bool fits = i + words.each + 8 <= n;
    std::uint8_t* at = fits ? digits + i : room;
    std::uint64_t word = 0, fractions[64];
    std::memcpy(&word, packed + from, std::min<Index>(8, size - from));
    for (int j = parts; j-- > 0;) {
      const std::uint64_t upper = word / words.limit;
      fractions[j] = (word - upper * words.limit) * words.inverse;
      word = upper;
    }
    for (int j = first; j-- > 0; word /= words.base)
      at[j] = static_cast<std::uint8_t>(word % words.base);
    at += first;
    for (int j = 0; j < parts; ++j) {
      for (int k = 0; k < words.part; k += words.group, at += words.group) {
        const auto product = static_cast<unsigned __int128>(fractions[j]) * words.power;
        fractions[j] = static_cast<std::uint64_t>(product);
        std::memcpy(at, words.digits[static_cast<std::uint64_t>(product >> 64)], 8);
      }
    }
    if (!fits) std::memcpy(digits + i, room + words.each - count, count);
  }
}

// -- random numbers -------------------------------------------------------------------------------

#if defined(HVD_AVX512)
// The upper and the lower halves of eight products, by parts of 32 bits.
INLINE void multiply(__m512i x, std::uint64_t factor, __m512i& high, __m512i& low) {
  const __m512i by = _mm512_set1_epi64(static_cast<std::int64_t>(factor));
  const __m512i by_upper = _mm512_srli_epi64(by, 32), upper = _mm512_srli_epi64(x, 32);
  const __m512i mask = _mm512_set1_epi64(0xffffffff);
  const __m512i first = _mm512_mul_epu32(upper, by), second = _mm512_mul_epu32(x, by_upper);
  const __m512i carry =
      _mm512_add_epi64(first, _mm512_srli_epi64(_mm512_mul_epu32(x, by), 32));
  const __m512i middle = _mm512_add_epi64(second, _mm512_and_si512(carry, mask));
  high = _mm512_add_epi64(_mm512_mul_epu32(upper, by_upper), _mm512_srli_epi64(carry, 32));
  high = _mm512_add_epi64(high, _mm512_srli_epi64(middle, 32));
  low = _mm512_mullo_epi64(x, by);
}

// Eight rows of four words, from four columns.
INLINE void transpose(const __m512i* x, std::uint64_t* out) {
  const __m512i a = _mm512_unpacklo_epi64(x[0], x[1]), b = _mm512_unpackhi_epi64(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi64(x[2], x[3]), d = _mm512_unpackhi_epi64(x[2], x[3]);
  const __m512i e = _mm512_shuffle_i64x2(a, c, 0x44), f = _mm512_shuffle_i64x2(b, d, 0x44);
  const __m512i g = _mm512_shuffle_i64x2(a, c, 0xee), h = _mm512_shuffle_i64x2(b, d, 0xee);
  _mm512_storeu_si512(out, _mm512_shuffle_i64x2(e, f, 0x88));
  _mm512_storeu_si512(out + 8, _mm512_shuffle_i64x2(e, f, 0xdd));
  _mm512_storeu_si512(out + 16, _mm512_shuffle_i64x2(g, h, 0x88));
  _mm512_storeu_si512(out + 24, _mm512_shuffle_i64x2(g, h, 0xdd));
}
#endif

constexpr std::uint64_t kEven = 0xD2E7470EE14C6C93u, kOdd = 0xCA5A826395121157u;
constexpr std::uint64_t kNext[2] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu};

INLINE void philox_round(std::uint64_t* x, const std::uint64_t* key) {
  const auto even = static_cast<unsigned __int128>(x[0]) * kEven;
  const auto odd = static_cast<unsigned __int128>(x[2]) * kOdd;
  x[0] = static_cast<std::uint64_t>(odd >> 64) ^ x[1] ^ key[0];
  x[1] = static_cast<std::uint64_t>(odd);
  x[2] = static_cast<std::uint64_t>(even >> 64) ^ x[3] ^ key[1];
  x[3] = static_cast<std::uint64_t>(even);
}

#if defined(HVD_AVX512)
// The same for eight blocks.
INLINE void philox_round(__m512i* x, const std::uint64_t* key) {
  constexpr int kXor = 0x96;  // of three
  __m512i high[2], low[2];
  multiply(x[0], kEven, high[0], low[0]);
  multiply(x[2], kOdd, high[1], low[1]);
  const __m512i first = _mm512_set1_epi64(static_cast<std::int64_t>(key[0]));
  const __m512i second = _mm512_set1_epi64(static_cast<std::int64_t>(key[1]));
  x[0] = _mm512_ternarylogic_epi64(high[1], x[1], first, kXor);
  x[1] = low[1];
  x[2] = _mm512_ternarylogic_epi64(high[0], x[3], second, kXor);
  x[3] = low[0];
}
#endif

// Philox 4x64 with ten rounds (Salmon, Moraes, Dror and Shaw, 2011): blocks first..first+count-1 of
// the stream, of four words each.
inline void philox(const Philox& stream, std::uint64_t first, Index count, std::uint64_t* out) {
  const auto start = [&](std::uint64_t* x, Index block) __attribute__((always_inline)) {
    std::memcpy(x, stream.counter, sizeof stream.counter);
    x[0] += first + block;
  };
  Index done = 0;
#if defined(HVD_AVX512)
  // Vectors beside single words: each alone would leave units of the processor idle.
  constexpr int kGroups = 2, kSingle = 4, kTogether = 8 * kGroups + kSingle;
  for (; done + kTogether <= count; done += kTogether) {
    __m512i x[kGroups][4];
    std::uint64_t y[kSingle][4], key[2] = {stream.key[0], stream.key[1]};
    for (int g = 0; g < kGroups; ++g) {
      const auto block = static_cast<std::int64_t>(stream.counter[0] + first + done + 8 * g);
      x[g][0] = _mm512_add_epi64(_mm512_set1_epi64(block), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
      for (int i = 1; i < 4; ++i)
        x[g][i] = _mm512_set1_epi64(static_cast<std::int64_t>(stream.counter[i]));
    }
    for (int b = 0; b < kSingle; ++b) start(y[b], done + 8 * kGroups + b);
    for (int round = 0; round < 10; ++round) {
      for (auto& group : x) philox_round(group, key);
      for (auto& block : y) philox_round(block, key);
      for (int i = 0; i < 2; ++i) key[i] += kNext[i];
    }
    for (int g = 0; g < kGroups; ++g) transpose(x[g], out + 4 * (done + 8 * g));
    std::memcpy(out + 4 * (done + 8 * kGroups), y, sizeof y);
  }
#endif
  for (; done < count; ++done) {
    std::uint64_t x[4], key[2] = {stream.key[0], stream.key[1]};
    start(x, done);
    for (int round = 0; round < 10; ++round) {
      philox_round(x, key);
      for (int i = 0; i < 2; ++i) key[i] += kNext[i];
    }
    std::memcpy(out + 4 * done, x, sizeof x);
  }
}

// Numbers start..start+n-1 of the stream, from 0 to 1 (24 bits), as NumPy's generators make them of
// half a word each.  `words`: room for n / 2 + 8.
void uniforms(const Philox& stream, Index start, Index n, std::uint64_t* words, float* out) {
  const Index half = stream.first + start, block = half / 8;
  philox(stream, block, (half + n + 7) / 8 - block, words);
  const std::uint8_t* from = reinterpret_cast<const std::uint8_t*>(words) + (half - 8 * block) * 4;
  for (Index i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, from + 4 * i, sizeof bits);
    out[i] = static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
  }
}

// -- from numbers to digits -----------------------------------------------------------------------

template <class T>
using EightOf = typename Of<T>::Eight;
template <class T>
using IntsOf = typename Of<T>::Ints;

// To the nearest whole number, halves to even, of less than 2^21.
template <class T>
INLINE EightOf<T> rounded(EightOf<T> x) {
  return (x + Of<T>::kRounder) - Of<T>::kRounder;
}

// Whole numbers, as integers in the lowest bits.
template <class T>
INLINE IntsOf<T> whole(EightOf<T> x) {
  return reinterpret_cast<IntsOf<T>>(x + Of<T>::kRounder);
}

template <class T>
INLINE EightOf<T> magnitude(EightOf<T> x) {
  using Word = typename Of<T>::Word;
  return reinterpret_cast<EightOf<T>>(reinterpret_cast<IntsOf<T>>(x) & (~Word{0} >> 1));
}

// Between -most and most; of NaN the former.
template <class T>
INLINE EightOf<T> clipped(EightOf<T> x, T most) {
  x = x > -most ? x : EightOf<T>{} - most;
  return x < most ? x : EightOf<T>{} + most;
}

// Write the lowest bytes of what `step` makes of eight elements and eight random numbers.
template <class T, class Step>
INLINE void by_eight(const T* x, Index n, const float* draws, std::uint8_t* out, const Step& step) {
  const auto wide = [](Of<float>::Eight drawn) __attribute__((always_inline)) {
    return __builtin_convertvector(drawn, EightOf<T>);
  };
  Index i = 0;
  for (; i + 8 <= n; i += 8) {
    const auto drawn = draws ? eight(draws + i) : Of<float>::Eight{};
    store_bytes(step(eight(x + i), wide(drawn)), out + i);
  }
  if (i == n) return;
  T rest[8] = {};
  float drawn[8] = {};
  std::uint8_t bytes[8];
  std::memcpy(rest, x + i, (n - i) * sizeof(T));
  if (draws) std::memcpy(drawn, draws + i, (n - i) * sizeof(float));
  store_bytes(step(eight(rest), wide(eight(drawn))), bytes);
  std::memcpy(out + i, bytes, n - i);
}

// What the elements of a run are divided by.
template <class T>
INLINE T divisor(T norm) {
  return norm > 0 && norm < std::numeric_limits<T>::infinity() ? norm : 1;
}

template <class T>
void linear(const T* x, Index n, T scale, T most, std::uint8_t* digits) {
  if (!(scale > 0)) scale = 1;
  const T inverse = 1 / scale;
  by_eight(x, n, nullptr, digits, [=](EightOf<T> own, EightOf<T>) __attribute__((always_inline)) {
    EightOf<T> steps = own * inverse, near = rounded<T>(steps);
    // A product is as good as the quotient, but for elements near the middle of two levels.
    const auto close = !(magnitude<T>(steps - near) < T(0.4999));
    if (bits_of_lanes(close)) near = rounded<T>(clipped<T>(own / scale, most));
    return whole<T>(clipped<T>(near, most) + most);
  });
}

template <class T>
void uniform(const T* x, Index n, T norm, T levels, const float* draws, std::uint8_t* digits) {
  const T by = divisor(norm);
  by_eight(x, n, draws, digits,
           [=](EightOf<T> own, EightOf<T> drawn) __attribute__((always_inline)) {
    const EightOf<T> steps = clipped<T>(own / by * levels, levels + 1);
    EightOf<T> low = rounded<T>(steps);
    low -= low > steps ? EightOf<T>{} + 1 : EightOf<T>{};
    low += drawn < steps - low ? EightOf<T>{} + 1 : EightOf<T>{};
    return whole<T>(clipped<T>(low, levels) + levels);
  });
}

// `grid`: zero and the levels.
template <class T>
void exponential(const T* x, Index n, T norm, const T* grid, int levels, const float* draws,
                 std::uint8_t* digits) {
  const T by = divisor(norm);
  by_eight(x, n, draws, digits,
           [=](EightOf<T> own, EightOf<T> drawn) __attribute__((always_inline)) {
    const EightOf<T> size = magnitude<T>(own / by);
    EightOf<T> below = {}, width = EightOf<T>{} + grid[1];
    IntsOf<T> level = {};
    for (int l = 1; l < levels; ++l) {
      const auto reached = size >= grid[l];
      level -= reached;
      below = reached ? EightOf<T>{} + grid[l] : below;
      width = reached ? EightOf<T>{} + (grid[l + 1] - grid[l]) : width;
    }
    level -= drawn * width < size - below;
    return levels + (own < 0 ? -level : level);
  });
}

template <class T>
void ternary(const T* x, Index n, T most, T limit, const float* draws, std::uint8_t* digits) {
  by_eight(x, n, draws, digits,
           [=](EightOf<T> own, EightOf<T> drawn) __attribute__((always_inline)) {
    EightOf<T> size = magnitude<T>(own);
    size = size < limit ? size : EightOf<T>{} + limit;
    const IntsOf<T> chosen = drawn * most < size;
    return 1 + (own < 0 ? chosen : -chosen);
  });
}

// Eight bits with `mantissa` of them for the significand; `most` is the largest number, `bias` that
// of the exponent.
template <class T>
void float8(const T* x, Index n, T scale, T most, int mantissa, int bias, std::uint8_t* digits) {
  using Word = typename Of<T>::Word;
  using Int = std::make_signed_t<Word>;
  if (!(scale > 0)) scale = 1;
  const int cut = Of<T>::kMantissa - mantissa, top = 8 * sizeof(Word) - 1;
  const Int half = (Int{1} << (cut - 1)) - 1, rebias = Int(Of<T>::kBias - bias) << mantissa;
  const T normal = std::ldexp(T(1), 1 - bias), ones = std::ldexp(T(1), bias - 1 + mantissa);
  by_eight(x, n, nullptr, digits, [=](EightOf<T> own, EightOf<T>) __attribute__((always_inline)) {
    EightOf<T> size = magnitude<T>(own) / scale;
    size = size < most ? size : EightOf<T>{} + most;
    const auto bits = reinterpret_cast<IntsOf<T>>(size);
    const IntsOf<T> large = ((bits + half + (bits >> cut & 1)) >> cut) - rebias;
    const IntsOf<T> small = whole<T>(size * ones);
    const IntsOf<T> sign = reinterpret_cast<IntsOf<T>>(own) >> top & 128;
    return (size < normal ? small & 127 : large) | sign;
  });
}

template <class T>
void quantise(const Rule& rule, const T* x, Index n, T head, const float* draws,
              std::uint8_t* digits) {
  const T levels = static_cast<T>(rule.levels);
  switch (rule.kind) {
    case kLinear: return linear<T>(x, n, head, levels, digits);
    case kUniform: return uniform<T>(x, n, head, levels, draws, digits);
    case kExponential:
      return exponential<T>(x, n, head, rule.grid_of(T()), rule.levels, draws, digits);
    case kTernary: return ternary<T>(x, n, head, static_cast<T>(rule.limit), draws, digits);
    case kFloat8:
      return float8<T>(x, n, head, static_cast<T>(rule.limit), rule.mantissa, rule.bias, digits);
  }
}

// -- from digits to numbers -----------------------------------------------------------------------

// out = value * scale, or that is added; `value` is what a digit stands for.
template <bool add, class T, class Value>
INLINE void scaled(const std::uint8_t* digits, Index n, T scale, bool streamed, T* out,
                   const Value& value) {
  const auto one = [&](Index i) __attribute__((always_inline)) {
    const T product = value(digits[i]) * scale;
    out[i] = add ? out[i] + product : product;
  };
  if (add || !streamed) {
    for (Index i = 0; i < n; ++i) one(i);
    return;
  }
  Index i = 0;
  for (; i < n && reinterpret_cast<std::uintptr_t>(out + i) % 32; ++i) one(i);
  for (; i + 8 <= n; i += 8) {
    T values[8];
    for (int j = 0; j < 8; ++j) values[j] = value(digits[i + j]) * scale;
    stream(out + i, eight(values));
  }
  for (; i < n; ++i) one(i);
}

template <bool add, class T>
void from_digits(const std::uint8_t* digits, Index n, const T* table, int zero, T scale,
                 bool streamed, T* out) {
  if (!table) {
    scaled<add, T>(digits, n, scale, streamed, out, [=](std::uint8_t digit) {
      return static_cast<T>(static_cast<int>(digit) - zero);
    });
    return;
  }
  Index i = 0;
#if defined(HVD_AVX2) || defined(HVD_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    streamed &= !add && reinterpret_cast<std::uintptr_t>(out) % 32 == 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(digits + i));
      const __m256i places = _mm256_cvtepu8_epi32(bytes);
      auto values = reinterpret_cast<EightOf<T>>(_mm256_i32gather_ps(table, places, 4)) * scale;
      if (add) values = eight(out + i) + values;
      if (streamed)
        stream(out + i, values);
      else
        std::memcpy(out + i, &values, sizeof values);
    }
    streamed = false;
  }
#endif
  scaled<add, T>(digits + i, n - i, scale, streamed, out + i,
                 [=](std::uint8_t digit) { return table[digit]; });
}

// -- natural compression --------------------------------------------------------------------------

// `draws` is null for rounding to the nearer power.
inline void natural(const float* x, Index n, const float* draws, std::uint8_t* codes) {
  typedef Of<float>::Ints Ints;
  const auto step = [](Of<float>::Eight own, Of<float>::Eight limit)
                        __attribute__((always_inline)) {
    const Ints bits = reinterpret_cast<Ints>(own) & 0x7fffffff;
    const auto part = __builtin_convertvector(bits & 0x7fffff, Of<float>::Eight);
    const Ints code = (bits >> 23) - (limit * 0x1p23f < part);
    return code < 255 ? code : Ints{} + 255;
  };
  if (draws) return by_eight(x, n, draws, codes, step);
  by_eight(x, n, draws, codes, [=](Of<float>::Eight own, Of<float>::Eight)
                                   __attribute__((always_inline)) {
    return step(own, Of<float>::Eight{} + 0.5f);
  });
}
inline void natural(const double* x, Index n, const float* draws, std::uint8_t* codes) {
  typedef Of<double>::Ints Ints;
  const auto step = [](Doubles own, Doubles limit) __attribute__((always_inline)) {
    const Ints bits = reinterpret_cast<Ints>(own) & 0x7fffffffffffffff;
    const Ints exponent = (bits >> 52) - 896;
    const Ints fraction = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
    // Below 2^-126 there is only zero.
    const Doubles part = exponent < 1 ? reinterpret_cast<Doubles>(bits) * 0x1p126
                                      : reinterpret_cast<Doubles>(fraction) - 1.0;
    const Ints code = (exponent < 0 ? Ints{} : exponent) - (limit < part);
    return code < 255 ? code : Ints{} + 255;
  };
  if (draws) return by_eight(x, n, draws, codes, step);
  by_eight(x, n, draws, codes, [=](Doubles own, Doubles) __attribute__((always_inline)) {
    return step(own, Doubles{} + 0.5);
  });
}

template <bool add, class T>
void from_natural(const std::uint8_t* codes, const std::uint8_t* signs, Index n, bool streamed,
                  T* out) {
  const auto value = [&](Index i) __attribute__((always_inline)) {
    const Bits sign = signs[i / 8] >> i % 8 & 1;
    return static_cast<T>(number_of<float>(static_cast<Bits>(codes[i]) << 23 | sign << 31));
  };
  Index i = 0;
  const bool aligned = streamed && !add && reinterpret_cast<std::uintptr_t>(out) % 32 == 0;
  for (; i + 8 <= n; i += 8) {
    T values[8];
    const Bits byte = signs[i / 8];
    for (int j = 0; j < 8; ++j)
      values[j] = static_cast<T>(
          number_of<float>(static_cast<Bits>(codes[i + j]) << 23 | (byte >> j & 1) << 31));
    if (aligned) {
      stream(out + i, eight(values));
    } else {
      for (int j = 0; j < 8; ++j) out[i + j] = add ? out[i + j] + values[j] : values[j];
    }
  }
  for (; i < n; ++i) out[i] = add ? out[i] + value(i) : value(i);
}

// -- sums -----------------------------------------------------------------------------------------

// sum = x + base, or base where x is null; and kept = base, unless that is null.  kept may be x, and
// sum base.
template <class T>
void joined(const T* base, const T* x, Index n, T* kept, T* sum) {
  const auto one = [&](Index i) __attribute__((always_inline)) {
    const T own = base[i], other = x ? x[i] : T();
    if (kept) kept[i] = own;
    sum[i] = x ? other + own : own;
  };
  Index i = 0;
  for (; x && i + 8 <= n; i += 8) {
    const EightOf<T> own = eight(base + i), total = eight(x + i) + own;
    if (kept) std::memcpy(kept + i, &own, sizeof own);
    std::memcpy(sum + i, &total, sizeof total);
  }
  for (; i < n; ++i) one(i);
}

template <class T>
void divided(const T* x, Index n, T by, bool streamed, T* out) {
  int exponent;
  const bool is_power = std::frexp(by, &exponent) == T(0.5);  // whose products are the quotients
  const T inverse = 1 / by;
  const auto one = [&](Index i) { out[i] = is_power ? x[i] * inverse : x[i] / by; };
  Index i = 0;
  for (; streamed && i < n && reinterpret_cast<std::uintptr_t>(out + i) % 32; ++i) one(i);
  for (; i + 8 <= n; i += 8) {
    const EightOf<T> own = is_power ? eight(x + i) * inverse : eight(x + i) / by;
    if (streamed)
      stream(out + i, own);
    else
      std::memcpy(out + i, &own, sizeof own);
  }
  for (; i < n; ++i) one(i);
}

template <class T>
constexpr LoopsOf<T> loops_of{
    largest<T>,
    {block_sum<kPlain, T>, block_sum<kMagnitude, T>, block_sum<kSquare, T>, block_sum<kZeros, T>},
    block_halves<T>,
    {{signs<kNegative, false, T>, signs<kNegative, true, T>},
     {signs<kPositive, false, T>, signs<kPositive, true, T>},
     {signs<kNotNegative, false, T>, signs<kNotNegative, true, T>},
     {signs<kZero, false, T>, signs<kZero, true, T>}},
    {from_bits<false, T>, from_bits<true, T>},
    quantise<T>,
    {from_digits<false, T>, from_digits<true, T>},
    natural,
    {from_natural<false, T>, from_natural<true, T>},
    joined<T>,
    divided<T>,
};

const Loops loops{loops_of<float>, loops_of<double>, pack_fields, unpack_fields, pack_words,
                  unpack_words,      philox,            uniforms};
