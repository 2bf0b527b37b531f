// The loops over all elements of tensors.  native.cpp includes this once for every instruction set,
// each time in another namespace.

#if defined(HVD_AVX512)
constexpr Index kLanes = 16;
#elif defined(HVD_AVX2)
constexpr Index kLanes = 8;
#else
constexpr Index kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));

INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

INLINE Ints magnitudes(Floats x) { return reinterpret_cast<Ints>(x) & kMagnitude; }

// Store without reading what is there into the caches; `to` is a multiple of 64 bytes.
INLINE void stream(float* to, Floats x) {
#if defined(HVD_AVX512)
  _mm512_stream_ps(to, x);
#elif defined(HVD_AVX2)
  _mm256_stream_ps(to, x);
#elif defined(__SSE2__)
  _mm_stream_ps(to, x);
#else
  std::memcpy(to, &x, sizeof x);
#endif
}

// Which lanes are not zero, as bits.
INLINE Bits set_lanes(Ints x) {
#if defined(HVD_AVX512)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(x));
#elif defined(HVD_AVX2)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(x));
#elif defined(__SSE2__)
  return _mm_movemask_ps(reinterpret_cast<__m128>(x));
#else
  Bits found = 0;
  for (int i = 0; i < kLanes; ++i) found |= (x[i] & 1) << i;
  return found;
#endif
}

INLINE Bits largest_lane(Ints x) {
  std::int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, x[i]);
  return largest;
}

// Add those of x[0..n-1] that have a magnitude of at least `least`; x[0] is at `first`.
INLINE void search_block(const float* x, Index n, Index first, Bits least, Found& found) {
  Index i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Ints above = magnitudes(load(x + i)) > static_cast<std::int32_t>(least - 1);
    for (Bits hits = set_lanes(above); hits; hits &= hits - 1) {
      const Index place = i + __builtin_ctz(hits);
      found.candidates.push_back({static_cast<Bits>(first + place), bits_of(x[place])});
    }
  }
  for (; i < n; ++i) {
    if (magnitude(x[i]) >= least)
      found.candidates.push_back({static_cast<Bits>(first + i), bits_of(x[i])});
  }
}

inline void search(const float* x, Index start, Index stop, Bits least, Found& found) {
  for (Index at = start; at < stop; at += kBlock)
    search_block(x + at, std::min(kBlock, stop - at), at - start, least, found);
}

// The new velocity, and the new residual before anything is sent; T is one number or several.
template <Momentum kind, class T>
INLINE void step(T gradient, T velocity, T residual, float m, T& new_velocity, T& new_residual) {
  T direction = gradient;
  if constexpr (kind == kPlain) {
    new_velocity = m * velocity;
    direction = new_velocity = new_velocity + gradient;
  } else if constexpr (kind == kNesterov) {
    new_velocity = velocity + gradient;
    new_velocity = m * new_velocity;
    direction = new_velocity + gradient;
  }
  new_residual = direction + residual;
}

// A whole block; returns the largest magnitudes of its new residuals.
template <Momentum kind, bool streamed>
INLINE Ints accumulate_block(const Tensor& t, Index at, float m) {
  Ints largest = {};
  const auto store = [](float* to, Floats x) __attribute__((always_inline)) {
    if constexpr (streamed) stream(to, x); else std::memcpy(to, &x, sizeof x);
  };
  for (Index i = at; i < at + kBlock; i += kLanes) {
    Floats velocity = {}, residual;
    if constexpr (kind != kNone) velocity = load(t.velocity + i);
    step<kind, Floats>(load(t.gradient + i), velocity, load(t.residual + i), m, velocity, residual);
    if constexpr (kind != kNone) store(t.new_velocity + i, velocity);
    store(t.new_residual + i, residual);
    const Ints bits = magnitudes(residual);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Elements start..stop-1 of a tensor.
template <Momentum kind>
void accumulate(const Tensor& t, Index start, Index stop, float m, Bits least, bool streamed,
                Found& found) {
  Bits most = 0;
  Ints most_of_lanes = {};
  const std::int32_t below = least > kMagnitude ? kMagnitude : least - 1;
  // A short first block, so that others are aligned.
  const auto address = reinterpret_cast<std::uintptr_t>(t.new_residual + start);
  Index n = streamed && address % 64 ? (64 - address % 64) / sizeof(float) : kBlock;
  for (Index at = start; at < stop; at += n, n = kBlock) {
    n = std::min(n, stop - at);
    if (n == kBlock) {
      const Ints largest = streamed ? accumulate_block<kind, true>(t, at, m)
                                    : accumulate_block<kind, false>(t, at, m);
      most_of_lanes = largest > most_of_lanes ? largest : most_of_lanes;
      if (!set_lanes(largest > below)) continue;
    } else {
      Bits largest = 0;
      for (Index i = at; i < at + n; ++i) {
        float velocity = kind == kNone ? 0 : t.velocity[i];
        step<kind, float>(t.gradient[i], velocity, t.residual[i], m, velocity, t.new_residual[i]);
        if (kind != kNone) t.new_velocity[i] = velocity;
        largest = std::max(largest, magnitude(t.new_residual[i]));
      }
      most = std::max(most, largest);
      if (largest < least) continue;
    }
    // What was streamed is in no cache, but what it was made of is.
    float residuals[kBlock];
    for (Index i = at; i < at + n; ++i) {
      float velocity = kind == kNone ? 0 : t.velocity[i];
      step<kind, float>(t.gradient[i], velocity, t.residual[i], m, velocity, residuals[i - at]);
    }
    search_block(residuals, n, at - start, least, found);
  }
  found.largest = std::max(most, largest_lane(most_of_lanes));
}

const Loops loops{{accumulate<kNone>, accumulate<kPlain>, accumulate<kNesterov>}, search};
