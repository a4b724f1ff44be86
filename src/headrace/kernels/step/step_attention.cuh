// Of the decode step: attention of one query a sequence over a paged cache, keys dealt to programs and warps.

// --- attention

constexpr int WHOLE = 512, SPAN = 256;  // up to WHOLE keys are one item: another round of keys is quicker than joining parts

__device__ __forceinline__ int parts_of(int context, int span) { return context <= WHOLE ? context > 0 : (context + span - 1) / span; }

struct Item { int row, head, begin, end, splits, index, first; };

__device__ __forceinline__ Item item_of(const Shared& s, int index) {
  int base = 0;
  Item item = {-1, 0, 0, 0, 1, index, 0};
  for (int row = 0; row < ROWS; ++row) {
    int splits = parts_of(s.context[row], s.span), count = splits * HK;
    if (index >= base && index < base + count) {
      int within = index - base, part = within % splits;
      item.row = row; item.head = within / splits; item.splits = splits;
      item.begin = part * s.span; item.end = splits == 1 ? s.context[row] : min(item.begin + s.span, s.context[row]);
      item.first = index - part;
    }
    base += count;
  }
  return item;
}

// --- codes of keys and values (kernels/attention/kv_codes.py)

struct Codes { u32 x, y; };  // of 8 elements
template <bool> struct Eight { typedef Vec type; };
template <> struct Eight<true> { typedef Codes type; };
typedef Eight<KV != PLAIN>::type Some;

__device__ __forceinline__ u32 from_halves(u32 v) {  // float16: each code that is a float is one, and a bfloat16, too
  float first, second;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(first), "=f"(second) : "r"(v));
  return pack(first, second);
}
__device__ __forceinline__ u32 whole_pair(u32 codes) {  // each below a zero byte: 128 + the lower seven bits, less 128 or 256
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"((codes & 0x007f007f) | 0x43004300), "r"((codes & 0x00800080) | 0x43004300));
  return r;
}
__device__ __forceinline__ void widened(u32& first, u32& second, u32 codes) {
  if (KV == INT8) {
    first = whole_pair(permuted(codes, 0, 0x4140));
    second = whole_pair(permuted(codes, 0, 0x4342));
    return;
  }
  if (KV == E4M3) asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(first), "=r"(second) : "r"(codes));
  else first = permuted(codes, 0, 0x1404), second = permuted(codes, 0, 0x3424);
  first = from_halves(first);
  second = from_halves(second);
}
__device__ __forceinline__ Vec wide(const Codes& c) { Vec v; widened(v.x, v.y, c.x); widened(v.z, v.w, c.y); return v; }
__device__ __forceinline__ Vec wide(const Vec& v) { return v; }

// --- keys and values

// 16 keys: of key 8 n + g, elements 32 j + 8 t … + 7 come to lane (g, t). INT8: scales of keys 8 n + 2 t and the next.
struct Keys { Some k[2][D / 32], v[2][D / 32]; u32 scales[KV == INT8 ? 2 : 1][2]; };

// The key of token ``place`` of a block, or of values, behind HK heads of keys.
__device__ __forceinline__ unsigned char* token_at(const Params& p, int layer, long long block, int head, int place) {
  return p.kv + block * p.block_stride + ((long long)(2 * layer) * HK + head) * PART + place % BLOCK * HELD;
}
__device__ __forceinline__ unsigned char* scale_at(unsigned char* token, int place) {  // of INT8
  return token + (BLOCK - place % BLOCK) * HELD + 2 * (place % BLOCK);
}

__device__ __forceinline__ unsigned char* keys_at(const Params& p, int layer, const Item& item, int key) {
  return token_at(p, layer, __ldg(p.block_table + (long long)item.row * p.table_stride + key / BLOCK), item.head, key);
}

__device__ __forceinline__ void load_some(Vec& v, const void* at) { v = load_l2(at); }
__device__ __forceinline__ void load_some(Codes& v, const void* at) {
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
}
__device__ __forceinline__ u32 load_word(const void* at) { u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory"); return v; }

__device__ __forceinline__ void load_keys(Keys& keys, const Params& p, int layer, const Item& item, int round, int warp, int lane) {
  int key = item.begin + round * 16 * WARPS + warp * 16, g = lane / 4, t = lane % 4;
  bool any = key < item.end;  // every register is set on every way: what the compiler takes for kept from layer to layer it spills
  unsigned char* base = any ? keys_at(p, layer, item, key) : p.kv;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    bool here = key + n * 8 + g < item.end;
    const unsigned char* at = base + (n * 8 + g) * HELD + t * (HELD * 8 / D);
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      keys.k[n][j] = keys.v[n][j] = Some{};
      if (here) load_some(keys.k[n][j], at + j * (HELD * 32 / D));
      if (here) load_some(keys.v[n][j], at + HK * PART + j * (HELD * 32 / D));
    }
    if (KV == INT8) {
      bool there = key + n * 8 + 2 * t < item.end;
      const unsigned char* scales = scale_at(base, any ? key : 0) + 2 * (n * 8 + 2 * t);
      keys.scales[0][n] = there ? load_word(scales) : 0;
      keys.scales[KV == INT8][n] = there ? load_word(scales + HK * PART) : 0;
    }
  }
}

// Keys' (0) or values' (1), that all tokens of a head share.
__device__ __forceinline__ float shared_scale(const Shared& s, int layer, int which, int head) {
  return SHARED_SCALES ? __ldg((const float*)s.weights[layer][SHARED_SCALES ? KV_SCALES + which : 0] + head) : 1.0f;
}
__device__ __forceinline__ float half_of(u32 v, int second) { return second ? high(v) : low(v); }
__device__ __forceinline__ void with_half(u32& v, int second, u32 half) { v = permuted(v, half, second ? 0x5410 : 0x3254); }

// Looks until nothing is lacking any more, in any lane.
template <class Look> __device__ __forceinline__ void until_there(Look lacking) {
  Patience patience;
  while (__any_sync(~0u, lacking())) patience.spend();
}

// The newest key is of this very step, and comes from the programs that computed it.
__device__ __forceinline__ const bf16* newest_at(const Params& p, int layer, const Item& item) {
  return handed(p, layer, QKV_AT) + item.row * WIDTH + (HQ + item.head) * D;
}

// As codes: into shared memory, for the warp whose key it is, and into the cache.
__device__ __forceinline__ void code_newest(const Params& p, Shared& s, int layer, const Item& item, int newest, int warp, int lane) {
  if (!KV || newest >= item.end || (newest - item.begin) / 16 % WARPS != warp) return;
  const bf16* from = newest_at(p, layer, item) + lane * (D / 32);
  const int slot = s.slot[item.row];
  u32 x[2][D / 64];
  until_there([&] {
    bool lacking = false;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      u32& word = x[i / (D / 64)][i % (D / 64)];
      word = __float_as_uint(lookf((const float*)(from + i / (D / 64) * HK * D) + i % (D / 64)));
      lacking |= lacks(word, word, word, word);
    }
    return lacking;
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned char* to = slot >= 0 ? token_at(p, layer, slot / BLOCK, item.head, slot) + i * HK * PART : nullptr;
    Scale scale = {shared_scale(s, layer, i, item.head)};
    if (KV == INT8) {
      scale = own_scale(x[i]);
      s.newest_scales[i] = scale.held;
      if (to && lane == 0) *(bf16*)scale_at(to, slot) = scale.held;
    }
#pragma unroll
    for (int j = 0; j < D / 64; ++j) {
      bf16 codes = coded(x[i][j], scale);
      *(bf16*)&s.newest[i][lane * (D / 32) + 2 * j] = codes;
      if (to) *(bf16*)(to + lane * (D / 32) + 2 * j) = codes;
    }
  }
  __syncwarp();
}

// To lanes (key % 8, t); also keys before it from ``oldest`` on, of the rows before, up to ``end``.
__device__ __forceinline__ void take_newest(Vec (&k)[2][D / 32], Vec (&v)[2][D / 32], const bf16* from, int key, int newest, int oldest, int end, const Shared&, int lane) {
  key += lane / 4;
  from += (key - newest) * WIDTH;
  until_there([&] {
    bool lacking = false;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (key + n * 8 >= oldest && key + n * 8 <= newest && key + n * 8 < end) {
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
          k[n][j] = look(from + n * 8 * WIDTH + j * 32);
          v[n][j] = look(from + n * 8 * WIDTH + HK * D + j * 32);
        }
#pragma unroll
        for (int j = 0; j < D / 32; ++j) lacking |= lacks(k[n][j]) | lacks(v[n][j]);
      }
    return lacking;
  });
}
__device__ __forceinline__ void take_newest(Codes (&k)[2][D / 32], Codes (&v)[2][D / 32], const bf16*, int key, int newest, int, int, const Shared& s, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
    if (key + n * 8 + lane / 4 == newest)
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        k[n][j] = *(const Codes*)&s.newest[0][j * 32 + lane % 4 * 8];
        v[n][j] = *(const Codes*)&s.newest[1][j * 32 + lane % 4 * 8];
      }
}

__device__ __forceinline__ void load_newest(Keys& keys, const Params& p, const Shared& s, int layer, const Item& item, int newest, int round, int warp, int lane) {
  int key = item.begin + round * 16 * WARPS + warp * 16, t = lane % 4, oldest = newest - (KV ? 0 : s.drafts[item.row]);
  if (newest < key || oldest >= min(key + 16, item.end)) return;
  take_newest(keys.k, keys.v, newest_at(p, layer, item) + t * 8, key, newest, oldest, item.end, s, lane);
#pragma unroll
  for (int n = 0; n < (KV == INT8 ? 2 : 0); ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if ((newest - key - n * 8) / 2 == t && newest - key >= n * 8) with_half(keys.scales[i * (KV == INT8)][n], newest % 2, s.newest_scales[i]);
}

// What a program will attend to comes into the second-level cache while it computes queries.
__device__ __forceinline__ void prefetch_keys(const Params& p, const Shared& s, int layer) {
  if ((int)blockIdx.x >= s.items) return;
  Item item = item_of(s, blockIdx.x);
  int key = item.begin + threadIdx.x;
  if (key >= item.end) return;
  const unsigned char* at = keys_at(p, layer, item, key);
#pragma unroll
  for (int i = 0; i < HELD; i += 128) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at + i));
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at + HK * PART + i));
  }
}

// peak and mass: of query g; mass is this lane's share. o[2 j + h]: elements 32 j + 8 (g / 2) + 4 h + g % 2 and 2 more, of queries 2 t, 2 t + 1.
struct Softmax { float peak, mass; float o[D / 16][4]; };


__device__ __forceinline__ void attend_keys(Softmax& a, const Keys& keys, const u32 (&q)[D / 32][4], const Item& item, float scale, int round, int warp, int lane) {
  int key = item.begin + round * 16 * WARPS + warp * 16, t = lane % 4;
  if (key >= item.end) return;
  float c[2][4] = {};
#pragma unroll
  for (int j = 0; j < D / 32; ++j)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Vec k = wide(keys.k[n][j]);
      mma(c[n], q[j][0], 0, q[j][1], 0, k.x, k.y);
      mma(c[n], q[j][2], 0, q[j][3], 0, k.z, k.w);
    }
  float most = MINUS_INFINITY;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float by = KV == INT8 ? half_of(keys.scales[0][n], e) * scale : scale;
      c[n][e] = key + n * 8 + 2 * t + e < item.end ? c[n][e] * by : MINUS_INFINITY;
      most = fmaxf(most, c[n][e]);
    }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  most = fmaxf(most, a.peak);
  float alpha = exp2_(a.peak - most), sum = 0.0f;
  a.peak = most;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      c[n][e] = exp2_(c[n][e] - most);
      sum += c[n][e];
      if (KV == INT8) c[n][e] = key + n * 8 + 2 * t + e < item.end ? c[n][e] * half_of(keys.scales[KV == INT8][n], e) : 0.0f;
    }
  a.mass = a.mass * alpha + sum;
  u32 early = pack(c[0][0], c[0][1]), late = pack(c[1][0], c[1][1]);  // sequences' weights as the other operand wants them
  float first = __shfl_sync(~0u, alpha, 8 * t), second = __shfl_sync(~0u, alpha, 8 * t + 4);
#pragma unroll
  for (int j = 0; j < D / 32; ++j) {
    const Vec v0 = wide(keys.v[0][j]), v1 = wide(keys.v[1][j]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float (&o)[4] = a.o[2 * j + h];
      o[0] *= first; o[1] *= second; o[2] *= first; o[3] *= second;
      mma(o, transposed(h ? v0.z : v0.x), transposed(h ? v0.w : v0.y), transposed(h ? v1.z : v1.x), transposed(h ? v1.w : v1.y), early, late);
    }
  }
}

// What the warps found becomes one: in ``attended``, or in ``parts`` where an item is not the whole sequence.
__device__ __forceinline__ void join_warps(Softmax& a, const Params& p, Shared& s, int layer, const Item& item, int warp, int lane) {
  int g = lane / 4, t = lane % 4;
  const float by = shared_scale(s, layer, 1, item.head);
  a.mass += __shfl_xor_sync(~0u, a.mass, 1);
  a.mass += __shfl_xor_sync(~0u, a.mass, 2);
  if (t == 0) { s.peak[warp][g] = a.peak; s.mass[warp][g] = a.mass; }
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int query = 2 * t + e % 2, d = i / 2 * 32 + g / 2 * 8 + i % 2 * 4 + e / 2 * 2 + g % 2;
      if (query < G) s.red[(warp * G + query) * D + d] = a.o[i][e] * by;
    }
  __syncthreads();
  for (int at = threadIdx.x; at < G * D; at += THREADS) {
    int query = at / D;
    float most = s.peak[0][query];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s.peak[w][query]);
    float mass = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float by = exp2_(s.peak[w][query] - most);
      mass += by * s.mass[w][query];
      sum += by * s.red[(w * G + query) * D + at % D];
    }
    if (item.splits == 1) {
      handed(p, layer, ATTENDED_AT)[(item.row * HQ + item.head * G) * D + at] = narrow(sum / mass);
    } else {
      p.parts[(long long)item.index * G * D + at] = sum;
      if (at % D == 0) { p.peaks[item.index * 2 * G + query] = most; p.peaks[(item.index * 2 + 1) * G + query] = mass; }
    }
  }
}

// The last of the programs that share a sequence's head adds up their parts, in the order of the keys.
__device__ __forceinline__ void join_parts(const Params& p, Shared& s, int layer, const Item& item) {
  u32* ticket = p.tickets + item.row * HK + item.head;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 count;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(ticket) : "memory");
    s.last = count == (u32)item.splits - 1;
    if (s.last) *ticket = 0;
  }
  __syncthreads();
  if (!s.last) return;
  for (int at = threadIdx.x; at < G * D; at += THREADS) {
    int query = at / D;
    float most = MINUS_INFINITY, mass = 0.0f, sum = 0.0f;
#pragma unroll 4
    for (int i = item.first; i < item.first + item.splits; ++i) most = fmaxf(most, load_l2f(&p.peaks[i * 2 * G + query]));
#pragma unroll 4
    for (int i = item.first; i < item.first + item.splits; ++i) {
      float by = exp2_(load_l2f(&p.peaks[i * 2 * G + query]) - most);
      mass += by * load_l2f(&p.peaks[(i * 2 + 1) * G + query]);
      sum += by * load_l2f(&p.parts[(long long)i * G * D + at]);
    }
    handed(p, layer, ATTENDED_AT)[(item.row * HQ + item.head * G) * D + at] = narrow(sum / mass);
  }
}

__device__ __forceinline__ void load_query(u32 (&q)[D / 32][4], const Params& p, int layer, const Item& item, int lane) {
  int g = lane / 4, t = lane % 4;
  const bf16* from = handed(p, layer, QKV_AT) + item.row * WIDTH + (item.head * G + g) * D;
  until_there([&] {
    bool lacking = false;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      Vec v = {0, 0, 0, 0};
      if (g < G) { v = look(from + j * 32 + t * 8); lacking |= lacks(v); }
      q[j][0] = v.x; q[j][1] = v.y; q[j][2] = v.z; q[j][3] = v.w;
    }
    return lacking;
  });
}

__device__ __forceinline__ void attention(const Params& p, Shared& s, int layer, int warp, int lane) {
  Keys keys[2];
  u32 q[D / 32][4];
  for (int index = blockIdx.x; index < s.items; index += GRID) {
    Item item = item_of(s, index);
    float scale = p.scale * 1.4426950408889634f * shared_scale(s, layer, 0, item.head);
    int newest = s.context[item.row] - 1, rounds = (item.end - item.begin + 16 * WARPS - 1) / (16 * WARPS);
    load_keys(keys[0], p, layer, item, 0, warp, lane);  // what this step does not change comes before its queries
    load_keys(keys[1], p, layer, item, 1, warp, lane);
    load_query(q, p, layer, item, lane);
    code_newest(p, s, layer, item, newest, warp, lane);
    Softmax a = {MINUS_INFINITY, 0.0f, {}};
    for (int round = 0; round < rounds; round += 2) {
      load_newest(keys[0], p, s, layer, item, newest, round, warp, lane);
      load_newest(keys[1], p, s, layer, item, newest, round + 1, warp, lane);
      attend_keys(a, keys[0], q, item, scale, round, warp, lane);
      load_keys(keys[0], p, layer, item, round + 2, warp, lane);
      attend_keys(a, keys[1], q, item, scale, round + 1, warp, lane);
      load_keys(keys[1], p, layer, item, round + 3, warp, lane);
    }
    join_warps(a, p, s, layer, item, warp, lane);
    if (item.splits > 1) join_parts(p, s, layer, item);
    __syncthreads();
  }
}
