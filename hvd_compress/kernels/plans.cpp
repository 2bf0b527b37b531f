// What an allreduce of a small array repeats, without the interpreter between its steps; see
// mpi/dense/plans.py.  MPI is called by the addresses of the functions that mpi4py uses, so this is
// compiled without an MPI and serves any of them.

#include <pybind11/stl.h>
#include <sched.h>

#include <chrono>
#include <stdexcept>

#include "common.h"

namespace {

using Address = std::uintptr_t;

using Clock = std::chrono::steady_clock;

constexpr int kPatience = 20;  // looks at one wait before other processes may have the core
// From there on, since each look may then take a time slice of every process that is ready.
constexpr std::chrono::milliseconds kLongest{20};

// Handles are integers in some MPIs and pointers in others, so they are bytes here.  Calls return
// 0 if they succeed.  A datatype that is an integer is passed as a pointer's lower half, which is the
// same register.
struct Functions {
  int (*startall)(int, void*);
  int (*testall)(int, void*, int*, void*);
  int (*get_count)(const void*, void*, int*);
};

template <class T>
T function_at(Address address) {
  return reinterpret_cast<T>(address);
}

// A list of steps, which are run in order.  Some are left to the caller.
class Program {
 public:
  Program(const std::vector<Address>& functions, Address byte, std::size_t handle,
          std::size_t status)
      : handle_(handle), status_(status) {
    if (functions.size() != 3 || !byte || handle == 0 || handle > sizeof byte_ || status == 0)
      throw std::invalid_argument("MPI_Startall, MPI_Testall, MPI_Get_count, and sizes of handles");
    std::memcpy(&byte_, reinterpret_cast<const void*>(byte), handle);
    mpi_.startall = function_at<decltype(mpi_.startall)>(functions[0]);
    mpi_.testall = function_at<decltype(mpi_.testall)>(functions[1]);
    mpi_.get_count = function_at<decltype(mpi_.get_count)>(functions[2]);
  }

  // Requests are given by the addresses of their handles.
  void start(const std::vector<Address>& requests) {
    Step step{kStart};
    step.handles = handles_of(requests);
    step.count = static_cast<int>(requests.size());
    steps_.push_back(std::move(step));
  }

  // Wait for requests, whose messages shall have `sizes` bytes; -1 is for any.  If one has not, or
  // MPI reports an error, run() stops here, and the statuses are at these addresses.
  void wait(const std::vector<Address>& requests, const std::vector<int>& sizes,
            const std::vector<Address>& statuses) {
    if (sizes.size() != requests.size() || statuses.size() != requests.size())
      throw std::invalid_argument("as many sizes and statuses as requests");
    Step step{kWait};
    step.handles = handles_of(requests);
    step.count = static_cast<int>(requests.size());
    step.sizes = sizes;
    step.statuses = statuses;
    step.found.resize(status_ * requests.size());
    steps_.push_back(std::move(step));
  }

  // out = (x + y) / by, or x / by if y is 0: addresses of n floats of `itemsize` bytes.
  void compute(Address out, Address x, Address y, double by, Index n, int itemsize) {
    if (itemsize != 4 && itemsize != 8) throw std::invalid_argument("float32 or float64");
    Step step{kCompute};
    step.out = out, step.x = x, step.y = y, step.by = by, step.n = n, step.itemsize = itemsize;
    steps_.push_back(std::move(step));
  }

  // A step that the caller takes.
  void leave() { steps_.push_back(Step{kLeave}); }

  // Run the steps from `first` on, and return the number of the step that is left to the caller:
  // one of its own, or a wait that has failed or is not over after so many looks, or kLongest; that
  // of the steps at the end.
  int run(int first, int looks) {
    py::gil_scoped_release release;
    failed_ = false;
    error_ = 0;
    const int end = static_cast<int>(steps_.size());
    for (int i = std::max(first, 0); i < end; ++i)
      if (!take(steps_[i], looks)) return i;
    return end;
  }

  bool failed() const { return failed_; }
  int error() const { return error_; }

 private:
  enum Kind { kLeave, kStart, kWait, kCompute };

  struct Step {
    Kind kind;
    std::vector<char> handles{}, found{};
    std::vector<int> sizes{};
    std::vector<Address> statuses{};
    Address out = 0, x = 0, y = 0;
    double by = 1;
    Index n = 0;
    int count = 0, itemsize = 0;
  };

  std::vector<char> handles_of(const std::vector<Address>& requests) const {
    std::vector<char> handles(handle_ * requests.size());
    for (std::size_t i = 0; i < requests.size(); ++i)
      std::memcpy(&handles[i * handle_], reinterpret_cast<const void*>(requests[i]), handle_);
    return handles;
  }

  bool take(Step& step, int looks) {
    switch (step.kind) {
      case kStart:
        error_ = mpi_.startall(step.count, step.handles.data());
        failed_ = error_ != 0;
        return !failed_;
      case kWait:
        return await(step, looks);
      case kCompute:
        step.itemsize == 4 ? reduce<float>(step) : reduce<double>(step);
        return true;
      case kLeave:
        break;
    }
    return false;
  }

  bool await(Step& step, int looks) {
    Clock::time_point end{};
    for (int look = 0; look < looks; ++look) {
      int done = 0;
      error_ = mpi_.testall(step.count, step.handles.data(), &done, step.found.data());
      if (error_ || (done && !all_arrived(step))) return fail(step);
      if (done) return true;
      if (look < kPatience) continue;
      if (look == kPatience) end = Clock::now() + kLongest;
      sched_yield();
      if (Clock::now() > end) return false;
    }
    return false;
  }

  bool all_arrived(const Step& step) const {
    for (int i = 0; i < step.count; ++i) {
      int bytes = -1;
      if (step.sizes[i] < 0) continue;
      if (mpi_.get_count(&step.found[i * status_], byte_, &bytes) || bytes != step.sizes[i])
        return false;
    }
    return true;
  }

  bool fail(const Step& step) {
    failed_ = true;
    for (int i = 0; i < step.count; ++i)
      std::memcpy(reinterpret_cast<void*>(step.statuses[i]), &step.found[i * status_], status_);
    return false;
  }

  template <class T>
  static void reduce(const Step& step) {
    T* out = reinterpret_cast<T*>(step.out);
    const T *x = reinterpret_cast<const T*>(step.x), *y = reinterpret_cast<const T*>(step.y);
    if (y)
      // Of two NaNs the first is left, as in NumPy; a compiler may take the operands in any order.
      for (Index i = 0; i < step.n; ++i) out[i] = x[i] != x[i] ? x[i] + T(0) : x[i] + y[i];
    else if (x != out && step.n)
      std::memmove(out, x, static_cast<std::size_t>(step.n) * sizeof(T));
    if (step.by != 1)
      for (Index i = 0; i < step.n; ++i) out[i] /= static_cast<T>(step.by);
  }

  std::size_t handle_, status_;
  void* byte_ = nullptr;  // the datatype
  Functions mpi_{};
  std::vector<Step> steps_;
  bool failed_ = false;
  int error_ = 0;
};

}  // namespace

void add_plans(py::module_& m) {
  py::class_<Program>(m, "Program")
      .def(py::init<const std::vector<Address>&, Address, std::size_t, std::size_t>())
      .def("start", &Program::start)
      .def("wait", &Program::wait)
      .def("compute", &Program::compute)
      .def("leave", &Program::leave)
      .def("run", &Program::run)
      .def_property_readonly("failed", &Program::failed)
      .def_property_readonly("error", &Program::error);
}
