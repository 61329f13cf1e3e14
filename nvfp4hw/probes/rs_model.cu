// The stochastic rules in software on this GPU, where it has no instruction for them: the carry rule in integers,
// held on the device against thresholds in float32, and Transformer Engine's 8-bit fallback against a plain sum.
// The record holds the GPU's codes against the oracle on a CPU.
#include "stochastic.cuh"

// The carry rule as what is under test (`single` of the format); the statement of thresholds as what it must be.
template <class Format>
struct Software : Format {
  static constexpr bool alone = true;

#ifndef __CUDACC__
  static uint32_t single(uint32_t x, uint32_t field) {
    if (fault_is("nan-zero") && model::magnitude(x) > model::INF) return 0;
    return Format::single(x, field == 0x8000 && fault_is("one-less") ? 0x7FFF : field);
  }
#endif

  // The largest code whose threshold |x| has reached: value + gap * (2^16 - field) / 2^16, exact in float32.
  PORTABLE static uint32_t model(uint32_t x, uint32_t field) {
    const uint32_t u = model::magnitude(x);
    if (u > model::INF) return Format::last | (Format::bits == 8);  // 7, 0x7F
    const float part = static_cast<float>(65536 - field) * (1.0f / 65536);
    uint32_t code = 0;
    for (uint32_t bit = Format::bits == 4 ? 4 : 64; bit; bit >>= 1) {
      const uint32_t next = code | bit;
      if (next <= Format::last && float_of(u) >= Format::value(next - 1) + Format::gap(next - 1) * part) code = next;
    }
    return code | model::sign_at(x, Format::bits - 1);
  }
};

// SR-FALLBACK: element i gets byte i; t = fma(byte / 256, step, |x|), limited to 6, cut to the grid.
struct Fallback : E2m1 {
  static constexpr bool alone = true;
  PORTABLE static uint32_t cut(float t) { return model::e2m1_position(bits_of(t)) >> 16; }
  PORTABLE static float step(float magnitude) { return magnitude < 2 ? 0.5f : magnitude < 4 ? 1.0f : 2.0f; }
  PORTABLE static uint32_t field(uint32_t word, int element) { return word >> (8 * element) & 255; }
  PORTABLE static uint32_t single(uint32_t x, uint32_t byte) {
    const float m = float_of(model::magnitude(x));
    if (!(m <= float_of(model::INF))) return 7;
#ifdef __CUDA_ARCH__
    const float t = __fmaf_rn(static_cast<float>(byte) * (1.0f / 256), step(m), m);
#else
    const float t = m + static_cast<float>(byte) * (1.0f / 256) * step(m);  // the product is exact
#endif
    return cut(t) | model::sign_at(x, 3);
  }
  PORTABLE static uint32_t model(uint32_t x, uint32_t byte) {
    const float m = float_of(model::magnitude(x));
    if (!(m <= float_of(model::INF))) return 7;
    return cut(m + static_cast<float>(byte) * (1.0f / 256) * step(m)) | model::sign_at(x, 3);
  }
};

int main(int argc, char** argv) {
  Report report("rs-model", argc, argv);
  const Counts e2m1 = sweep_stochastic<Software<E2m1>>(report, "e2m1.bin", "e2m1-thresholds.bin");
  const Counts e4m3 = sweep_stochastic<Software<E4m3>>(report, "e4m3.bin", "e4m3-thresholds.bin");
  const Counts fallback = sweep(report, "fallback.bin", Patterns<Fallback>{}, report.number("first", 0),
                                report.number("count", 1ull << 32));
  return report.verdict(e2m1.compared + e4m3.compared + fallback.compared,
                        e2m1.different + e4m3.different + fallback.different);
}
