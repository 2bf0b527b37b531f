// Codes chunk by chunk: what a code of n numbers is, for loops that do more to a chunk while it is in
// the processor's caches than to code it.  T is float or double.

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


// The code of n numbers.  Chunks are whole bytes of it, and of short runs whole ones.
template <class T>
class Chunks {
 public:
  const Index n, chunk;    // elements, of all and of a chunk
  const Index taken;       // of a chunk that is decoded
  const bool heads_first;  // they are of more than a chunk, and decoding a chunk needs them

  Chunks(Index n, Index chunk, Index taken, bool heads_first)
      : n(n), chunk(chunk), taken(taken), heads_first(heads_first) {}
  virtual ~Chunks() = default;

  // Call work(start, stop) for all chunks.
  template <class Work>
  void by_chunks(int threads, const Work& work) const {
    by(chunk, threads, work);
  }
  // The same of those that are decoded.
  template <class Work>
  void by_taken(int threads, const Work& work) const {
    by(taken, threads, work);
  }

  // Look at a chunk of x, all chunks of which make the heads.
  virtual void look(const T*, Index, Index) {}
  // Write the heads of x, of which all chunks were looked at.
  virtual void put_heads(const T*, std::uint8_t*, int) const {}
  // Write the code of a chunk of x, with its heads unless these come first.
  virtual void put(const T* x, Index start, Index stop, std::uint8_t* out) const = 0;
  // Write the values of a chunk, times a sign, to `out`, or add them.
  virtual void get(const std::uint8_t* code, Index start, Index stop, int sign, bool add,
                   bool streamed, T* out) const = 0;
  virtual void encode(const T* x, std::uint8_t* out, int threads) {
    if (heads_first) put_heads(x, out, threads);
    by_chunks(threads, [&](Index start, Index stop) { put(x, start, stop, out); });
  }

  void decode(const std::uint8_t* code, int sign, bool add, T* out, int threads) const {
    const bool streamed = n * static_cast<Index>(sizeof(T)) > kStreamed;
    by_taken(threads, [&](Index start, Index stop) {
      get(code, start, stop, sign, add, streamed, out + start);
      fence();
    });
  }

 private:
  template <class Work>
  void by(Index length, int threads, const Work& work) const {
    parallel(pieces(n, length), threads,
             [&](Index c) { work(c * length, std::min(n, (c + 1) * length)); });
  }
};

// What a code is, whatever it is made of.
struct Code {
  virtual ~Code() = default;
  virtual Index bytes(Index n, Index itemsize) const = 0;
  virtual bool draws() const { return false; }
  virtual std::unique_ptr<Chunks<float>> chunks(float, Index n, const Draws& draws) const = 0;
  virtual std::unique_ptr<Chunks<double>> chunks(double, Index n, const Draws& draws) const = 0;
};

template <class Own>
struct CodeOf : Code {
  std::unique_ptr<Chunks<float>> chunks(float, Index n, const Draws& draws) const override {
    return made<float>(n, draws);
  }
  std::unique_ptr<Chunks<double>> chunks(double, Index n, const Draws& draws) const override {
    return made<double>(n, draws);
  }

 private:
  template <class T>
  std::unique_ptr<Chunks<T>> made(Index n, const Draws& draws) const {
    return std::make_unique<typename Own::template Of<T>>(static_cast<const Own&>(*this), n, draws);
  }
};

// -- digits ---------------------------------------------------------------------------------------

template <class T>
class DigitChunks;

// A scale for each run of elements, then a digit for each element.
struct Digits : CodeOf<Digits> {
  template <class T>
  using Of = DigitChunks<T>;

  const Rule rule;
  const std::vector<double> table;  // what digits stand for; if it is empty, the digit less `zero`
  const std::vector<float> table32;
  const int zero;
  const double unit;  // of the scale

  Digits(Rule rule, std::vector<double> table, int zero, double unit)
      : rule(std::move(rule)), table(std::move(table)),
        table32(this->table.begin(), this->table.end()), zero(zero), unit(unit) {
    if (!this->table.empty() && static_cast<int>(this->table.size()) < this->rule.base)
      throw std::invalid_argument("no such rule");
  }
  Index heads(Index n) const { return rule.length ? pieces(n, rule.length) : n > 0; }
  Index bytes(Index n, Index itemsize) const override {
    return heads(n) * itemsize + Packing(rule.base).bytes(n);
  }
  bool draws() const override { return rule.kind != kLinear && rule.kind != kFloat8; }
  const float* values(float) const { return table32.empty() ? nullptr : table32.data(); }
  const double* values(double) const { return table.empty() ? nullptr : table.data(); }
};

template <class T>
class DigitChunks : public Chunks<T> {
 public:
  DigitChunks(const Digits& code, Index n, const Draws& draws)
      : DigitChunks(code, n, draws, code.rule.length ? code.rule.length : std::max<Index>(n, 1),
                    Packing(code.rule.base)) {}

  void put_heads(const T* x, std::uint8_t* out, int threads) const override {
    for (Index run = 0; run < pieces(n, length_); ++run) put_head(x, run, out, threads);
  }
  void put(const T* x, Index start, Index stop, std::uint8_t* out) const override {
    std::vector<std::uint8_t> digits(stop - start);
    std::uint64_t words[kDrawn / 2 + 16];
    float room[kDrawn];
    // Of a long run the head is there already.
    Index run = heads_first ? start / length_ : start / length_ - 1;
    Index end = heads_first ? (run + 1) * length_ : start;
    for (Index at = start; at < stop;) {
      const Index last = std::min(stop, at + kDrawn);
      const float* drawn = draws_.at(at, last - at, words, room);
      while (at < last) {
        if (at == end) {
          end = ++run * length_ + length_;
          if (!heads_first) put_head(x, run, out, 1);
        }
        const Index count = std::min(end, last) - at;
        loops->of(T()).quantise(code_.rule, x + at, count, stored<T>(out + run * sizeof(T)), drawn,
                                digits.data() + (at - start));
        at += count;
        if (drawn) drawn += count;
      }
    }
    packing_.pack(digits.data(), stop - start, packed(out) + packing_.bytes(start));
  }
  void get(const std::uint8_t* code, Index start, Index stop, int sign, bool add, bool streamed,
           T* out) const override {
    std::vector<std::uint8_t> digits(stop - start);
    packing_.unpack(packed(code) + packing_.bytes(start), stop - start, words_, digits.data());
    for (Index at = start; at < stop;) {
      const Index run = at / length_, end = std::min(stop, (run + 1) * length_);
      const T scale = stored<T>(code + run * sizeof(T)) / static_cast<T>(sign * code_.unit);
      loops->of(T()).from_digits[add](digits.data() + (at - start), end - at, code_.values(T()),
                                      code_.zero, scale, streamed, out + (at - start));
      at = end;
    }
  }

 private:
  using Chunks<T>::n;
  using Chunks<T>::heads_first;

  DigitChunks(const Digits& code, Index n, const Draws& draws, Index length, Packing packing)
      : Chunks<T>(n, chunk_of(length, packing.unit()), chunk_of(1, packing.unit()),
                  chunk_of(length, packing.unit()) % length),
        code_(code), draws_(draws), length_(length), packing_(packing),
        words_(code.rule.base, packing.each ? packing.each : 1) {}

  void put_head(const T* x, Index run, std::uint8_t* out, int threads) const {
    const T* own = x + run * length_;
    const T head = head_of(code_.rule, own, std::min(length_, n - run * length_), threads);
    std::memcpy(out + run * sizeof(T), &head, sizeof(T));
  }
  template <class Byte>
  Byte* packed(Byte* code) const {
    return code + pieces(n, length_) * sizeof(T);
  }

  const Digits& code_;
  const Draws draws_;
  const Index length_;
  const Packing packing_;
  const Words words_;
};

// -- bits -----------------------------------------------------------------------------------------

template <class T>
class SignChunks;

// A bit an element, 1 where it is not negative, and the scale in front: the mean of a term of all
// elements, or its root; or none, where all know it.
struct Signs : CodeOf<Signs> {
  template <class T>
  using Of = SignChunks<T>;

  const int term;  // -1: the scale is `known`
  const double known;

  Signs(int term, double known) : term(term), known(known) {
    if (term != -1 && term != kMagnitude && term != kSquare)
      throw std::invalid_argument("no such scale");
  }
  Index bytes(Index n, Index itemsize) const override {
    return (term < 0 ? 0 : itemsize) + (n + 7) / 8;
  }
};

template <class T>
class SignChunks : public Chunks<T> {
 public:
  SignChunks(const Signs& code, Index n, const Draws&)
      : Chunks<T>(n, kTaken, kTaken, code.term >= 0), code_(code),
        sums_(code.term < 0 ? 0 : pieces(n, kSummed)) {}

  void look(const T* x, Index start, Index stop) override {
    if (!heads_first) return;
    for (Index at = start; at < stop; at += kSummed)
      sums_[at / kSummed] = loops->of(T()).sum[code_.term](x + at, std::min(kSummed, stop - at), 0);
  }
  void put_heads(const T*, std::uint8_t* out, int) const override {
    if (!heads_first) return;
    const auto count = static_cast<Index>(sums_.size());
    double scale = sum<double>(sums_.data(), count, kPlain, 0, 1) / std::max<Index>(n, 1);
    if (code_.term == kSquare) scale = std::sqrt(scale);
    const T head = static_cast<T>(scale);
    std::memcpy(out, &head, sizeof(T));
  }
  void put(const T* x, Index start, Index stop, std::uint8_t* out) const override {
    loops->of(T()).signs[kNotNegative][false](x + start, stop - start, bits(out) + start / 8);
  }
  void get(const std::uint8_t* code, Index start, Index stop, int sign, bool add, bool streamed,
           T* out) const override {
    const T scale = heads_first ? stored<T>(code) : static_cast<T>(code_.known);
    loops->of(T()).from_bits[add](bits(code), start, stop - start, false, sign < 0 ? scale : -scale,
                                  sign < 0 ? -scale : scale, streamed, out);
  }
  void encode(const T* x, std::uint8_t* out, int threads) override {  // bits do not need the scale
    this->by_chunks(threads, [&](Index start, Index stop) {
      look(x, start, stop);
      put(x, start, stop, out);
    });
    put_heads(x, out, threads);
  }

 private:
  using Chunks<T>::n;
  using Chunks<T>::heads_first;

  template <class Byte>
  Byte* bits(Byte* code) const {
    return code + (heads_first ? sizeof(T) : 0);
  }

  const Signs& code_;
  std::vector<double> sums_;  // of a term of every kSummed elements
};

template <class T>
class HalfChunks;

// The means of the elements of each run that are negative and of those that are not; and a bit an
// element.
struct Halves : CodeOf<Halves> {
  template <class T>
  using Of = HalfChunks<T>;

  const Index length;  // of a run; 0: all elements

  explicit Halves(Index length) : length(length) {
    if (length < 0) throw std::invalid_argument("no such length");
  }
  Index bytes(Index n, Index itemsize) const override {
    return 2 * (length ? pieces(n, length) : n > 0) * itemsize + (n + 7) / 8;
  }
};

template <class T>
class HalfChunks : public Chunks<T> {
 public:
  HalfChunks(const Halves& code, Index n, const Draws&)
      : HalfChunks(n, code.length ? code.length : std::max<Index>(n, 1)) {}

  void put_heads(const T* x, std::uint8_t* out, int threads) const override {
    for (Index run = 0; run < pieces(n, length_); ++run) put_head(x, run, out, threads);
  }
  void put(const T* x, Index start, Index stop, std::uint8_t* out) const override {
    if (!heads_first)
      for (Index run = start / length_; run * length_ < stop; ++run) put_head(x, run, out, 1);
    loops->of(T()).signs[kNotNegative][true](x + start, stop - start, bits(out) + start / 8);
  }
  void get(const std::uint8_t* code, Index start, Index stop, int sign, bool add, bool streamed,
           T* out) const override {
    for (Index at = start; at < stop;) {
      const Index run = at / length_, end = std::min(stop, (run + 1) * length_);
      T levels[2];
      std::memcpy(levels, code + 2 * run * sizeof(T), sizeof levels);
      if (sign < 0) levels[0] = -levels[0], levels[1] = -levels[1];
      loops->of(T()).from_bits[add](bits(code), at, end - at, true, levels[0], levels[1], streamed,
                                    out + (at - start));
      at = end;
    }
  }

 private:
  using Chunks<T>::n;
  using Chunks<T>::heads_first;

  HalfChunks(Index n, Index length)
      : Chunks<T>(n, chunk_of(length, 8), kTaken, chunk_of(length, 8) % length), length_(length) {}

  void put_head(const T* x, Index run, std::uint8_t* out, int threads) const {
    const T* part = x + run * length_;
    const Index count = std::min(length_, n - run * length_), blocks = pieces(count, kSummed);
    std::vector<double> low(blocks), high(blocks);
    std::atomic<Index> others{0};
    parallel(blocks, threads, [&](Index b) {
      const Index at = b * kSummed;
      others += loops->of(T()).halves(part + at, std::min(kSummed, count - at), &low[b], &high[b]);
    });
    const Index many = others, few = count - many;
    const double sums[2] = {sum(low.data(), blocks, kPlain, 0, 1),
                            sum(high.data(), blocks, kPlain, 0, 1)};
    const T levels[2] = {static_cast<T>(sums[0] / std::max<Index>(few, 1)),
                         static_cast<T>(sums[1] / std::max<Index>(many, 1))};
    std::memcpy(out + 2 * run * sizeof(T), levels, sizeof levels);
  }
  template <class Byte>
  Byte* bits(Byte* code) const {
    return code + 2 * pieces(n, length_) * sizeof(T);
  }

  const Index length_;
};

// -- natural compression --------------------------------------------------------------------------

template <class T>
class NaturalChunks;

// A byte an element, the exponent, and a bit, the sign.
struct Natural : CodeOf<Natural> {
  template <class T>
  using Of = NaturalChunks<T>;

  const bool biased;

  explicit Natural(bool biased) : biased(biased) {}
  Index bytes(Index n, Index) const override { return n + (n + 7) / 8; }
  bool draws() const override { return !biased; }
};

template <class T>
class NaturalChunks : public Chunks<T> {
 public:
  NaturalChunks(const Natural&, Index n, const Draws& draws)
      : Chunks<T>(n, kTaken, kTaken, false), draws_(draws) {}

  void put(const T* x, Index start, Index stop, std::uint8_t* out) const override {
    std::uint64_t words[kDrawn / 2 + 16];
    float room[kDrawn];
    for (Index at = start; at < stop; at += kDrawn) {
      const Index count = std::min(kDrawn, stop - at);
      loops->of(T()).natural(x + at, count, draws_.at(at, count, words, room), out + at);
      loops->of(T()).signs[kNegative][false](x + at, count, out + n + at / 8);
    }
  }
  void get(const std::uint8_t* code, Index start, Index stop, int sign, bool add, bool streamed,
           T* out) const override {
    const auto decode = loops->of(T()).from_natural[add && sign > 0];
    const std::uint8_t* const signs = code + n + start / 8;
    const Index count = stop - start;
    if (sign > 0) return decode(code + start, signs, count, streamed, out);
    T values[kTaken];
    decode(code + start, signs, count, false, values);
    for (Index i = 0; i < count; ++i) out[i] = add ? out[i] - values[i] : -values[i];
  }

 private:
  using Chunks<T>::n;

  const Draws draws_;
};
