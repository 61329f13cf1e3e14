// The random Hadamard transform of 16 elements on bfloat16 tensor cores: inputs, model and bookkeeping that the two
// programs share (mma.sync and tcgen05).
//
// Chunk c has 2^16 vectors of 16 bfloat16, all made from a hash of their place; its kind is c % 8.  Of the first
// `digested` chunks the results are kept as one 64-bit digest each, so that a CPU can recompute them; the rest is
// compared on the device only.
#pragma once

#include "models.cuh"
#include "report.cuh"

namespace rht {

constexpr uint32_t SIGNS = 0xD7E8;  // RHT-MATRIX: element i is negated where bit i is set
constexpr uint32_t VECTORS = 1u << 16;
constexpr uint32_t KINDS = 8;
constexpr uint32_t SAMPLED = 32;  // vectors of each of the first KINDS chunks whose sums are kept as they are

// Two neighbouring elements, 2 * pair in the low half.
PORTABLE uint32_t drawn(uint32_t chunk, uint32_t vector, uint32_t pair) {
  return hashed(hashed(chunk) ^ (vector << 3 | pair));
}

// A bfloat16 of the chunk's kind from 16 random bits: sign 15, eight bits 14..7 that choose the exponent, mantissa.
PORTABLE uint32_t element(uint32_t kind, uint32_t random) {
  const uint32_t kept = random & 0x807F, choice = random >> 7 & 0xFF;
  switch (kind) {
    case 0: return random & 0xFFFF;                                  // any pattern, NaN and Inf too
    case 1: return kept | (choice == 255 ? 127 : choice) << 7;       // any finite number
    case 2: return kept | (120 + choice % 8) << 7;                   // like a trained tensor
    case 3: return kept | (110 + choice % 32) << 7;                  // wider than what the sum keeps
    case 4: return kept | (118 + choice % 16) << 7;
    case 5: return kept | (choice % 16) << 7;                        // subnormal and just above
    case 6: return kept | (239 + choice % 16) << 7;                  // up to the largest: sums overflow
    default: return choice & 1 ? random & 0x8000 : (random & 0x8040) | (124 + choice % 8) << 7;  // zeros, cancellation
  }
}

PORTABLE uint32_t element_at(uint32_t chunk, uint32_t vector, uint32_t k) {
  const uint32_t random = drawn(chunk, vector, k / 2);
  return element(chunk % KINDS, k & 1 ? random >> 16 : random & 0xFFFF);
}

// Entry (k, j) of diag(s) H / 4 is negative.
PORTABLE bool negative(uint32_t k, uint32_t j) {
  uint32_t parity = k & j;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return ((parity ^ SIGNS >> k) & 1) != 0;
}

PORTABLE uint32_t matrix_entry(uint32_t k, uint32_t j) { return negative(k, j) ? 0xBE80 : 0x3E80; }  // -+ 1/4

// RHT-SUM and RHT-SPECIAL of one vector: its elements cut to 25 bits below the largest exponent, once for all sums.
struct Vector {
  int aligned[16];
  int exponent;  // of one unit of the sums
  bool nan, plus, minus;
  uint32_t infinite;  // bit k: element k is infinite

  PORTABLE void load(const uint32_t x[16], int fraction_bits = 25) {
    int largest = 1;
    nan = false;
    infinite = 0;
    for (int k = 0; k < 16; ++k) {
      const int e = static_cast<int>(x[k] >> 7 & 255);
      if (e == 255) {
        nan = nan || (x[k] & 127);
        infinite |= 1u << k;
      } else if (e > largest) {
        largest = e;
      }
    }
    for (int k = 0; k < 16; ++k) {
      const int e = static_cast<int>(x[k] >> 7 & 255);
      const int significand = static_cast<int>(e ? (x[k] & 127) | 128 : x[k] & 127);
      const int drop = largest - (e ? e : 1);
      const int size = drop > 31 ? 0 : (significand << (fraction_bits - 7)) >> drop;
      aligned[k] = x[k] >> 15 & 1 ? -size : size;
    }
    exponent = largest - 127 - fraction_bits - 2;  // 2^-2 is the matrix entry
    signs = 0;
    for (int k = 0; k < 16; ++k) signs |= (x[k] >> 15 & 1) << k;
  }

  // The float32 sum of output j.
  PORTABLE uint32_t sum(uint32_t j) const {
    if (nan) return model::NAN_WORD;
    if (infinite) {
      bool up = false, down = false;
      for (uint32_t k = 0; k < 16; ++k)
        if (infinite >> k & 1) ((signs >> k & 1) != 0) != negative(k, j) ? down = true : up = true;
      return up && down ? model::NAN_WORD : up ? model::INF : 0x80000000u | model::INF;
    }
    int total = 0;  // 16 terms below 2^26
    for (uint32_t k = 0; k < 16; ++k) total += negative(k, j) ? -aligned[k] : aligned[k];
    return model::cut_to_float(total, exponent);
  }

  uint32_t signs;
};

// Weight of output j of a vector in its chunk's digest: odd, so that one changed word changes the digest.
PORTABLE uint64_t weight(uint32_t vector, uint32_t j) {
  const uint32_t place = vector * 16 + j;
  return static_cast<uint64_t>(hashed(place)) << 32 | hashed(~place) | 1;
}

struct Wrong {
  uint32_t chunk, vector, j, found, expected;
};

struct Tally {
  unsigned long long* counts;   // sums that differ, bfloat16 that differ
  unsigned long long* digests;  // one a digested chunk
  uint32_t* samples;            // (KINDS, SAMPLED, 16)
  Wrong* wrong;
  uint32_t digested;
};

constexpr uint32_t WRONG_KEPT = 64;

// One result held to the model and booked; the digest's term is returned.
PORTABLE uint64_t booked(const Tally& tally, uint32_t chunk, uint32_t vector, uint32_t j, uint32_t sum,
                         uint32_t rounded, uint32_t expected) {
  if (sum != expected) {
    const unsigned long long slot = add_shared(tally.counts, 1);
    if (slot < WRONG_KEPT) tally.wrong[slot] = Wrong{chunk, vector, j, sum, expected};
  }
  if (rounded != model::to_bfloat16(expected)) add_shared(tally.counts + 1, 1);
  if (chunk < KINDS && vector < SAMPLED) tally.samples[(chunk * SAMPLED + vector) * 16 + j] = sum;
  return (static_cast<uint64_t>(rounded) << 32 | sum) * weight(vector, j);
}

// The float32 sum as cvt.rn.bf16.f32 rounds it.
PORTABLE uint32_t rounded(uint32_t sum) {
#ifdef __CUDA_ARCH__
  uint16_t half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(float_of(sum)));
  return half;
#else
  return model::to_bfloat16(sum);
#endif
}

// The simulation: the model, or the model with the planted fault.
inline void simulate(uint32_t first, uint32_t chunks, Tally tally) {
  const int fraction_bits = fault_is("24-bits") ? 24 : 25;
  for (uint32_t chunk = first; chunk < first + chunks; ++chunk)
    for (uint32_t vector = 0; vector < VECTORS; ++vector) {
      uint32_t x[16];
      for (uint32_t k = 0; k < 16; ++k) x[k] = element_at(chunk, vector, k);
      Vector expected, found;
      expected.load(x);
      if (fault_is("dropped-product")) x[7] = 0;
      found.load(x, fraction_bits);
      uint64_t digest = 0;
      for (uint32_t j = 0; j < 16; ++j)
        digest += booked(tally, chunk, vector, j, found.sum(j), rounded(found.sum(j)), expected.sum(j));
      if (chunk < tally.digested) add_shared(tally.digests + chunk, digest);
    }
}

// Runs `launch(first chunk, chunks, tally)` over everything and reports.
template <class Launch>
int run(Report& report, Launch launch) {
  const uint32_t digested = static_cast<uint32_t>(report.number("digested", 128));
  const uint32_t chunks = static_cast<uint32_t>(report.number("chunks", 4096));
  std::vector<unsigned long long> counts(2, 0), digests(digested, 0);
  std::vector<uint32_t> samples(KINDS * SAMPLED * 16, 0);
  std::vector<Wrong> wrong(WRONG_KEPT, Wrong{});
  const Tally tally{on_device(counts), on_device(digests), on_device(samples), on_device(wrong), digested};
  for (uint32_t first = 0; first < chunks; first += 64) launch(first, chunks - first < 64 ? chunks - first : 64, tally);
  from_device(counts, tally.counts);
  from_device(digests, tally.digests);
  from_device(samples, tally.samples);
  from_device(wrong, tally.wrong);
  report.say("chunks %u %u", digested, chunks);
  report.file("digests.bin", digests);
  report.file("samples.bin", samples);
  report.say("rounded %llu", counts[1]);
  for (unsigned long long i = 0; i < counts[0] && i < 8; ++i)
    report.say("counterexample chunk %u vector %u output %u found 0x%08X expected 0x%08X", wrong[i].chunk,
               wrong[i].vector, wrong[i].j, wrong[i].found, wrong[i].expected);
  return report.verdict(static_cast<unsigned long long>(chunks) * VECTORS * 16, counts[0] + counts[1]);
}

}  // namespace rht
