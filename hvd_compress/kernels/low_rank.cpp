// The loops of low-rank methods: products of matrices and thin factors, in one pass over memory.
// kernels/low_rank.py says in NumPy what each of them computes, bit for bit.

#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "common.h"

#define INLINED __attribute__((always_inline))

namespace {

constexpr Index kLanes = 16;
constexpr Index kSummed = 4096;  // elements of a row that are added up in one go
constexpr Index kRows = 256;     // rows that are added up in one go
constexpr Index kWide = 2048;    // columns of a row of sums that stay in the first-level cache
constexpr Index kTaken = 1 << 16;  // elements that a thread takes at a time, or a few more
constexpr float kTiny = 1e-30f;

// A matrix x of n rows and m columns, to which y is added; its factors, P^T and Q^T, of `rank` rows;
// where results go; and whether these go around the caches.
struct Matrix {
  Index n, m, rank;
  const float* x;
  float *y, *p, *q;
  const float* own;
  float *out, *sent;
  bool streamed;
};

struct Loops {
  bool (*left[2])(const Matrix&, Index, Index);
  void (*right)(const Matrix&, Index, Index);
  void (*settle)(const Matrix&, Index, Index);
  void (*unit)(const float*, float*, Index);
  void (*orthonormal)(float*, Index, Index);
};

#define HVD_LOOPS "low_rank.h"
#include "every_set.h"

using Table = Array<Index>;

// Matrices of these (rows, columns, rank), without memory.
std::vector<Matrix> matrices_of(const Table& dims) {
  if (dims.ndim() != 2 || dims.shape(1) != 3) throw std::invalid_argument("rows of three numbers");
  std::vector<Matrix> found(dims.shape(0));
  for (std::size_t t = 0; t < found.size(); ++t) {
    const Index* own = dims.data(t, 0);
    if (own[0] < 1 || own[1] < 1 || own[2] < 1) throw std::invalid_argument("an empty matrix");
    found[t] = {own[0], own[1], own[2]};
  }
  return found;
}

// Let a member of each matrix point to where its array is; an empty table: to nothing.
template <class Member>
void set(std::vector<Matrix>& all, Member member, const Table& addresses) {
  if (!addresses.size()) return;
  if (addresses.size() != static_cast<Index>(all.size()))
    throw std::invalid_argument("one address for each matrix");
  for (std::size_t t = 0; t < all.size(); ++t) {
    const Index at = addresses.data()[t];
    if (!at || at % alignof(float)) throw std::invalid_argument("an address that no float32 has");
    all[t].*member = reinterpret_cast<float*>(at);
  }
}

// The same for factors that are end to end, of as many columns as `width` says.
template <class Member, class Pointer>
void set(std::vector<Matrix>& all, Member member, Pointer at, Index size, Index Matrix::*width) {
  for (auto& each : all) {
    each.*member = at;
    at += each.rank * each.*width;
    size -= each.rank * each.*width;
  }
  if (size) throw std::invalid_argument("factors of another size");
}

// Run work(t, first, last) for pieces of about kTaken elements of all matrices; `extent` says how
// many lines of `length` elements one has, `step` of how many lines pieces are multiples.
template <class Work>
void in_pieces(const std::vector<Matrix>& all, Index Matrix::*extent, Index Matrix::*length,
               Index step, Index most, int threads, const Work& work) {
  struct Piece { Index t, first, last; };
  std::vector<Piece> pieces;
  for (std::size_t t = 0; t < all.size(); ++t) {
    Index lines = std::max<Index>(1, kTaken / (all[t].*length));
    lines = std::min(most, (lines + step - 1) / step * step);
    for (Index at = 0; at < all[t].*extent; at += lines)
      pieces.push_back({static_cast<Index>(t), at, std::min(all[t].*extent, at + lines)});
  }
  parallel(static_cast<Index>(pieces.size()), threads,
           [&](Index i) { work(pieces[i].t, pieces[i].first, pieces[i].last); });
}

Array<bool> left(const Table& dims, const Table& x, const Table& y, const Table& out,
                 const Array<float>& q, Array<float>& p, int threads) {
  auto all = matrices_of(dims);
  set(all, &Matrix::x, x);
  set(all, &Matrix::y, y);
  set(all, &Matrix::out, out);
  if (y.size() != out.size()) throw std::invalid_argument("a place for each sum");
  set(all, &Matrix::q, const_cast<float*>(q.data()), q.size(), &Matrix::m);
  set(all, &Matrix::p, p.mutable_data(), p.size(), &Matrix::n);
  const auto count = static_cast<Index>(all.size());
  Array<bool> fine(count);
  bool* is_fine = fine.mutable_data();
  {
    py::gil_scoped_release release;
    std::vector<std::atomic<bool>> finite(count);
    for (auto& each : finite) each = true;
    const auto own = loops->left[y.size() > 0];
    in_pieces(all, &Matrix::n, &Matrix::m, 1, std::numeric_limits<Index>::max(), threads,
              [&](Index t, Index first, Index last) {
                if (!own(all[t], first, last)) finite[t] = false;
              });
    for (Index t = 0; t < count; ++t) {
      is_fine[t] = finite[t];
      if (!is_fine[t])
        std::fill_n(all[t].p, all[t].rank * all[t].n, std::numeric_limits<float>::quiet_NaN());
    }
  }
  return fine;
}

void right(const Table& dims, const Table& x, const Array<float>& p, Array<float>& q,
           int threads) {
  auto all = matrices_of(dims);
  set(all, &Matrix::x, x);
  set(all, &Matrix::p, const_cast<float*>(p.data()), p.size(), &Matrix::n);
  set(all, &Matrix::q, q.mutable_data(), q.size(), &Matrix::m);
  py::gil_scoped_release release;
  in_pieces(all, &Matrix::m, &Matrix::n, kLanes * 64, kWide, threads,
            [&](Index t, Index first, Index last) { loops->right(all[t], first, last); });
}

void settle(const Table& dims, const Table& x, const Table& y, const Array<float>& p,
            const Array<float>& q, const Array<float>& own, const Table& out, const Table& sent,
            const Array<bool>& finite, int threads) {
  auto all = matrices_of(dims);
  if (finite.size() != static_cast<Index>(all.size()))
    throw std::invalid_argument("one flag for each matrix");
  set(all, &Matrix::x, x);
  set(all, &Matrix::y, y);
  set(all, &Matrix::p, const_cast<float*>(p.data()), p.size(), &Matrix::n);
  set(all, &Matrix::q, const_cast<float*>(q.data()), q.size(), &Matrix::m);
  set(all, &Matrix::own, own.data(), own.size(), &Matrix::m);
  set(all, &Matrix::out, out);
  set(all, &Matrix::sent, sent);
  Index elements = 0;
  for (const auto& each : all) elements += each.n * each.m;
  for (std::size_t t = 0; t < all.size(); ++t) {
    if (!finite.data()[t]) all[t].y = nullptr;
    all[t].streamed = elements * static_cast<Index>(sizeof(float)) > kStreamed;
  }
  py::gil_scoped_release release;
  in_pieces(all, &Matrix::n, &Matrix::m, 1, std::numeric_limits<Index>::max(), threads,
            [&](Index t, Index first, Index last) {
              loops->settle(all[t], first, last);
              fence();
            });
}

void unit(const std::vector<Index>& lengths, const Array<float>& rows, Array<float>& out) {
  Index left = rows.size();
  for (const Index n : lengths) left -= n;
  if (left || out.size() != rows.size()) throw std::invalid_argument("rows of another size");
  const float* from = rows.data();
  float* to = out.mutable_data();
  py::gil_scoped_release release;
  for (const Index n : lengths) {
    loops->unit(from, to, n);
    from += n;
    to += n;
  }
}

void orthonormal(const Table& shapes, Array<float>& rows, int threads) {
  if (shapes.ndim() != 2 || shapes.shape(1) != 2) throw std::invalid_argument("rows of two numbers");
  std::vector<float*> starts(shapes.shape(0));
  float* at = rows.mutable_data();
  for (std::size_t t = 0; t < starts.size(); ++t) {
    starts[t] = at;
    at += *shapes.data(t, 0) * *shapes.data(t, 1);
  }
  if (at != rows.data() + rows.size()) throw std::invalid_argument("rows of another size");
  const Index* own = shapes.data();
  py::gil_scoped_release release;
  parallel(static_cast<Index>(starts.size()), threads,
           [&](Index t) { loops->orthonormal(starts[t], own[2 * t], own[2 * t + 1]); });
}

}  // namespace

void add_low_rank(py::module_& m) {
  // What is written to is never a copy.
  const auto out = py::arg().noconvert();
  const py::arg in;
  m.def("left", left, in, in, in, in, in, out, in);
  m.def("right", right, in, in, in, out, in);
  m.def("settle", settle);
  m.def("unit", unit, in, in, out);
  m.def("orthonormal", orthonormal, in, out, in);
  m.def("use_instructions", use_instructions);
}
