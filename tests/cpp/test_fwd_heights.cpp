// Heights of the Hopper forward's tiles: the time that is reckoned, against a schedule played out.
#include "sm90/fwd_heights.h"

#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "expect.h"

using namespace flash_cuda;
using namespace flash_cuda::sm90;

namespace {

// Each SM that is free takes the next tile.
double play(int64_t many, double time, int64_t few, double short_time, int sms) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> free_at;
  for (int i = 0; i < sms; ++i) free_at.push(0);
  double end = 0;
  for (int64_t i = 0; i < many + few; ++i) {
    const double done = free_at.top() + (i < many ? time : short_time);
    free_at.pop();
    free_at.push(done);
    end = max_of(end, done);
  }
  return end;
}

void test_time() {
  for (int sms : {1, 4, 132}) {
    for (int64_t many : {0, 1, 3, 131, 132, 133, 500, 1408}) {
      for (int64_t few : {0, 1, 5, 64, 132, 300, 1000}) {
        for (double short_time : {0.5, 0.77, 1.0}) {
          const double end = time_of_tiles(many, 1.0, few, short_time, sms);
          // Between two ends of short tiles, or exact.
          EXPECT(std::abs(end - play(many, 1.0, few, short_time, sms)) < short_time / 4 + 1e-6);
        }
      }
    }
  }
  EXPECT(time_of_tiles(0, 1.0, 0, 1.0, 132) == 0);
  EXPECT(time_of_tiles(int64_t(1) << 40, 1.0, int64_t(1) << 40, 0.5, 132) > 1e10);
}

void test_heights() {
  const TileTimes times{1.45, 1.12, 0.88};
  for (int rows : {1, 64, 65, 128, 192, 193, 512, 1000, 16384, 1 << 20}) {
    for (int64_t heads : {1, 3, 16, 1000}) {
      const Heights h = best_heights<3>(rows, heads, 132, times);
      EXPECT(h.tall >= 0 && h.tall <= ceil_div(rows, 64) / 3 && h.time > 0);
    }
  }
  // 1024 rows are five tiles of three and one of one, or, in less time, four of three, two of two.
  EXPECT(best_heights<3>(1024, 256, 132, times).tall == 4);
  EXPECT(best_heights<3>(192, 132, 132, times).tall == 1);
  EXPECT(best_heights<3>(64, 132, 132, times).tall == 0);
}

}  // namespace

int main() {
  test_time();
  test_heights();
}
