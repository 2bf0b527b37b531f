// The loops over matrices and their thin factors.  low_rank.cpp includes this once for every
// instruction set, each time in another namespace.  Vectors have 16 lanes whatever the registers, as
// sums are defined by them.

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));

INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// The first `count` lanes; the others are zero.
INLINE Floats load(const float* from, Index count) {
  Floats x = {};
  std::memcpy(&x, from, count * sizeof(float));
  return x;
}

INLINE void store(float* to, Floats x, Index count) { std::memcpy(to, &x, count * sizeof(float)); }

// Store without reading what is there into the caches; `to` is a multiple of 64 bytes.
INLINE void stream(float* to, Floats x) {
#if defined(HVD_AVX512)
  _mm512_stream_ps(to, reinterpret_cast<__m512>(x));
#elif defined(__SSE2__)
  __m128 parts[4];
  std::memcpy(parts, &x, sizeof x);
  for (int i = 0; i < 4; ++i) _mm_stream_ps(to + 4 * i, parts[i]);
#else
  store(to, x);
#endif
}

INLINE Ints magnitudes(Floats x) { return reinterpret_cast<Ints>(x) & 0x7fffffff; }

template <class Lanes>
INLINE auto added_up(Lanes x) {
  for (Index half = kLanes / 2; half; half /= 2)
    for (Index i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  return x[0];
}

// Call step(at, load, store) for each 16 elements of 0..n-1, and for what is left.
template <class Step>
INLINE void for_lanes(Index n, const Step& step) {
  Index at = 0;
  for (; at + kLanes <= n; at += kLanes)
    step(
        at, [](const float* from) __attribute__((always_inline)) { return load(from); },
        [](float* to, Floats x) __attribute__((always_inline)) { store(to, x); });
  if (const Index count = n - at)
    step(
        at, [=](const float* from) __attribute__((always_inline)) { return load(from, count); },
        [=](float* to, Floats x) __attribute__((always_inline)) { store(to, x, count); });
}

// Columns of P = M Q for `K` of them and rows first..last-1, where M = x, or `out` = x + y is made
// here; the largest magnitude of M, as bits.
template <int K, bool two>
Ints left(const Matrix& t, Index first, Index last, const float* q, float* p) {
  Ints largest = {};
  for (Index i = first; i < last; ++i) {
    const float *x = t.x + i * t.m, *y = two ? t.y + i * t.m : nullptr;
    float total[K] = {};
    for (Index start = 0; start < t.m; start += kSummed) {
      Floats sums[K] = {};
      for_lanes(std::min(kSummed, t.m - start), [&](Index at, auto load, auto store) INLINED {
        const Index j = start + at;
        Floats own = load(x + j);
        if constexpr (two) store(t.out + i * t.m + j, own = own + load(y + j));
        const Ints bits = magnitudes(own);
        largest = bits > largest ? bits : largest;
        for (int k = 0; k < K; ++k) sums[k] = sums[k] + own * load(q + k * t.m + j);
      });
      for (int k = 0; k < K; ++k) {
        const float sum = added_up(sums[k]);
        total[k] = start ? total[k] + sum : sum;
      }
    }
    for (int k = 0; k < K; ++k) p[k * t.n + i] = total[k];
  }
  return largest;
}

template <bool two>
bool left_all(const Matrix& t, Index first, Index last) {
  constexpr decltype(&left<1, two>) by_columns[] = {left<1, two>, left<2, two>, left<3, two>,
                                                    left<4, two>};
  constexpr decltype(&left<1, false>) more[] = {left<1, false>, left<2, false>, left<3, false>,
                                                left<4, false>};
  const auto columns = [&](Index k) { return std::min<Index>(4, t.rank - k) - 1; };
  const Ints largest = by_columns[columns(0)](t, first, last, t.q, t.p);
  Matrix made = t;
  if (two) made.x = t.out;
  for (Index k = 4; k < t.rank; k += 4)
    more[columns(k)](made, first, last, t.q + k * t.m, t.p + k * t.n);
  std::int32_t most = 0;
  for (Index i = 0; i < kLanes; ++i) most = std::max(most, largest[i]);
  return most < 0x7f800000;
}

// Columns first..last-1 of `K` rows of Q^T = P^T x.
template <int K>
void right(const Matrix& t, Index first, Index last, const float* p, float* q) {
  alignas(64) float sums[K][kWide];
  const Index width = last - first;
  for (Index start = 0; start < t.n; start += kRows) {
    const Index stop = std::min(t.n, start + kRows);
    for (int k = 0; k < K; ++k) std::fill_n(sums[k], (width + kLanes - 1) / kLanes * kLanes, 0.f);
    // A few rows at once, one after the other.
    const auto rows = [&](Index i, auto count) INLINED {
      constexpr int R = decltype(count)::value;
      for_lanes(width, [&](Index at, auto load_, auto) INLINED {
        Floats own[R];
        for (int r = 0; r < R; ++r) {
          const Index place = (i + r) * t.m + first + at;
          own[r] = load_(t.x + place);
        }
        for (int k = 0; k < K; ++k) {
          Floats sum = load(sums[k] + at);
          for (int r = 0; r < R; ++r) sum = sum + p[k * t.n + i + r] * own[r];
          store(sums[k] + at, sum);
        }
      });
    };
    Index i = start;
    for (; i + 4 <= stop; i += 4) rows(i, std::integral_constant<int, 4>());
    for (; i < stop; ++i) rows(i, std::integral_constant<int, 1>());
    for (int k = 0; k < K; ++k) {
      float* out = q + k * t.m + first;
      for (Index j = 0; j < width; ++j) out[j] = start ? out[j] + sums[k][j] : sums[k][j];
    }
  }
}

void right_all(const Matrix& t, Index first, Index last) {
  constexpr decltype(&right<1>) by_rows[] = {right<1>, right<2>, right<3>, right<4>};
  for (Index k = 0; k < t.rank; k += 4)
    by_rows[std::min<Index>(4, t.rank - k) - 1](t, first, last, t.p + k * t.n, t.q + k * t.m);
}

// Rows first..last-1 of the product P Q^T, and in y what P `own`^T leaves of x; K = 0: of any rank.
template <int K, bool sends, bool keeps>
void settle(const Matrix& t, Index first, Index last) {
  const int rank = K ? K : static_cast<int>(t.rank);
  for (Index i = first; i < last; ++i) {
    const float* p = t.p + i;
    const Index row = i * t.m;
    // Rows of y that are aligned, but for what is left of them.
    const bool streamed =
        keeps && t.streamed && reinterpret_cast<std::uintptr_t>(t.y + row) % 64 == 0;
    for_lanes(t.m, [&](Index j, auto load, auto store) INLINED {
      const auto product = [&](const float* q) INLINED {
        Floats sum = p[0] * load(q + j);
        for (int k = 1; k < rank; ++k) sum = sum + p[k * t.n] * load(q + k * t.m + j);
        return sum;
      };
      const Floats mean = product(t.q);
      if constexpr (sends || keeps) {
        const Floats sent = product(t.own);
        if constexpr (sends) store(t.sent + row + j, sent);
        if constexpr (keeps) {
          const Floats left = load(t.x + row + j) - sent;
          if (streamed && j + kLanes <= t.m)
            stream(t.y + row + j, left);
          else
            store(t.y + row + j, left);
        }
      }
      store(t.out + row + j, mean);
    });
  }
}

template <int K>
void settle_of(const Matrix& t, Index first, Index last) {
  if (t.sent && t.y) return settle<K, true, true>(t, first, last);
  if (t.sent) return settle<K, true, false>(t, first, last);
  if (t.y) return settle<K, false, true>(t, first, last);
  settle<K, false, false>(t, first, last);
}

void settle_all(const Matrix& t, Index first, Index last) {
  if (t.rank == 1) return settle_of<1>(t, first, last);
  if (t.rank == 2) return settle_of<2>(t, first, last);
  if (t.rank == 4) return settle_of<4>(t, first, last);
  settle_of<0>(t, first, last);
}

double dot(const float* x, const float* y, Index n) {
  double total = 0;
  for (Index start = 0; start < n; start += kSummed) {
    Doubles sums = {};
    for_lanes(std::min(kSummed, n - start), [&](Index at, auto load, auto) INLINED {
      sums = sums + __builtin_convertvector(load(x + start + at), Doubles) *
                        __builtin_convertvector(load(y + start + at), Doubles);
    });
    total += added_up(sums);
  }
  return total;
}

void unit(const float* from, float* to, Index n) {
  const float length = static_cast<float>(std::sqrt(dot(from, from, n)));
  const float divisor = length < kTiny ? kTiny : length;
  for (Index i = 0; i < n; ++i) to[i] = from[i] / divisor;
}

void orthonormal(float* rows, Index rank, Index n) {
  std::vector<double> shares(rank);
  for (Index k = 0; k < rank; ++k) {
    float* row = rows + k * n;
    for (int turn = 0; turn < 2; ++turn) {
      for (Index j = 0; j < k; ++j) shares[j] = dot(row, rows + j * n, n);
      if (k) {
        for_lanes(n, [&](Index at, auto load, auto store) INLINED {
          Doubles known = shares[0] * __builtin_convertvector(load(rows + at), Doubles);
          for (Index j = 1; j < k; ++j)
            known = known + shares[j] * __builtin_convertvector(load(rows + j * n + at), Doubles);
          const Doubles left = __builtin_convertvector(load(row + at), Doubles) - known;
          store(row + at, __builtin_convertvector(left, Floats));
        });
      }
      unit(row, row, n);
    }
  }
}

const Loops loops{{left_all<false>, left_all<true>}, right_all, settle_all, unit, orthonormal};
