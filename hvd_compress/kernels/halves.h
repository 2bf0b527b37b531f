// Half precisions to float32 and back.  halves.cpp includes this once for every instruction set,
// each time in another namespace.  Eight elements are a step.

typedef float Floats __attribute__((vector_size(32)));
typedef std::int32_t Ints __attribute__((vector_size(32)));
typedef std::uint32_t Words __attribute__((vector_size(32)));
typedef std::uint16_t Halves __attribute__((vector_size(16)));

INLINE Ints bits_of(Floats x) { return reinterpret_cast<Ints>(x); }

// The nearest half, of two equally near ones the even one, in the lower half of each lane.
template <Form form>
INLINE Ints narrowed(Floats x) {
  const Ints bits = bits_of(x), size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
  if constexpr (form == kBfloat16) {
    const Words words = reinterpret_cast<Words>(size);  // of a NaN the sum may have 32 bits
    const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    return size > kInfinity ? Ints{} + 0x7fc0 : reinterpret_cast<Ints>(rounded) | sign;
  }
  // Below 2^-14 halves are multiples of 2^-24, to which a sum with 1/2 is rounded.
  const Ints small = bits_of(reinterpret_cast<Floats>(size) + 0.5f) - 0x3f000000;
  const Ints normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  Ints rounded = size < 0x38800000 ? small : normal;
  rounded = size < 0x47800000 ? rounded : Ints{} + 0x7c00;
  return (size > kInfinity ? Ints{} + 0x7e00 : rounded) | sign;
}

template <Form form>
INLINE Floats widened(Ints half) {
  if constexpr (form == kBfloat16) return reinterpret_cast<Floats>(half << 16);
  const Ints size = (half & 0x7fff) << 13, exponent = size & 0x0f800000;
  const Ints normal = size + 0x38000000;
  const Ints small = bits_of(reinterpret_cast<Floats>(normal + 0x800000) - 0x1p-14f);
  const Ints found = exponent == 0            ? small
                     : exponent == 0x0f800000 ? normal + 0x38000000
                                              : normal;
  return reinterpret_cast<Floats>(found | (half & 0x8000) << 16);
}

// Copy up to eight elements, with a size that compilers know where it is eight.
template <class T>
INLINE void move(void* to, const void* from, Index count) {
  std::memcpy(to, from, count == 8 ? 8 * sizeof(T) : count * sizeof(T));
}

template <Form form>
void narrow(const float* x, Index n, std::uint16_t* out) {
  for (Index i = 0; i < n; i += 8) {
    const Index count = std::min<Index>(8, n - i);
    Floats own = {};
    move<float>(&own, x + i, count);
    const Halves found = __builtin_convertvector(narrowed<form>(own), Halves);
    move<std::uint16_t>(out + i, &found, count);
  }
}

template <Form form, bool add>
void widen(const std::uint16_t* x, Index n, float* out) {
  for (Index i = 0; i < n; i += 8) {
    const Index count = std::min<Index>(8, n - i);
    Halves own = {};
    move<std::uint16_t>(&own, x + i, count);
    Floats found = widened<form>(__builtin_convertvector(own, Ints)), before = {};
    if constexpr (add) {
      move<float>(&before, out + i, count);
      found = before + found;
    }
    move<float>(out + i, &found, count);
  }
}

const Loops loops{{narrow<kFloat16>, narrow<kBfloat16>},
                  {{widen<kFloat16, false>, widen<kFloat16, true>},
                   {widen<kBfloat16, false>, widen<kBfloat16, true>}}};
