// The oracle's rules once more, in integers, for comparison on the device: no library cast, no rounding mode.
// Ids are those of docs/spec.md.  `bits` is a float32 pattern, `u` one without its sign.
#pragma once

#include "portable.cuh"

namespace model {

constexpr uint32_t INF = 0x7F800000u;
constexpr uint32_t NAN_WORD = 0x7FFFFFFFu;  // NAN-CANONICAL

PORTABLE uint32_t magnitude(uint32_t bits) { return bits & 0x7FFFFFFFu; }
PORTABLE uint32_t sign_at(uint32_t bits, int position) { return (bits >> 31) << position; }

// E2M1-RNE, -SATURATE, -NAN, -ZERO: how many of the seven decision points |x| has reached.
PORTABLE uint32_t rn_e2m1(uint32_t bits) {
  const uint32_t u = magnitude(bits);
  if (u > INF) return 7;
  // 0.25 < , 0.75 <=, 1.25 <, 1.75 <=, 2.5 <, 3.5 <=, 5 <: a tie goes to the even code
  const uint32_t code = (u >= 0x3E800001u) + (u >= 0x3F400000u) + (u >= 0x3FA00001u) + (u >= 0x3FE00000u) +
                        (u >= 0x40200001u) + (u >= 0x40600000u) + (u >= 0x40A00001u);
  return code | sign_at(bits, 3);
}

// Significand with its hidden bit and the biased exponent that goes with it: value = significand * 2^(exponent - 150).
struct Unpacked {
  uint32_t significand;
  int exponent;
};

PORTABLE Unpacked unpacked(uint32_t u) {
  const int e = static_cast<int>(u >> 23);
  const uint32_t fraction = u & 0x7FFFFFu;
  return e ? Unpacked{fraction | 0x800000u, e} : Unpacked{fraction, 1};
}

PORTABLE uint32_t shifted_right(uint32_t x, int places) { return places > 31 ? 0 : x >> places; }

constexpr uint32_t E4M3_MIN_NORMAL = 0x3C800000u;  // 2^-6
constexpr uint32_t REBASE = 120u << 23;            // from float32's exponent bias to E4M3's

// E4M3-RNE, -SATURATE, -NAN.
PORTABLE uint32_t rn_e4m3(uint32_t bits) {
  const uint32_t u = magnitude(bits);
  if (u > INF) return 0x7F;
  uint32_t code;
  if (u >= E4M3_MIN_NORMAL) {
    const uint32_t t = u - REBASE;
    code = (t + 0x7FFFFu + (t >> 20 & 1)) >> 20;
  } else {  // a step is 2^-9
    const Unpacked x = unpacked(u);
    const int places = 141 - x.exponent;  // 21 and more
    const uint32_t whole = shifted_right(x.significand, places);
    const uint32_t half = places > 31 ? 0 : 1u << (places - 1);
    const uint32_t rest = places > 31 ? 0 : x.significand & ((1u << places) - 1);
    code = whole + (half && (rest > half || (rest == half && (whole & 1))));
  }
  return (code < 0x7E ? code : 0x7E) | sign_at(bits, 7);
}

// Place on the E2M1 grid in units of 2^-16 of a step, cut off; 7 << 16 from 6 up.
PORTABLE uint32_t e2m1_position(uint32_t u) {
  if (u >= 0x40C00000u) return 7u << 16;
  const Unpacked x = unpacked(u);
  if (x.exponent < 128) return shifted_right(x.significand, 133 - x.exponent);  // below 2 a step is 1/2
  return (x.exponent == 128 ? 4u << 16 : 6u << 16) + ((x.significand & 0x7FFFFFu) >> 6);
}

// Place on the E4M3 grid in the same units, not limited.
PORTABLE uint32_t e4m3_position(uint32_t u) {
  if (u >= E4M3_MIN_NORMAL) return (u - REBASE) >> 4;
  const Unpacked x = unpacked(u);
  return shifted_right(x.significand, 125 - x.exponent);
}

// SR-SM100 and SR-E4M3 given the element's 16 random bits: a carry out of the fraction rounds away from zero.
PORTABLE uint32_t rs_e2m1(uint32_t bits, uint32_t field) {
  const uint32_t u = magnitude(bits);
  if (u > INF) return 7;
  const uint32_t code = (e2m1_position(u) + field) >> 16;
  return (code < 7 ? code : 7) | sign_at(bits, 3);
}

PORTABLE uint32_t rs_e4m3(uint32_t bits, uint32_t field) {
  const uint32_t u = magnitude(bits);
  if (u > INF) return 0x7F;
  const uint32_t code = (e4m3_position(u) + field) >> 16;
  return (code < 0x7E ? code : 0x7E) | sign_at(bits, 7);
}

PORTABLE uint32_t reversed16(uint32_t field) {
  uint32_t out = 0;
  for (int i = 0; i < 16; ++i) out |= (field >> i & 1) << (15 - i);
  return out;
}

// Which 16 bits of a word an element gets.  E2M1: bytes 0 and 2 for elements 0 and 1, bytes 1 and 3 for 2 and 3;
// E4M3: the low half and the high half.  The second element of a pair sees them reversed.
PORTABLE uint32_t field_e2m1(uint32_t word, int element) {
  const uint32_t pair = element < 2 ? word : word >> 8;
  const uint32_t field = (pair & 0xFF) | (pair >> 8 & 0xFF00);
  return element & 1 ? reversed16(field) : field;
}

PORTABLE uint32_t field_e4m3(uint32_t word, int element) {
  const uint32_t field = element < 2 ? word & 0xFFFF : word >> 16;
  return element & 1 ? reversed16(field) : field;
}

// The word whose straight fields (elements 0 and 2) are `first` and `second`.
PORTABLE uint32_t word_e2m1(uint32_t first, uint32_t second) {
  return (first & 0xFF) | (second & 0xFF) << 8 | (first >> 8) << 16 | (second >> 8) << 24;
}

PORTABLE uint32_t word_e4m3(uint32_t first, uint32_t second) { return first | second << 16; }

// total * 2^exponent cut toward zero to float32, past FLT_MAX to Inf; zero is +0 (RHT-SUM, MMA-ROUND).
PORTABLE uint32_t cut_to_float(long long total, int exponent) {
  if (total == 0) return 0;
  const uint32_t sign = total < 0 ? 0x80000000u : 0;
  const uint64_t size = static_cast<uint64_t>(total < 0 ? -total : total);
  const int top = 63 - leading_zeros(size);
  const int biased = top + exponent + 127;
  if (biased > 254) return sign | INF;
  // the last place kept is 2^(top + exponent - 23), or 2^-149 for a subnormal
  const int places = biased >= 1 ? top - 23 : -149 - exponent;
  const uint64_t kept = places >= 64 ? 0 : places >= 0 ? size >> places : size << -places;
  return sign | (biased >= 1 ? static_cast<uint32_t>(biased) << 23 : 0) | (static_cast<uint32_t>(kept) & 0x7FFFFFu);
}

// RHT-ROUND: bfloat16, nearest even, NaN becomes 0x7FFF.
PORTABLE uint32_t to_bfloat16(uint32_t bits) {
  if (magnitude(bits) > INF) return 0x7FFF;
  return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

}  // namespace model
