// cvt.rn.satfinite.e4m3x2.f32 (sm_89 and later): all float32, in both operand positions.
#include "pairs.cuh"

struct E4m3 {
  static constexpr int bits = 8;
  PORTABLE static uint32_t model(uint32_t x) { return model::rn_e4m3(x); }

  // PTX ISA, cvt: a becomes the upper half of d, b the lower.
  PORTABLE static uint32_t pair(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(float_of(a)), "f"(float_of(b)));
    return codes;
#else
    return simulated_pair<E4m3>(a, b);
#endif
  }
};

int main(int argc, char** argv) { return sweep_pairs<E4m3>("rn-e4m3", argc, argv); }
