// Where sequences lie, for dense, packed, cached and padded tensors.
#include "common/seqlen.h"
#include "expect.h"

using namespace flash_cuda;

namespace {

FwdParams dense() {
  FwdParams p;
  p.batch = 2;
  p.seqlen_q = 10;
  p.seqlen_kv = 12;
  return p;
}

void test_dense() {
  const SeqInfo s = seq_info(dense(), 1);
  EXPECT(s.q_row0 == 0 && s.kv_row0 == 0 && s.q_batch == 1 && s.kv_batch == 1);
  EXPECT(s.seqlen_q == 10 && s.seqlen_q_slot == 10);
  EXPECT(s.seqlen_kv == 12 && s.seqlen_kv_slot == 12);
}

void test_packed_with_gaps() {
  const int cu_q[] = {0, 4, 9}, cu_k[] = {0, 0, 6}, used_q[] = {4, 3}, used_k[] = {0, 9};
  FwdParams p = dense();
  p.cu_seqlens_q = cu_q;
  p.cu_seqlens_k = cu_k;
  p.seqused_q = used_q;
  p.seqused_k = used_k;
  const SeqInfo s0 = seq_info(p, 0), s1 = seq_info(p, 1);
  EXPECT(s0.q_row0 == 0 && s0.seqlen_q == 4 && s0.seqlen_kv == 0 && s0.seqlen_kv_slot == 0);
  EXPECT(s1.q_row0 == 4 && s1.seqlen_q == 3 && s1.seqlen_q_slot == 5);
  EXPECT(s1.q_batch == 0 && s1.kv_batch == 0);
  EXPECT(s1.seqlen_kv == 6);  // never past the slot
}

void test_cache() {
  const int rows[] = {5, 3}, used[] = {7, -2}, pad[] = {2, 1};
  FwdParams p = dense();
  p.cache_batch_idx = rows;
  p.seqused_k = used;
  p.leftpad_k = pad;
  const SeqInfo s0 = seq_info(p, 0), s1 = seq_info(p, 1);
  EXPECT(s0.kv_batch == 5 && s1.kv_batch == 3 && s1.q_batch == 1);
  EXPECT(s0.kv_row0 == 2 && s0.seqlen_kv == 5);
  EXPECT(s1.seqlen_kv == 0);  // nonsense counts as empty
}

}  // namespace

int main() {
  test_dense();
  test_packed_with_gaps();
  test_cache();
}
