// CRC-32, that of zlib, by products of polynomials: ten times as fast as a table.

#include "common.h"

namespace {

#if defined(HVD_DISPATCHES)
#pragma GCC push_options
#pragma GCC target("pclmul,sse4.1")

INLINE __m128i load(const std::uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// Both halves of x, moved on by the distances that `by` stands for, plus `next`.
INLINE __m128i folded(__m128i x, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Of n bytes, a multiple of 16 and at least 64; `crc` is that of what comes before, inverted.
//
// Polynomials over two elements are written from the lowest bit of the first byte on.  The constants
// are powers of x modulo that of CRC-32: of 512 +- 32, 128 +- 32 and 64; then the quotient of x^64,
// and the polynomial itself.
std::uint32_t folded_crc(const std::uint8_t* from, Index n, std::uint32_t crc) {
  const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_half = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);

  __m128i parts[4];
  for (int i = 0; i < 4; ++i) parts[i] = load(from + 16 * i);
  parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  from += 64, n -= 64;
  for (; n >= 64; from += 64, n -= 64)
    for (int i = 0; i < 4; ++i) parts[i] = folded(parts[i], by_four, load(from + 16 * i));
  __m128i x = parts[0];
  for (int i = 1; i < 4; ++i) x = folded(x, by_one, parts[i]);
  for (; n >= 16; from += 16, n -= 16) x = folded(x, by_one, load(from));

  // 128 bits to 96, to 64, to 32.
  x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by_one, 0x10));
  const __m128i cut = _mm_and_si128(x, low32);
  x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(cut, by_half, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(x, low32), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low32), barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(x, quotient), 1));
}

#pragma GCC pop_options

bool is_fast() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
#else
std::uint32_t folded_crc(const std::uint8_t*, Index, std::uint32_t crc) { return crc; }
bool is_fast() { return false; }
#endif

struct Table {
  std::uint32_t of[256];
  Table() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? 0xedb88320u : 0);
      of[byte] = rest;
    }
  }
};

// Of bytes that follow others, whose checksum is `start`.
std::uint32_t crc32(const Array<std::uint8_t>& bytes, std::uint32_t start) {
  static const Table table;
  static const bool fast = is_fast();
  const std::uint8_t* from = bytes.data();
  Index n = bytes.size();
  py::gil_scoped_release release;
  std::uint32_t crc = ~start;
  if (fast && n >= 64) {
    const Index whole = n / 16 * 16;
    crc = folded_crc(from, whole, crc);
    from += whole, n -= whole;
  }
  for (; n; --n, ++from) crc = crc >> 8 ^ table.of[(crc ^ *from) & 255];
  return ~crc;
}

}  // namespace

void add_checksum(py::module_& m) {
  m.def("crc32", crc32);
  m.attr("has_fast_crc32") = is_fast();
}
