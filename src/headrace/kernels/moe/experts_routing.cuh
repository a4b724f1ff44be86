// Routing for experts.cu: each token's experts, entries of an expert and up to eight of its tokens.
__device__ __forceinline__ u32 order_of(u16 logit, int expert) {  // greater is better; of equals, who comes first
  if (!(logit & 0x7FFF)) logit = 0;
  u32 sorted = logit & 0x8000 ? (u16)~logit : logit | 0x8000;
  return sorted << 16 | (0xFFFF - expert);
}
__device__ __forceinline__ float logit_of(u32 order) {
  u16 sorted = order >> 16;
  return wide(sorted & 0x8000 ? sorted & 0x7FFF : (u16)~sorted);
}
// What rows are multiplied by, which completes their norm. Neighbours read neighbours: all programs read the same few lines.
__device__ __forceinline__ void add_squares(const Params &p, Shared &s, int warp, int lane) {
  constexpr int SLICES = THREADS / TOKENS, MANY = 8;
  int token = threadIdx.x % TOKENS;
  float sum = 0;
  for (int first = threadIdx.x / TOKENS; first < p.pieces; first += MANY * SLICES) {
    float v[MANY];
#pragma unroll
    for (int i = 0; i < MANY; i++) v[i] = token < p.tokens && first + i * SLICES < p.pieces ? seen(p.squares + (first + i * SLICES) * p.tokens + token) : 0;
#pragma unroll
    for (int i = 0; i < MANY; i++) sum += v[i];
  }
  if (TOKENS < 32) sum = sum_of<TOKENS, 16>(sum);
  if (lane < TOKENS) s.squares[warp][lane] = sum;
}
__device__ __forceinline__ float rstd_of(const Params &p, const Shared &s, int token) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += s.squares[w][token];
  return rsqrtf(sum / HIDDEN + p.eps);
}
__device__ __forceinline__ void load_logits(u16 (&logits)[EACH_LANE], const Params &p, int token, int lane) {
#pragma unroll
  for (int i = 0; i < EACH_LANE; i++) {
    int expert = lane + 32 * i;
    logits[i] = expert < EXPERTS && token < p.tokens ? seen(p.logits + (u64)token * p.logits_row + expert) : 0xFF80;
  }
}
__device__ __forceinline__ void route(Shared &s, const u16 (&logits)[EACH_LANE], int token, int lane) {  // a warp
  u32 own[EACH_LANE];
#pragma unroll
  for (int i = 0; i < EACH_LANE; i++) own[i] = lane + 32 * i < EXPERTS ? order_of(logits[i], lane + 32 * i) : 0;
  u32 mine = 0;
  float peak = 0;
#pragma unroll
  for (int choice = 0; choice < TOP_K; choice++) {
    u32 best = own[0];
#pragma unroll
    for (int i = 1; i < EACH_LANE; i++) best = max(best, own[i]);
    best = __reduce_max_sync(~0u, best);
    if (choice == 0) peak = logit_of(best);
    if (lane == choice) mine = best;
#pragma unroll
    for (int i = 0; i < EACH_LANE; i++) own[i] = own[i] == best ? 0 : own[i];
  }
  float all = 0;
#pragma unroll
  for (int i = 0; i < EACH_LANE; i++) all += __expf(wide(logits[i]) - peak);
  all = sum_of<1, 16>(all);
  float weight = lane < TOP_K ? __expf(logit_of(mine) - peak) / all : 0;
  if (RENORMALIZE) weight /= sum_of<1, 16>(weight);
  if (lane < TOP_K) {
    int expert = 0xFFFF - (mine & 0xFFFF), pair = token * TOP_K + lane;
    s.weight[pair] = weight, s.chosen[pair] = expert;
    atomicOr(&s.members[expert], 1u << token);
  }
}
__device__ __forceinline__ void list_entries(Shared &s, int lane) {  // one warp
  int before = 0;
  for (int first = 0; first < EXPERTS; first += 128) {  // four experts a lane, 32 apart
    u64 counts = 0, ends;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int expert = first + 32 * i + lane;
      counts |= (u64)(expert < EXPERTS ? (__popc(s.members[expert]) + TOGETHER - 1) / TOGETHER : 0) << 16 * i;
    }
    ends = counts;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
      u64 other = __shfl_up_sync(~0u, ends, far);
      if (lane >= far) ends += other;
    }
    u64 all = __shfl_sync(~0u, ends, 31);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int count = counts >> 16 * i & 0xFFFF, at = before + (int)(ends >> 16 * i & 0xFFFF) - count;
      for (int j = 0; j < count; j++) s.expert[at + j] = first + 32 * i + lane | j << 12;
      before += all >> 16 * i & 0xFFFF;
    }
  }
  if (lane == 0) s.entries = before;
}
__device__ __forceinline__ void list_pairs(Shared &s) {  // all threads; of an entry, its tokens in their order
  for (int i = threadIdx.x; i < s.entries * TOGETHER; i += THREADS) {
    int entry = i / TOGETHER, expert = s.expert[entry] & 0xFFF, place = i % TOGETHER + (s.expert[entry] >> 12) * TOGETHER;
    u32 members = s.members[expert];
    for (int j = 0; j < place; j++) members &= members - 1;
    u16 pair = NONE;
    if (members) {
      pair = (__ffs(members) - 1) * TOP_K;
      while (s.chosen[pair] != expert) pair++;
    }
    s.pair[entry][i % TOGETHER] = pair;
  }
}
