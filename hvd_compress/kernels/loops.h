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

// The next residual of element i and, in `velocity`, the next velocity, before anything is sent; T is
// one number or several.
template <Momentum kind, class T>
INLINE T moved(const Tensor& t, Index i, float m, T& velocity) {
  const auto at = [i](const float* x) __attribute__((always_inline)) {
    T own;
    std::memcpy(&own, x + i, sizeof own);
    return own;
  };
  const T gradient = at(t.gradient);
  T direction = gradient;
  if constexpr (kind == kGiven) return gradient;
  if constexpr (kind == kPlain) {
    velocity = m * at(t.velocity);
    direction = velocity = velocity + gradient;
  } else if constexpr (kind == kNesterov) {
    velocity = at(t.velocity) + gradient;
    velocity = m * velocity;
    direction = velocity + gradient;
  }
  return direction + at(t.residual);
}

// Residuals first, first + stride, ...
template <Momentum kind>
void residuals(const Tensor& t, Index first, Index count, Index stride, float m, float* out) {
  float velocity;
  for (Index i = 0; i < count; ++i) out[i] = moved<kind, float>(t, first + i * stride, m, velocity);
}

// Write the next residual and velocity of element i where the old ones are, and keep these.
template <Momentum kind, class T>
INLINE void advance(const Tensor& t, Index i, T residual, T velocity) {
  const auto swap = [i](T now, float* state, float* kept) __attribute__((always_inline)) {
    T old;
    std::memcpy(&old, state + i, sizeof old);
    std::memcpy(kept + i, &old, sizeof old);
    std::memcpy(state + i, &now, sizeof now);
  };
  swap(residual, t.new_residual, t.kept_residual);
  if constexpr (kind == kPlain || kind == kNesterov)
    swap(velocity, t.new_velocity, t.kept_velocity);
}

// Find the residuals of elements start..stop-1 that have a magnitude of at least `least`, and the
// largest magnitude; and, if it `advances`, write the new states.
template <Momentum kind, bool advances>
void search(const Tensor& t, Index start, Index stop, float m, Bits least, Found& found) {
  Bits most = 0;
  Ints most_of_lanes = {};
  const std::int32_t below = least > kMagnitude ? kMagnitude : least - 1;
  for (Index at = start; at < stop; at += kBlock) {
    const Index n = std::min(kBlock, stop - at);
    float x[kBlock];
    if (n == kBlock) {
      Ints largest = {};
      Floats velocity;
      for (Index i = 0; i < kBlock; i += kLanes) {
        const Floats residual = moved<kind, Floats>(t, at + i, m, velocity);
        std::memcpy(x + i, &residual, sizeof residual);
        if constexpr (advances) advance<kind>(t, at + i, residual, velocity);
        const Ints bits = magnitudes(residual);
        largest = bits > largest ? bits : largest;
      }
      most_of_lanes = largest > most_of_lanes ? largest : most_of_lanes;
      if (!set_lanes(largest > below)) continue;
    } else {
      float velocity;
      for (Index i = 0; i < n; ++i) {
        x[i] = moved<kind, float>(t, at + i, m, velocity);
        if constexpr (advances) advance<kind>(t, at + i, x[i], velocity);
      }
      Bits largest = 0;
      for (Index i = 0; i < n; ++i) largest = std::max(largest, magnitude(x[i]));
      most = std::max(most, largest);
      if (largest < least) continue;
    }
    search_block(x, n, at - start, least, found);
  }
  found.largest = std::max(most, largest_lane(most_of_lanes));
}

// Write the next velocities and residuals of elements start..stop-1.
template <Momentum kind>
void settle(const Tensor& t, Index start, Index stop, float m) {
  const auto step = [&](Index i, auto velocity) __attribute__((always_inline)) {
    const auto residual = moved<kind>(t, i, m, velocity);
    if constexpr (kind == kPlain || kind == kNesterov)
      std::memcpy(t.new_velocity + i, &velocity, sizeof velocity);
    std::memcpy(t.new_residual + i, &residual, sizeof residual);
  };
  Index i = start;
  for (; i + kLanes <= stop; i += kLanes) step(i, Floats{});
  for (; i < stop; ++i) step(i, 0.0f);
}

const Loops loops{{search<kNone, false>, search<kPlain, false>, search<kNesterov, false>,
                   search<kGiven, false>},
                  {search<kNone, true>, search<kPlain, true>, search<kNesterov, true>},
                  {residuals<kNone>, residuals<kPlain>, residuals<kNesterov>, residuals<kGiven>},
                  {settle<kNone>, settle<kPlain>, settle<kNesterov>, settle<kGiven>}};
