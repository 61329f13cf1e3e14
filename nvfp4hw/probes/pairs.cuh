// Conversions of two float32 at a time: each must convert the same in both positions, whatever the other holds.
#pragma once

#include "models.cuh"
#include "sweep.cuh"

// Format: `bits` of a code, `pair(high, low)`, the instruction, and `model(x)`, what each half must be.
// Curve 0: the position whose code is the high half; curve 1: the low one.  The other operand is another float32.
// 0x100 in a recorded code marks that the other operand's code was wrong.
template <class Format>
struct Pairs {
  PORTABLE uint32_t curves() const { return 2; }
  PORTABLE uint32_t found(uint32_t curve, uint32_t x) const {
    const uint32_t other = scattered(x), mask = (1u << Format::bits) - 1;
    const uint32_t pair = curve == 0 ? Format::pair(x, other) : Format::pair(other, x);
    const uint32_t high = pair >> Format::bits & mask, low = pair & mask;
    return (curve == 0 ? high : low) | ((curve == 0 ? low : high) == Format::model(other) ? 0 : 0x100);
  }
  PORTABLE uint32_t expected(uint32_t, uint32_t x) const { return Format::model(x); }
};

template <class Format>
int sweep_pairs(const char* probe, int argc, char** argv) {
  Report report(probe, argc, argv);
  const Counts counts =
      sweep(report, "runs.bin", Pairs<Format>{}, report.number("first", 0), report.number("count", 1ull << 32));
  return report.verdict(counts.compared, counts.different);
}

// The simulation's pair: the model, or the model with the planted fault.
template <class Format>
uint32_t simulated_pair(uint32_t high, uint32_t low) {
  if (fault_is("swapped-operands")) return Format::model(low) << Format::bits | Format::model(high);
  const bool lost = fault_is("nan-zero") && model::magnitude(high) > model::INF;
  return (lost ? 0 : Format::model(high)) << Format::bits | Format::model(low);
}
