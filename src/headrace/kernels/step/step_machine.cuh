// Of the decode step: single instructions, and the ring of weights that each warp keeps full.

// --- instructions

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ bf16 narrow(float v) { bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ float exp2_(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
struct Vec { u32 x, y, z, w; };
__device__ __forceinline__ Vec load_l2(const void* p) {  // what other programs wrote: past the first-level cache
  Vec v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ Vec look(const void* p) {  // what another program may write at any time
  Vec v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float lookf(const float* p) { float v; asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
// Whether a half of any word is 0xffff: of ~w, zero.
__device__ __forceinline__ bool lacks(u32 x, u32 y, u32 z, u32 w) {
  return (((0xfffefffeu - x) & x) | ((0xfffefffeu - y) & y) | ((0xfffefffeu - z) & z) | ((0xfffefffeu - w) & w)) & 0x80008000u;
}
__device__ __forceinline__ bool lacks(const Vec& v) { return lacks(v.x, v.y, v.z, v.w); }
__device__ __forceinline__ float load_l2f(const float* p) { float v; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ Vec load_shared(u32 at) {
  Vec v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 permuted(u32 x, u32 y, u32 how) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(how)); return r; }
// Four e4m3 as bfloat16: the first and third, the second and fourth. Put in its place an exponent is 120 too small.
__device__ __forceinline__ u32 scaled_up(u32 sign, u32 size) {
  u32 r;
  asm("lop3.b32 %0, %1, 0x80008000, %2, 0xEA;" : "=r"(r) : "r"(sign), "r"(size));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(r), "r"(0x7B807B80u));
  return r;
}
__device__ __forceinline__ void widen_four(u32 codes, u32& even, u32& odd) {
  even = scaled_up(codes << 8, codes << 4 & 0x07F007F0u);
  odd = scaled_up(codes, codes >> 4 & 0x07F007F0u);
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void barrier_init(u64* at) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(at)) : "memory"); }
__device__ __forceinline__ void expect(u64* at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(at)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool arrived(u64* at, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(address(at)), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void give_up() { asm volatile("trap;"); }
struct Patience {  // a bound on waiting: a program that never comes must not keep the device for ever
  u32 spins = 0;
  u64 begin;
  __device__ __forceinline__ void spend() {
    if ((++spins & 255) == 1) {
      u64 t = now();
      if (spins == 1) begin = t;
      else if (t - begin > PATIENCE_NS) give_up();
    }
  }
};
__device__ __forceinline__ void wait_full(u64* at, u32 parity) {
  Patience patience;
  while (!arrived(at, parity)) patience.spend();
}
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u64* full, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(address(full)), "l"(policy) : "memory");
}

// --- the ring of a warp: what comes next

struct Ring {
  u32 base;  // of this warp's slots
  u64* full;
  u64 policy;
  int layer, phase, group, chunk, tile;  // of the next copy; tile within its group
  int fill;                              // its slot
  int slot;                              // of the next to be read
  u32 parity;
};

__device__ __forceinline__ int row_of(int phase, int tile, int i) {
  if (phase == UP_P) return tile * 4 + (i & 3) + (i >> 2) * INNER;
  if (phase == QKV_P && tile < (HQ + HK) * (D / 8)) return tile / (D / 8) * D + tile % (D / 8) * 4 + (i & 3) + (i >> 2) * (D / 2);
  return tile * 8 + i;
}

// Goes on to the next tile that is this warp's: through the tiles of a group, its chunks of K, groups, operators, layers.
__device__ __forceinline__ void settle_ring(Ring& r, const Shared& s, int warp) {
  while (r.layer < LAYERS && r.tile >= min(GROUP_TILES, s.tiles[r.phase] - r.group)) {
    if (++r.chunk == deals[r.phase].chunks) {
      r.chunk = 0;
      r.group += GROUP_TILES;
      if (r.group >= s.tiles[r.phase]) {
        r.group = 0;
        if (++r.phase == 4) { r.phase = 0; ++r.layer; }
      }
    }
    r.tile = warp >> deals[r.phase].shift;
  }
}

// One more chunk into the slot that was read last.
__device__ __forceinline__ void refill(Ring& r, const Shared& s, int warp, int lane) {
  if (r.layer >= LAYERS) return;
  const Deal& d = deals[r.phase];
  u64* full = r.full + r.fill;
  if (lane == 0) expect(full, 8 * ITEM * d.kc);
  __syncwarp();
  if (lane < 8) {
    int part = (warp & ((1 << d.shift) - 1)) * d.slice + r.chunk * d.kc;
    long long row = row_of(r.phase, s.first[r.phase] + r.group + r.tile, lane);
    const unsigned char* from = (const unsigned char*)s.weights[r.layer][r.phase] + (row * d.k + part) * ITEM;
    bulk_copy(r.base + r.fill * SLOT_BYTES + lane * d.pitch, from, d.kc * ITEM, full, r.policy);
  }
  r.fill = r.fill + 1 == SLOTS ? 0 : r.fill + 1;
  r.tile += WARPS >> d.shift;
  settle_ring(r, s, warp);
}
