// float16 and bfloat16, as their bits, to float32 and back; see backends/halves.py.  Without the
// machine's own instructions for float16, which differ in what becomes of a NaN.

#include <stdexcept>

#include "common.h"

namespace {

constexpr Index kTaken = 16384;  // elements that a thread takes at a time
constexpr std::int32_t kInfinity = 0x7f800000;

enum Form { kFloat16, kBfloat16 };

struct Loops {
  void (*narrow[2])(const float*, Index, std::uint16_t*);    // by Form
  void (*widen[2][2])(const std::uint16_t*, Index, float*);  // by Form, and whether to add
};

#define HVD_LOOPS "halves.h"
#include "every_set.h"

template <class From, class To, class Work>
void by_parts(const Array<From>& x, Array<To>& out, int threads, const Work& work) {
  const Index n = x.size();
  if (out.size() != n) throw std::invalid_argument("arrays of other sizes");
  const From* from = x.data();
  To* to = out.mutable_data();
  py::gil_scoped_release release;
  parallel((n + kTaken - 1) / kTaken, threads, [&](Index c) {
    const Index start = c * kTaken;
    work(from + start, std::min(kTaken, n - start), to + start);
  });
}

void narrow(const Array<float>& x, bool brain, Array<std::uint16_t>& out, int threads) {
  by_parts(x, out, threads, loops->narrow[brain]);
}

void widen(const Array<std::uint16_t>& x, bool brain, Array<float>& out, bool add, int threads) {
  by_parts(x, out, threads, loops->widen[brain][add]);
}

}  // namespace

void add_halves(py::module_& m) {
  m.def("narrow", narrow, py::arg().noconvert(), py::arg(), py::arg().noconvert(), py::arg());
  m.def("widen", widen, py::arg().noconvert(), py::arg(), py::arg().noconvert(), py::arg(),
        py::arg());
  m.def("use_instructions", use_instructions);
}
