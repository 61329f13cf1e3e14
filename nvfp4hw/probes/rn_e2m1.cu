// cvt.rn.satfinite.e2m1x2.f32 (sm_100a, sm_103a, sm_110a, sm_120a, sm_121a): all float32, in both operand positions.
#include "pairs.cuh"

struct E2m1 {
  static constexpr int bits = 4;
  PORTABLE static uint32_t model(uint32_t x) { return model::rn_e2m1(x); }

  // PTX ISA, cvt: "d = {convert(a), convert(b)}", a in the upper half.
  PORTABLE static uint32_t pair(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint16_t codes;
    asm("{\n .reg .b8 pair;\n cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n mov.b16 %0, {pair, 0};\n}"
        : "=h"(codes)
        : "f"(float_of(a)), "f"(float_of(b)));
    return codes;
#else
    return simulated_pair<E2m1>(a, b);
#endif
  }
};

int main(int argc, char** argv) { return sweep_pairs<E2m1>("rn-e2m1", argc, argv); }
