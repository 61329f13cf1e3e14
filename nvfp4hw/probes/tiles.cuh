// Words of the NVFP4 MMA: what the two programs share (mma.sync on sm_120, tcgen05 on sm_100 and sm_103).
//
// A tile is 128 rows of A and 32 columns of B, K = 64, with their scales and C; D is 128 x 32 words.  The driver
// writes tiles to tiles.bin and reads D from words.bin.  PASS is the model `blackwell` of docs/spec.md (MMA-*).
#pragma once

#include "models.cuh"
#include "report.cuh"

namespace mma {

constexpr int ROWS = 128, COLUMNS = 32, BYTES = 32;  // 64 codes in 32 bytes, element 2i in the low nibble of byte i

struct Tile {
  uint8_t a[ROWS][BYTES], b[COLUMNS][BYTES];
  uint8_t sa[ROWS][4], sb[COLUMNS][4];
  uint32_t c[ROWS][COLUMNS];
};
static_assert(sizeof(Tile) == 22144, "the driver writes tiles of this size");

PORTABLE uint32_t word_at(const uint8_t* bytes) {
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
}

PORTABLE int halves(uint32_t code) {  // value of an E2M1 code in halves
  const int m = static_cast<int>(code & 7);
  const int size = m < 4 ? m : m < 6 ? 2 * m - 4 : 4 * m - 16;
  return code & 8 ? -size : size;
}

// One word of the model: four groups of 16 products and C, each cut toward zero 35 places below the largest exponent.
PORTABLE uint32_t model_word(const uint8_t* a, const uint8_t* b, const uint8_t* sa, const uint8_t* sb, uint32_t c) {
  bool nan = model::magnitude(c) > model::INF;
  for (int g = 0; g < 4; ++g) nan = nan || (sa[g] & 127) == 127 || (sb[g] & 127) == 127;
  if (nan) return model::NAN_WORD;
  if (model::magnitude(c) == model::INF) return c;

  constexpr int DEAD = -139;
  long long group[4];
  int exponent[4], largest = DEAD;
  for (int g = 0; g < 4; ++g) {
    const int ma = sa[g] & 127, mb = sb[g] & 127;
    const int significands = (ma < 8 ? ma : 8 + ma % 8) * (mb < 8 ? mb : 8 + mb % 8);
    exponent[g] = (ma < 8 ? -6 : ma / 8 - 7) + (mb < 8 ? -6 : mb / 8 - 7);
    int sum = 0;
    bool live = false;
    for (int i = 0; i < 8; ++i) {
      const uint32_t x = a[8 * g + i], y = b[8 * g + i];
      const int low = halves(x & 15) * halves(y & 15), high = halves(x >> 4) * halves(y >> 4);
      live = live || low || high;
      sum += low + high;
    }
    group[g] = static_cast<long long>(sum) * significands;  // in units of 2^(exponent - 8)
    if (live && significands && exponent[g] > largest) largest = exponent[g];
  }
  const uint32_t u = model::magnitude(c);
  const model::Unpacked unpacked = model::unpacked(u);
  if (u) {
    const int e = 63 - leading_zeros(unpacked.significand) + unpacked.exponent - 150;
    if (e > largest) largest = e;
  }

  const int floor = largest - 35;
  long long total = 0;
  for (int g = 0; g <= 4; ++g) {
    const long long term = g < 4 ? group[g] : (c >> 31 ? -1ll : 1ll) * static_cast<long long>(unpacked.significand);
    const int left = (g < 4 ? exponent[g] - 8 : unpacked.exponent - 150) - floor;
    const long long size = term < 0 ? -term : term;
    const long long moved = left >= 0 ? size << left : left < -63 ? 0 : size >> -left;
    total += term < 0 ? -moved : moved;
  }
  return model::cut_to_float(total, floor);
}

PORTABLE uint32_t model_word(const Tile& tile, int m, int n) {
  return model_word(tile.a[m], tile.b[n], tile.sa[m], tile.sb[n], tile.c[m][n]);
}

struct Wrong {
  uint32_t tile, m, n, found, expected;
};

// Reads the tiles, runs `launch(tiles on the device, how many, words on the device)`, compares and reports.
template <class Launch>
int run(Report& report, Launch launch) {
  const std::vector<Tile> tiles = report.read<Tile>("tiles.bin");
  std::vector<uint32_t> words(tiles.size() * ROWS * COLUMNS, 0xDEADBEEFu);
  uint32_t* there = on_device(words);
  launch(on_device(tiles), static_cast<int>(tiles.size()), there);
  from_device(words, there);
  report.say("tiles %zu", tiles.size());
  report.file("words.bin", words);
  unsigned long long different = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    const int m = static_cast<int>(i / COLUMNS % ROWS), n = static_cast<int>(i % COLUMNS);
    const size_t tile = i / (ROWS * COLUMNS);
    const uint32_t expected = model_word(tiles[tile], m, n);
    if (words[i] == expected) continue;
    if (different++ < 8)
      report.say("counterexample tile %zu row %d column %d found 0x%08X expected 0x%08X", tile, m, n, words[i],
                 expected);
  }
  return report.verdict(words.size(), different);
}

// The simulation's D.
inline void simulate(const Tile* tiles, int count, uint32_t* words) {
  for (int t = 0; t < count; ++t)
    for (int m = 0; m < ROWS; ++m)
      for (int n = 0; n < COLUMNS; ++n) *words++ = model_word(tiles[t], fault_is("swapped-rows") ? m ^ 1 : m, n);
}

}  // namespace mma
