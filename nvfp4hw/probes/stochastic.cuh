// Stochastic conversions of four float32 with one random word.
#pragma once

#include "models.cuh"
#include "sweep.cuh"

// The words: none, all, every single bit, and 32 arbitrary ones.
constexpr uint32_t WORDS = 66;

PORTABLE uint32_t random_word(uint32_t index) {
  if (index == 0) return 0;
  if (index == 1) return 0xFFFFFFFFu;
  return index < 34 ? 1u << (index - 2) : hashed(index);
}

// Format: `bits` of a code, `last`, the largest magnitude code, `quadruple(x, word)`, the codes of x[0..3] from the
// low end up, or, with `alone`, `single(x, field)`, the code of one; `model(x, field)`, what it must be;
// `field(word, element)`, `word(first, second)`, `value(code)`, `gap(code)`.

// Every float32 in each of the four positions with each word: curve 4 * word + element.  In an instruction the other
// three positions hold other numbers, and 0x100 in a recorded code marks that one of their codes was wrong; software
// converts one number at a time and is not asked (`alone`).
template <class Format>
struct Patterns {
  PORTABLE uint32_t curves() const { return 4 * WORDS; }
  PORTABLE uint32_t found(uint32_t curve, uint32_t x) const {
    const uint32_t word = random_word(curve / 4);
    const int element = static_cast<int>(curve % 4);
    if constexpr (Format::alone) {
      return Format::single(x, Format::field(word, element));
    } else {
      uint32_t in[4];
      for (int i = 0; i < 4; ++i) in[i] = i == element ? x : scattered(x + static_cast<uint32_t>(i));
      const uint32_t codes = Format::quadruple(in, word);
      bool others = true;
      uint32_t mine = 0;
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = codes >> (i * Format::bits) & ((1u << Format::bits) - 1);
        if (i == element) mine = code;
        else others = others && code == Format::model(in[i], Format::field(word, i));
      }
      return mine | (others ? 0 : 0x100);
    }
  }
  PORTABLE uint32_t expected(uint32_t curve, uint32_t x) const {
    return Format::model(x, Format::field(random_word(curve / 4), static_cast<int>(curve % 4)));
  }
};

// All 2^16 fields at the place where each rounds up: point i is the word with fields i and 2^16 - 1 - i, so that
// every element meets every field.  Curve 2 * (4 * code + element) + below: from `code` to the next, at the smallest
// float32 that must go up and one unit in the last place below it.  Odd codes are tried with negative numbers.
template <class Format>
struct Thresholds {
  PORTABLE uint32_t curves() const { return 8 * Format::last; }
  PORTABLE static uint32_t argument(uint32_t curve, uint32_t field) {
    const uint32_t code = curve / 8;
    // exact: 16 bits below the leading bits of value and gap
    const float part = static_cast<float>(65536 - field) * (1.0f / 65536);
    const uint32_t at = bits_of(Format::value(code) + Format::gap(code) * part);
    return (at - (curve & 1)) | (code & 1 ? 0x80000000u : 0);
  }
  PORTABLE uint32_t found(uint32_t curve, uint32_t i) const {
    const uint32_t word = Format::word(i, 65535 - i);
    const int element = static_cast<int>(curve / 2 % 4);
    const uint32_t x = argument(curve, Format::field(word, element));
    if constexpr (Format::alone) {
      return Format::single(x, Format::field(word, element));
    } else {
      const uint32_t in[4] = {x, x, x, x};
      return Format::quadruple(in, word) >> (element * Format::bits) & ((1u << Format::bits) - 1);
    }
  }
  PORTABLE uint32_t expected(uint32_t curve, uint32_t) const {
    const uint32_t code = curve / 8;
    return (curve & 1 ? code : code + 1) | (code & 1) << (Format::bits - 1);
  }
};

template <class Format>
Counts sweep_stochastic(Report& report, const char* patterns, const char* thresholds) {
  const Counts all =
      sweep(report, patterns, Patterns<Format>{}, report.number("first", 0), report.number("count", 1ull << 32));
  const Counts fields =
      sweep(report, thresholds, Thresholds<Format>{}, report.number("field", 0), report.number("fields", 1u << 16));
  return Counts{all.compared + fields.compared, all.different + fields.different};
}

// The two formats without their instruction.
struct E2m1 {
  static constexpr bool alone = false;
  static constexpr int bits = 4;
  static constexpr uint32_t last = 7;
  PORTABLE static uint32_t model(uint32_t x, uint32_t field) { return model::rs_e2m1(x, field); }
  PORTABLE static uint32_t field(uint32_t word, int element) { return model::field_e2m1(word, element); }
  PORTABLE static uint32_t word(uint32_t first, uint32_t second) { return model::word_e2m1(first, second); }
  PORTABLE static uint32_t single(uint32_t x, uint32_t field) { return model(x, field); }
  PORTABLE static float value(uint32_t code) {
    const float number = static_cast<float>(code);
    return code < 4 ? 0.5f * number : code < 6 ? number - 2 : 2 * number - 8;
  }
  PORTABLE static float gap(uint32_t code) { return code < 4 ? 0.5f : code < 6 ? 1.0f : 2.0f; }
};

struct E4m3 {
  static constexpr bool alone = false;
  static constexpr int bits = 8;
  static constexpr uint32_t last = 126;
  PORTABLE static uint32_t model(uint32_t x, uint32_t field) { return model::rs_e4m3(x, field); }
  PORTABLE static uint32_t field(uint32_t word, int element) { return model::field_e4m3(word, element); }
  PORTABLE static uint32_t word(uint32_t first, uint32_t second) { return model::word_e4m3(first, second); }
  PORTABLE static uint32_t single(uint32_t x, uint32_t field) { return model(x, field); }
  PORTABLE static float gap(uint32_t code) {  // 2^-9 below 2^-6, then doubling every 8 codes
    return float_of((code < 8 ? 118u : 117u + code / 8) << 23);
  }
  PORTABLE static float value(uint32_t code) {
    return (code < 8 ? static_cast<float>(code) : static_cast<float>(8 + code % 8)) * gap(code);
  }
};

// The simulation's instruction: the model of each element, or the model with the planted fault.
template <class Format>
uint32_t simulated_quadruple(const uint32_t x[4], uint32_t word) {
  uint32_t codes = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t field = Format::field(word, fault_is("operands-reversed") ? 3 - i : i);
    if (fault_is("no-bit-reversal") && i & 1) field = model::reversed16(field);
    if (fault_is("one-less") && field == 0x8000) field = 0x7FFF;
    codes |= Format::model(x[i], field) << (i * Format::bits);
  }
  return codes;
}
