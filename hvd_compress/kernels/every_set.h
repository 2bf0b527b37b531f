// The loops of the file HVD_LOOPS for every instruction set, each in another namespace, and the choice
// among them.  To be included once by a .cpp, in its own namespace, behind the struct Loops.

namespace baseline {
#include HVD_LOOPS
}

#if defined(HVD_DISPATCHES)
#pragma GCC push_options
#pragma GCC target("avx2,bmi2")
#define HVD_AVX2
namespace avx2 {
#include HVD_LOOPS
}
#undef HVD_AVX2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,bmi2")
#define HVD_AVX512
namespace avx512 {
#include HVD_LOOPS
}
#undef HVD_AVX512
#pragma GCC pop_options
#endif

// Those of an instruction set: 0, 1 or 2; -1 for the machine's best.
const Loops* loops_for(int set) {
#if defined(HVD_DISPATCHES)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && (set == 2 || set < 0)) return &avx512::loops;
  if (has_avx2 && (set == 1 || set < 0)) return &avx2::loops;
#endif
  return set <= 0 ? &baseline::loops : nullptr;
}

const Loops* loops = loops_for(-1);

// For tests: all sets have the same bits.
bool use_instructions(int set) {
  const auto* found = loops_for(set);
  if (found) loops = found;
  return found != nullptr;
}
