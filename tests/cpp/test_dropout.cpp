// The generator of dropout masks against the published vectors, and what it is keyed by.
#include "common/dropout.cuh"

#include <set>

#include "expect.h"

using namespace flash_cuda;

namespace {

// Random123, examples/kat_vectors: philox4x32 10.
void test_known_answers() {
  const struct {
    uint32_t counter[4], key[2], answer[4];
  } vectors[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                 {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                  {0xffffffff, 0xffffffff},
                  {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                 {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                  {0xa4093822, 0x299f31d0},
                  {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (const auto& v : vectors) {
    const PhiloxWords words =
        philox4x32_10(v.key[0], v.key[1], v.counter[0], v.counter[1], v.counter[2], v.counter[3]);
    for (int i = 0; i < 4; ++i) EXPECT(words.word[i] == v.answer[i]);
  }
}

void test_keys() {
  const int64_t states[][2] = {{7, 0}, {8, 0}, {7 + (int64_t{1} << 32), 0}, {7, 4}, {-1, 0}};
  FwdParams p;
  p.num_heads_q = 3;
  p.dropout_p = 0.25f;
  std::set<uint32_t> words;
  int drawn = 0;
  for (const auto& state : states) {
    p.rng_state = state;
    for (int batch : {0, 1}) {
      for (int head : {0, 2}) {
        const Dropout d = Dropout::make(p, batch, head);
        for (int row : {0, 1, 70000}) {
          for (int quad : {0, 1, 20000}) {
            for (uint32_t w : d.words(row, quad).word) {
              words.insert(w);
              ++drawn;
            }
          }
        }
      }
    }
  }
  EXPECT(static_cast<int>(words.size()) >= drawn - 1);  // a chance meeting of 720 in 2^32
}

void test_rate() {
  const int64_t state[2] = {123, 0};
  FwdParams p;
  p.num_heads_q = 1;
  p.rng_state = state;
  for (float rate : {0.1f, 0.5f, 0.9f}) {
    p.dropout_p = rate;
    const Dropout d = Dropout::make(p, 0, 0);
    int dropped = 0;
    for (int row = 0; row < 200; ++row) {
      for (int col = 0; col < 200; ++col) dropped += !d.keep(row, col);
    }
    const float seen = static_cast<float>(dropped) / 40000.0f;
    EXPECT(seen > rate - 0.01f && seen < rate + 0.01f);
    EXPECT(d.keep_scale * (1.0f - rate) > 0.999f && d.keep_scale * (1.0f - rate) < 1.001f);
  }
  EXPECT(Dropout::threshold_of(0.5f) == 0x80000000u);
  EXPECT(Dropout::threshold_of(0.0f) == 0);
}

}  // namespace

int main() {
  test_known_answers();
  test_keys();
  test_rate();
}
