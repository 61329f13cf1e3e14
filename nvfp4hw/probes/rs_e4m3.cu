// cvt.rs.satfinite.e4m3x4.f32 (sm_100a, sm_103a): all float32 with 66 random words, and all 2^16 thresholds.
#include "stochastic.cuh"

struct Hardware : E4m3 {
  // PTX ISA, cvt: as for e2m1x4, with bytes for nibbles.
  PORTABLE static uint32_t quadruple(const uint32_t x[4], uint32_t word) {
#ifdef __CUDA_ARCH__
    uint32_t codes;
    asm("cvt.rs.satfinite.e4m3x4.f32 %0, {%1, %2, %3, %4}, %5;"
        : "=r"(codes)
        : "f"(float_of(x[3])), "f"(float_of(x[2])), "f"(float_of(x[1])), "f"(float_of(x[0])), "r"(word));
    return codes;
#else
    return simulated_quadruple<E4m3>(x, word);
#endif
  }
};

int main(int argc, char** argv) {
  Report report("rs-e4m3", argc, argv);
  const Counts counts = sweep_stochastic<Hardware>(report, "runs.bin", "thresholds.bin");
  return report.verdict(counts.compared, counts.different);
}
