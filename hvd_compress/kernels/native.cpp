// The hot loops of hvd_compress.kernels; reference.py says in NumPy what each of them computes.
//
// Loops are written for the compiler to vectorise, and compiled for several instruction sets, of
// which the machine's best is taken when the module is loaded.  Products and sums are never
// contracted (-ffp-contract=off), since results must be those of NumPy, bit for bit.

#include <pybind11/stl.h>

#include <functional>
#include <stdexcept>

#include "common.h"

namespace {

constexpr Index kBlock = 128;           // elements that stay in the first-level cache
constexpr Index kChunk = 256 * kBlock;  // elements that a thread takes at a time
constexpr Bits kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNaN = 0x7fc00000;

INLINE Bits bits_of(float x) {
  Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Magnitudes are compared as integers, which orders them as numbers and puts NaN above all.
INLINE Bits magnitude(float x) { return bits_of(x) & kMagnitude; }

INLINE float number(Bits bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

float* floats_at(Index address, bool is_used = true) {
  if (address % alignof(float) || (is_used && !address))
    throw std::invalid_argument("an address that no float32 has");
  return reinterpret_cast<float*>(address);
}

// -- search and states ----------------------------------------------------------------------------

enum Momentum { kNone, kPlain, kNesterov, kGiven };  // the last one: residuals are the gradients

struct Tensor {
  const float *gradient, *velocity, *residual;
  float *new_velocity, *new_residual, *kept_velocity, *kept_residual;
  Index n, k;
};

struct Candidate {
  Bits place, bits;  // place within the chunk
};

struct Found {
  std::vector<Candidate> candidates;
  Bits largest = 0;
};

using Search = void (*)(const Tensor&, Index, Index, float, Bits, Found&);

struct Loops {  // by Momentum
  Search search[4], advance[3];
  void (*residuals[4])(const Tensor&, Index, Index, Index, float, float*);
  void (*settle[4])(const Tensor&, Index, Index, float);
};

#define HVD_LOOPS "loops.h"
#include "every_set.h"

class Selection {
 public:
  Selection(const std::vector<Index>& sizes, const std::vector<Index>& counts)
      : tensors_(sizes.size()), predictions_(sizes.size()) {
    if (sizes.size() != counts.size()) throw std::invalid_argument("one count for each size");
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      const Index n = sizes[t], k = counts[t];
      if (k < 1 || k > n || n > UINT32_MAX)
        throw std::invalid_argument("counts must be from 1 to the sizes, and these below 2**32");
      tensors_[t].n = n;
      tensors_[t].k = k;
      first_chunks_.push_back(chunks_.size());
      offsets_.push_back(elements_);
      first_entries_.push_back(entries_);
      for (Index start = 0; start < n; start += kChunk)
        chunks_.push_back({static_cast<Index>(t), start, std::min(start + kChunk, n), {}});
      elements_ += n;
      entries_ += k;
    }
    first_chunks_.push_back(chunks_.size());
  }

  // See Selection.select of reference.py; `addresses` and `sizes`, in elements, have a row of seven
  // arrays for each tensor.
  py::tuple select(const Array<Index>& addresses, const Array<Index>& sizes, int kind,
                   const Array<float>& momenta, int threads) {
    if (kind < kNone || kind > kGiven) throw std::invalid_argument("no such momentum");
    if (momenta.size() != static_cast<Index>(tensors_.size()))
      throw std::invalid_argument("one momentum for each tensor");
    kind_ = looks_ = kind;
    momenta_.assign(momenta.data(), momenta.data() + momenta.size());
    set_memory(addresses, sizes);
    Array<Index> indices(entries_);
    Array<float> values(entries_);
    py::array_t<bool> finite(static_cast<Index>(tensors_.size()));
    auto* places = indices.mutable_data();
    auto* chosen = values.mutable_data();
    auto* good = finite.mutable_data();
    {
      py::gil_scoped_release release;
      const Search first = keeps_ ? loops->advance[kind_] : loops->search[kind_];
      parallel(static_cast<Index>(chunks_.size()), threads, [&](Index c) {
        search(chunks_[c], predictions_[chunks_[c].tensor].threshold, first);
      });
      if (keeps_) {  // what is looked at from here on are the new residuals, as they are
        looks_ = kGiven;
        for (auto& tensor : tensors_) tensor.gradient = tensor.new_residual;
      }
      parallel(static_cast<Index>(tensors_.size()), elements_ > kChunk ? threads : 1,
               [&](Index t) {
                 good[t] = choose(t, places + first_entries_[t], chosen + first_entries_[t]);
               });
    }
    return py::make_tuple(indices, values, finite);
  }

  // See Selection.settle of reference.py.
  void settle(const Array<Index>& addresses, const Array<Index>& sizes,
              const Array<Index>& indices, const Array<float>& remaining, bool masking,
              const Array<bool>& finite, int threads) {
    if (momenta_.empty() || kind_ == kGiven) throw std::invalid_argument("no step has begun");
    set_memory(addresses, sizes);
    if (indices.size() != entries_ || remaining.size() != entries_)
      throw std::invalid_argument("one number for each entry");
    if (finite.size() != static_cast<Index>(tensors_.size()))
      throw std::invalid_argument("one flag for each tensor");
    const Index* at = indices.data();
    const float* left = remaining.data();
    const bool* fine = finite.data();
    for (std::size_t t = 0; t < tensors_.size(); ++t)
      for (Index i = 0; i < tensors_[t].k; ++i) {
        const Index place = at[first_entries_[t] + i] - offsets_[t];
        if (place < 0 || place >= tensors_[t].n)
          throw std::invalid_argument("an index out of range");
      }
    py::gil_scoped_release release;
    parallel(static_cast<Index>(chunks_.size()), threads, [&](Index c) {
      const Chunk& chunk = chunks_[c];
      if (fine[chunk.tensor] && !keeps_)
        loops->settle[kind_](tensors_[chunk.tensor], chunk.start, chunk.stop,
                             momenta_[chunk.tensor]);
    });
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      if (!fine[t]) continue;
      for (Index i = first_entries_[t]; i < first_entries_[t] + tensors_[t].k; ++i) {
        tensors_[t].new_residual[at[i] - offsets_[t]] = left[i];
        if (masking && kind_ != kNone) tensors_[t].new_velocity[at[i] - offsets_[t]] = 0;
      }
    }
  }

 private:
  struct Chunk {
    Index tensor, start, stop;
    Found found;
  };
  // Of the next step's smallest chosen magnitude.  A prediction that is too high costs a second
  // search, one that is too low more candidates.
  struct Prediction {
    Bits threshold = UINT32_MAX;
    float last = 0, margin = 0.95f;
  };

  void set_memory(const Array<Index>& addresses, const Array<Index>& sizes) {
    const Index count = static_cast<Index>(tensors_.size());
    for (const auto* table : {&addresses, &sizes})
      if (table->ndim() != 2 || table->shape(0) != count || table->shape(1) != 7)
        throw std::invalid_argument("addresses and sizes of seven arrays of each tensor");
    const bool has_velocities = kind_ == kPlain || kind_ == kNesterov, is_given = kind_ == kGiven;
    keeps_ = count && *addresses.data(0, 6);
    for (Index t = 0; t < count; ++t) {
      const auto at = [&](int i, bool is_used) {
        if (*addresses.data(t, i) && *sizes.data(t, i) != tensors_[t].n)
          throw std::invalid_argument("an array of " + std::to_string(*sizes.data(t, i)) +
                                      " elements where a tensor has " +
                                      std::to_string(tensors_[t].n));
        return floats_at(*addresses.data(t, i), is_used);
      };
      Tensor& tensor = tensors_[t];
      tensor.gradient = at(0, true);
      tensor.velocity = at(1, has_velocities);
      tensor.residual = at(2, !is_given);
      tensor.new_velocity = at(3, has_velocities);
      tensor.new_residual = at(4, !is_given);
      tensor.kept_velocity = at(5, keeps_ && has_velocities);
      tensor.kept_residual = at(6, keeps_);
      if (keeps_ && (is_given || tensor.new_residual != tensor.residual ||
                     (has_velocities && tensor.new_velocity != tensor.velocity)))
        throw std::invalid_argument("old states are kept where new ones take their place");
    }
  }

  void search(Chunk& chunk, Bits least, Search loop) {
    chunk.found.candidates.clear();
    loop(tensors_[chunk.tensor], chunk.start, chunk.stop, momenta_[chunk.tensor], least,
         chunk.found);
  }

  // A magnitude that about `wanted` of the elements reach, by a sample of them.
  Bits sampled_threshold(Index t, Index wanted, std::vector<Bits>& sample,
                         std::vector<float>& x) const {
    const Index n = tensors_[t].n;
    Index stride = std::max<Index>(1, std::min<Index>(n / 4096, wanted / 16));
    stride -= stride % 2 == 0;  // an odd stride does not keep step with rows of even length
    x.resize(pieces(n, stride));
    const Index size = static_cast<Index>(x.size());
    loops->residuals[looks_](tensors_[t], 0, size, stride, momenta_[t], x.data());
    sample.clear();
    for (const float own : x) sample.push_back(magnitude(own));
    const auto at = sample.begin() + std::min(size - 1, wanted * size / n);
    std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
    return *at;
  }

  // Write the k elements of largest magnitude of one tensor, ascending, of equal ones the first;
  // false if not all elements are finite.
  bool choose(Index t, Index* places, float* values) {
    const Tensor& tensor = tensors_[t];
    Chunk* const first = chunks_.data() + first_chunks_[t];
    Chunk* const last = chunks_.data() + first_chunks_[t + 1];
    const Index k = tensor.k, offset = offsets_[t];
    Bits largest = 0;
    for (auto* chunk = first; chunk != last; ++chunk)
      largest = std::max(largest, chunk->found.largest);
    if (largest >= kInfinity) {
      for (Index i = 0; i < k; ++i) {
        places[i] = offset + i;
        values[i] = number(kNaN);
      }
      return false;
    }
    Prediction& prediction = predictions_[t];
    std::vector<Bits> magnitudes, sample;
    std::vector<float> sampled;
    const auto collect = [&] {
      magnitudes.clear();
      for (auto* chunk = first; chunk != last; ++chunk)
        for (const auto& candidate : chunk->found.candidates)
          magnitudes.push_back(candidate.bits & kMagnitude);
      return static_cast<Index>(magnitudes.size()) >= k;
    };
    // All elements of at least this magnitude are candidates.
    Bits least = largest == 0 ? 1 : prediction.threshold;
    bool predicted = true;
    for (Index wanted = k + k / 4 + 16; !collect(); wanted *= 4) {
      if (least <= 1) {
        fill_up(t, k - static_cast<Index>(magnitudes.size()), places, values);
        predict(prediction, 0, true, false);
        return true;
      }
      predicted = false;
      least = 1;
      if (wanted < tensor.n)
        least = std::max(least, sampled_threshold(t, wanted, sample, sampled));
      for (auto* chunk = first; chunk != last; ++chunk)
        search(*chunk, least, loops->search[looks_]);
    }
    const auto kth = magnitudes.begin() + (k - 1);
    std::nth_element(magnitudes.begin(), kth, magnitudes.end(), std::greater<>());
    const Bits threshold = *kth;
    Index ties = std::count(magnitudes.begin(), kth + 1, threshold);
    for (auto* chunk = first; chunk != last; ++chunk) {
      for (const auto& candidate : chunk->found.candidates) {
        const Bits bits = candidate.bits & kMagnitude;
        if (bits < threshold || (bits == threshold && ties-- <= 0)) continue;
        *places++ = offset + chunk->start + candidate.place;
        *values++ = number(candidate.bits);
      }
    }
    predict(prediction, number(threshold), predicted,
            static_cast<Index>(magnitudes.size()) > k + k / 2 + 16);
    return true;
  }

  // Write all elements that are not zero, which are the candidates, and the first `zeros` others.
  void fill_up(Index t, Index zeros, Index* places, float* values) {
    std::vector<float> residuals(std::min(kChunk, tensors_[t].n));
    for (auto c = first_chunks_[t]; c < first_chunks_[t + 1]; ++c) {
      const Chunk& chunk = chunks_[c];
      const Index count = chunk.stop - chunk.start;
      loops->residuals[looks_](tensors_[t], chunk.start, count, 1, momenta_[t], residuals.data());
      const float* const x = residuals.data() - chunk.start;
      const auto put = [&](Index i) {
        *places++ = offsets_[t] + i;
        *values++ = x[i];
      };
      auto next = chunk.found.candidates.begin();
      for (Index i = chunk.start; zeros && i < chunk.stop; ++i) {
        put(i);
        if (magnitude(x[i])) ++next; else --zeros;
      }
      for (; next != chunk.found.candidates.end(); ++next) put(chunk.start + next->place);
    }
  }

  static void predict(Prediction& prediction, float now, bool predicted, bool too_low) {
    if (!predicted && prediction.last > 0)
      prediction.margin = std::max(0.7f, prediction.margin * 0.95f);
    else if (too_low)
      prediction.margin = std::min(0.99f, prediction.margin * 1.01f);
    const float change =
        prediction.last > 0 ? std::min(1.5f, std::max(0.67f, now / prediction.last)) : 1.0f;
    prediction.threshold = std::max<Bits>(1, magnitude(now * change * prediction.margin));
    prediction.last = now;
  }

  int kind_ = kNone;            // and momenta, those of the step
  int looks_ = kNone;           // of what residuals are made now
  bool keeps_ = false;          // the old states, where new ones are written at once
  std::vector<float> momenta_;
  std::vector<Tensor> tensors_;
  std::vector<Prediction> predictions_;
  std::vector<Chunk> chunks_;
  std::vector<Index> offsets_;  // of each tensor's first element, all end to end
  std::vector<std::size_t> first_chunks_, first_entries_;
  Index elements_ = 0, entries_ = 0;
};

// -- adding up ------------------------------------------------------------------------------------

struct Entries {
  const Index* indices;
  const float* values;
  Index count;
};

// Elements start..stop-1 of the mean, of which all entries' indices are given.
void add_window(const std::vector<Entries>& ranks, Index offset, float* out, float size) {
  for (const auto& own : ranks)
    for (Index i = 0; i < own.count; ++i) out[own.indices[i] - offset] += own.values[i];
  if (size == 1) return;
  // Each sum is divided once, with the last of its entries: those of earlier ranks leave it alone.
  std::vector<Index> next(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::fill(next.begin(), next.end(), 0);
    for (Index i = 0; i < ranks[r].count; ++i) {
      const Index at = ranks[r].indices[i];
      bool divided = false;
      for (std::size_t q = 0; q < r && !divided; ++q) {
        while (next[q] < ranks[q].count && ranks[q].indices[next[q]] < at) ++next[q];
        divided = next[q] < ranks[q].count && ranks[q].indices[next[q]] == at;
      }
      if (!divided) out[at - offset] /= size;
    }
  }
}

// See add_up of reference.py; `addresses` of the results, one for each tensor.
void add_up(const Array<Index>& addresses, const std::vector<Index>& sizes,
            const std::vector<Array<Index>>& indices, const std::vector<Array<float>>& values,
            float size, int threads) {
  const Index count = static_cast<Index>(sizes.size());
  if (addresses.size() != count || indices.size() != values.size())
    throw std::invalid_argument("one address for each size, and values for each rank's indices");
  Index elements = 0;
  std::vector<Index> offsets;
  for (const Index n : sizes) {
    offsets.push_back(elements);
    elements += n;
  }
  std::vector<float*> results;
  for (Index t = 0; t < count; ++t) results.push_back(floats_at(addresses.data()[t], sizes[t] > 0));
  std::vector<Entries> ranks;
  for (std::size_t r = 0; r < indices.size(); ++r) {
    ranks.push_back({indices[r].data(), values[r].data(), indices[r].size()});
    if (values[r].size() != indices[r].size()) throw std::invalid_argument("a value an index");
    for (Index i = 0; i < ranks[r].count; ++i)
      if (ranks[r].indices[i] <= (i ? ranks[r].indices[i - 1] : -1) ||
          ranks[r].indices[i] >= elements)
        throw std::invalid_argument("indices must be ascending and in range");
  }
  py::gil_scoped_release release;
  parallel(count, elements > kChunk ? threads : 1, [&](Index t) {
    float* const out = results[t];
    std::memset(out, 0, sizes[t] * sizeof(float));
    std::vector<Entries> own;
    for (const auto& rank : ranks) {
      const auto* end = rank.indices + rank.count;
      const auto* start = std::lower_bound(rank.indices, end, offsets[t]);
      const auto* stop = std::lower_bound(start, end, offsets[t] + sizes[t]);
      own.push_back({start, rank.values + (start - rank.indices), stop - start});
    }
    add_window(own, offsets[t], out, size);
  });
}

// See merge of reference.py.
py::tuple merge(const std::vector<Array<Index>>& indices, const std::vector<Array<float>>& values,
                float size) {
  if (indices.size() != values.size()) throw std::invalid_argument("values for each rank's indices");
  std::vector<Index> places, more_places;
  std::vector<float> total, more;
  {
    py::gil_scoped_release release;
    for (std::size_t r = 0; r < indices.size(); ++r) {
      const Index count = indices[r].size();
      if (values[r].size() != count) throw std::invalid_argument("a value an index");
      const Index* at = indices[r].data();
      const float* value = values[r].data();
      more_places.clear();
      more.clear();
      std::size_t have = 0;
      for (Index i = 0; i < count; ++i) {
        if (i && at[i] <= at[i - 1]) throw std::invalid_argument("indices must be ascending");
        while (have < places.size() && places[have] < at[i]) {
          more_places.push_back(places[have]);
          more.push_back(total[have++]);
        }
        const bool known = have < places.size() && places[have] == at[i];
        more_places.push_back(at[i]);
        more.push_back(known ? total[have++] + value[i] : 0.0f + value[i]);
      }
      more_places.insert(more_places.end(), places.begin() + have, places.end());
      more.insert(more.end(), total.begin() + have, total.end());
      places.swap(more_places);
      total.swap(more);
    }
    if (size != 1)
      for (float& x : total) x /= size;
  }
  return py::make_tuple(Array<Index>(places.size(), places.data()),
                        Array<float>(total.size(), total.data()));
}

// -- Rice codes -----------------------------------------------------------------------------------

// Unsigned, since sums of gaps that no tensor has would overflow.
std::uint64_t checked(Index gap) {
  if (gap < 0) throw std::invalid_argument("indices must be ascending");
  return static_cast<std::uint64_t>(gap);
}

Index quotients(const Array<Index>& gaps, int b) {
  if (b < 0 || b > 48) throw std::invalid_argument("b must be from 0 to 48");
  const Index* gap = gaps.data();
  std::uint64_t total = 0;
  for (Index i = 0; i < gaps.size(); ++i) total += checked(gap[i]) >> b;
  return static_cast<Index>(total);
}

void rice_pack(const Array<Index>& gaps, int b, Array<std::uint8_t>& out) {
  const Index count = gaps.size(), split = (count * b + 7) / 8;
  const auto fits = [](bool fits) {
    if (!fits) throw std::invalid_argument("no room for the code");
  };
  fits(b >= 0 && b <= 48 && out.size() >= split);
  const Index* gap = gaps.data();
  std::uint8_t* fields = out.mutable_data();
  std::uint8_t* unary = fields + split;
  const std::uint64_t room = 8 * static_cast<std::uint64_t>(out.size() - split);
  std::uint64_t waiting = 0, place = 0;
  int bits = 0;
  for (Index i = 0; i < count; ++i) {
    const std::uint64_t own = checked(gap[i]);
    waiting |= (own & ((std::uint64_t{1} << b) - 1)) << bits;
    for (bits += b; bits >= 8; bits -= 8, waiting >>= 8) *fields++ = waiting & 0xff;
    place += own >> b;
    fits(place < room);
    unary[place / 8] |= 1 << place % 8;
    ++place;
  }
  if (bits) *fields = waiting & 0xff;
}

Array<Index> rice_unpack(const Array<std::uint8_t>& code, Index count, int b, Index n) {
  if (b < 0 || b > 48 || count < 1 || count > n)
    throw std::invalid_argument("packed indices without a valid parameter");
  const Index split = (count * b + 7) / 8, size = code.size();
  const auto wrong = [&] {
    return std::invalid_argument("packed indices that are not " + std::to_string(count));
  };
  if (size < split || count > 8 * (size - split)) throw wrong();
  const std::uint8_t *fields = code.data(), *unary = fields + split;
  const Index words = size - split;
  Array<Index> indices(count);
  Index* out = indices.mutable_data();
  const auto outside = [&] {
    return std::invalid_argument("indices that are not ascending within 0.." +
                                 std::to_string(n - 1));
  };
  std::uint64_t waiting = 0;
  int bits = 0;
  Index found = 0, last = -1, end = 0;
  for (Index word = 0; word < words; ++word) {
    for (unsigned byte = unary[word]; byte; byte &= byte - 1) {
      if (found == count) throw wrong();
      const Index one = 8 * word + __builtin_ctz(byte);
      for (; bits < b; bits += 8) waiting |= static_cast<std::uint64_t>(*fields++) << bits;
      const Index field = waiting & ((std::uint64_t{1} << b) - 1);
      waiting >>= b;
      bits -= b;
      const Index quotient = one - end;
      end = one + 1;
      if (quotient > (n >> b)) throw outside();
      last += (quotient << b) + field + 1;
      if (last >= n) throw outside();
      out[found++] = last;
    }
  }
  if (found != count || 8 * words - end >= 64) throw wrong();
  return indices;
}

// -- Elias codes ----------------------------------------------------------------------------------

int log2_of(std::uint64_t x) { return 63 - __builtin_clzll(x); }

// See index_bits of reference.py.
py::tuple index_bits(const Array<Index>& gaps, int b) {
  if (b < 1 || b > 47) throw std::invalid_argument("b must have neighbours");
  const Index* gap = gaps.data();
  const Index count = gaps.size();
  std::uint64_t below = 0, at = 0, above = 0;
  Index lengths[64] = {};
  for (Index i = 0; i < count; ++i) {
    const std::uint64_t own = checked(gap[i]);
    below += own >> (b - 1);
    at += own >> b;
    above += own >> (b + 1);
    ++lengths[log2_of(own + 1)];
  }
  Index gamma = 0, delta = 0;
  for (int length = 0; length < 64; ++length) {
    gamma += lengths[length] * (2 * length + 1);
    delta += lengths[length] * (length + 2 * log2_of(length + 1) + 1);
  }
  return py::make_tuple(below, at, above, gamma, delta);
}

class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* out) : out_(out) {}
  void put(std::uint64_t value, int width) {  // of at most 56 bits
    waiting_ |= (value & ((std::uint64_t{1} << width) - 1)) << bits_;
    for (bits_ += width; bits_ >= 8; bits_ -= 8, waiting_ >>= 8) *out_++ = waiting_ & 0xff;
  }
  void finish() {
    if (bits_) *out_ = waiting_ & 0xff;
  }

 private:
  std::uint8_t* out_;
  std::uint64_t waiting_ = 0;
  int bits_ = 0;
};

class BitReader {
 public:
  BitReader(const std::uint8_t* at, const std::uint8_t* end) : at_(at), end_(end) {}
  std::uint64_t get(int width) {
    while (bits_ < width) fill();
    const std::uint64_t value = waiting_ & ((std::uint64_t{1} << width) - 1);
    waiting_ >>= width;
    bits_ -= width;
    return value;
  }
  int zeros() {  // before the next one, which is read as well
    int found = 0;
    while (!waiting_) {
      found += bits_;
      bits_ = 0;
      if (found > 48) throw std::invalid_argument("packed indices that are too large");
      fill();
    }
    const int more = __builtin_ctzll(waiting_);
    waiting_ >>= more + 1;
    bits_ -= more + 1;
    if (found + more > 48) throw std::invalid_argument("packed indices that are too large");
    return found + more;
  }
  const std::uint8_t* next() const { return at_ - bits_ / 8; }  // the first byte not begun

 private:
  void fill() {
    if (at_ == end_) throw std::invalid_argument("packed indices that end too early");
    waiting_ |= static_cast<std::uint64_t>(*at_++) << bits_;
    bits_ += 8;
  }
  const std::uint8_t *at_, *end_;
  std::uint64_t waiting_ = 0;
  int bits_ = 0;
};

// See elias_pack of reference.py.
void elias_pack(const Array<Index>& gaps, bool nested, Array<std::uint8_t>& out) {
  const Index* gap = gaps.data();
  const Index count = gaps.size();
  Index unary = count, inner = 0, outer = 0;
  for (Index i = 0; i < count; ++i) {
    const int length = log2_of(checked(gap[i]) + 1), width = nested ? log2_of(length + 1) : length;
    unary += width;
    inner += nested ? width : 0;
    outer += length;
  }
  const Index second = (unary + 7) / 8, third = second + (inner + 7) / 8;
  if (out.size() < third + (outer + 7) / 8) throw std::invalid_argument("no room for the code");
  BitWriter first(out.mutable_data()), lengths(out.mutable_data() + second),
      fields(out.mutable_data() + third);
  for (Index i = 0; i < count; ++i) {
    const std::uint64_t own = checked(gap[i]) + 1;
    const int length = log2_of(own), width = nested ? log2_of(length + 1) : length;
    first.put(std::uint64_t{1} << width, width + 1);
    if (nested) lengths.put(length + 1, width);
    fields.put(own, length);
  }
  first.finish();
  lengths.finish();
  fields.finish();
}

// See elias_unpack of reference.py.
Array<Index> elias_unpack(const Array<std::uint8_t>& code, Index count, bool nested, Index n) {
  if (count < 1 || count > n || count > 8 * code.size())
    throw std::invalid_argument("packed indices that are not " + std::to_string(count));
  const std::uint8_t* end = code.data() + code.size();
  std::vector<std::uint8_t> length(count);
  BitReader first(code.data(), end);
  for (auto& each : length) each = first.zeros();
  const std::uint8_t* next = first.next();
  if (nested) {
    BitReader lengths(next, end);
    for (auto& each : length) {
      if (each > 5) throw std::invalid_argument("packed indices that are too large");
      each = (1 << each | lengths.get(each)) - 1;
    }
    next = lengths.next();
  }
  BitReader fields(next, end);
  Array<Index> indices(count);
  Index* out = indices.mutable_data();
  Index last = -1;
  for (Index i = 0; i < count; ++i) {
    if (length[i] > 48) throw std::invalid_argument("packed indices that are too large");
    last += Index{1} << length[i] | static_cast<Index>(fields.get(length[i]));
    if (last >= n)
      throw std::invalid_argument("indices that are not ascending within 0.." +
                                  std::to_string(n - 1));
    out[i] = last;
  }
  if (end - fields.next() > 7)
    throw std::invalid_argument("packed indices that are not " + std::to_string(count));
  return indices;
}

// What a step cannot do without: read three arrays, write two of them.  For benchmarks.
void stream(const Array<Index>& addresses, const std::vector<Index>& sizes, int threads) {
  if (addresses.ndim() != 2 || addresses.shape(0) != static_cast<Index>(sizes.size()) ||
      addresses.shape(1) != 3)
    throw std::invalid_argument("addresses of three arrays of each tensor");
  py::gil_scoped_release release;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    const auto at = [&](int i) { return floats_at(*addresses.data(t, i)); };
    const float* __restrict g = at(0);
    float* __restrict u = at(1);
    float* __restrict v = at(2);
    parallel(pieces(sizes[t], kChunk), threads, [&](Index c) {
      const Index stop = std::min(sizes[t], (c + 1) * kChunk);
      for (Index i = c * kChunk; i < stop; ++i) {
        u[i] = 0.5f * u[i] + g[i];
        v[i] += u[i];
      }
    });
  }
}

}  // namespace

void add_checksum(py::module_& m);  // of checksum.cpp
void add_codecs(py::module_& m);    // of codecs.cpp
void add_halves(py::module_& m);    // of halves.cpp
void add_low_rank(py::module_& m);  // of low_rank.cpp

PYBIND11_MODULE(native, m) {
  m.attr("INTERFACE") = kInterface;
  py::class_<Selection>(m, "Selection")
      .def(py::init<const std::vector<Index>&, const std::vector<Index>&>())
      .def("select", &Selection::select)
      .def("settle", &Selection::settle);
  m.def("use_instructions", use_instructions);
  m.def("add_up", add_up);
  m.def("merge", merge);
  m.def("quotients", quotients);
  m.def("index_bits", index_bits);
  m.def("elias_pack", elias_pack, py::arg(), py::arg(), py::arg().noconvert());
  m.def("elias_unpack", elias_unpack);
  m.def("rice_pack", rice_pack, py::arg(), py::arg(), py::arg().noconvert());
  m.def("rice_unpack", rice_unpack);
  m.def("stream", stream);
  add_checksum(m);
  auto codecs = m.def_submodule("codecs");
  add_codecs(codecs);
  auto halves = m.def_submodule("halves");
  add_halves(halves);
  auto low_rank = m.def_submodule("low_rank");
  add_low_rank(low_rank);
}
