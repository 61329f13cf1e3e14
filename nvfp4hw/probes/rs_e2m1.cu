// cvt.rs.satfinite.e2m1x4.f32 (sm_100a, sm_103a): all float32 with 66 random words, and all 2^16 thresholds.
#include "stochastic.cuh"

struct Hardware : E2m1 {
  // PTX ISA, cvt: d[15:12] = a, d[11:8] = b, d[7:4] = e, d[3:0] = f of {a, b, e, f}; so x[i] is element i.
  PORTABLE static uint32_t quadruple(const uint32_t x[4], uint32_t word) {
#ifdef __CUDA_ARCH__
    uint16_t codes;
    asm("cvt.rs.satfinite.e2m1x4.f32 %0, {%1, %2, %3, %4}, %5;"
        : "=h"(codes)
        : "f"(float_of(x[3])), "f"(float_of(x[2])), "f"(float_of(x[1])), "f"(float_of(x[0])), "r"(word));
    return codes;
#else
    return simulated_quadruple<E2m1>(x, word);
#endif
  }
};

int main(int argc, char** argv) {
  Report report("rs-e2m1", argc, argv);
  const Counts counts = sweep_stochastic<Hardware>(report, "runs.bin", "thresholds.bin");
  return report.verdict(counts.compared, counts.different);
}
