// NVIDIA's cuda_fp4.h in device code: all float32 through its conversions of one number and of both of a pair.
//
// Built for a target without the suffix "a" (or for Hopper), where the header has no instruction to call and its own
// arithmetic is compiled for the GPU.
#include <cuda_fp4.h>

#include "models.cuh"
#include "sweep.cuh"

// Curve 0: __nv_cvt_float_to_fp4; 1 and 2: the x and the y of __nv_cvt_float2_to_fp4x2.
// 0x100 in a recorded code marks that the other of the pair was wrong, 0x200 bits above the nibble of one number.
struct Header {
  PORTABLE uint32_t curves() const { return 3; }
  PORTABLE uint32_t found(uint32_t curve, uint32_t x) const {
    if (curve == 0) {
      const uint32_t code = __nv_cvt_float_to_fp4(float_of(x), __NV_E2M1, cudaRoundNearest);
      return (code & 15) | (code > 15 ? 0x200 : 0);
    }
    const uint32_t other = scattered(x);
    float2 values;
    values.x = float_of(curve == 1 ? x : other);
    values.y = float_of(curve == 1 ? other : x);
    const uint32_t pair = __nv_cvt_float2_to_fp4x2(values, __NV_E2M1, cudaRoundNearest);
    const uint32_t low = pair & 15, high = pair >> 4;
    return (curve == 1 ? low : high) | ((curve == 1 ? high : low) == model::rn_e2m1(other) ? 0 : 0x100);
  }
  PORTABLE uint32_t expected(uint32_t, uint32_t x) const { return model::rn_e2m1(x); }
};

int main(int argc, char** argv) {
  Report report("fp4-header", argc, argv);
  const Counts counts =
      sweep(report, "runs.bin", Header{}, report.number("first", 0), report.number("count", 1ull << 32));
  return report.verdict(counts.compared, counts.different);
}
