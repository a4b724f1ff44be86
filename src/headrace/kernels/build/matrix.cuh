// Of kernels whose operands the copy engine brings: single instructions, barriers, descriptors, what leaves registers.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(64) Map { u64 words[16]; };
#define ONCE 0x12F0000000000000ull  // of what is read once: the second-level cache need not keep it

__device__ __forceinline__ u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void make(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(u32 to, const Map *map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
    ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void load_both(u32 to, const Map *map, int k, int row, u32 bar) {  // into both programs of a cluster of two
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
    ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"((u16)3) : "memory");
}
__device__ __forceinline__ u32 of_program(u32 at, int rank) {  // the same place in the memory of another program of the cluster
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
__device__ __forceinline__ void arrive_at(u32 bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void together() {  // all of a cluster
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void hand_over(u32 to, const float *v, u32 bar) {  // to another program of the cluster
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
    ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar) : "memory");
}
__device__ __forceinline__ float4 handed(u32 at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void put(u32 at, const float *v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void finished() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
template <int N> __device__ __forceinline__ void hold(float (&x)[N]) {  // nothing that is under way is read before this
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> __device__ __forceinline__ void hold(int (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
__device__ __forceinline__ void keep(u32 &x) { asm volatile("" : "+r"(x)); }  // in a register: it would be computed anew at each use
__device__ __forceinline__ u64 described(u32 at) {  // rows of 128 bytes, swizzled; 8 rows are 1024 bytes
  return (u64)(at >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ float wide(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u32 pack(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ void transpose(u32 (&p)[4], int t) {  // within four lanes: p[j] of lane t and p[t] of lane j change places
  bool one = t & 1, two = t & 2;
  u32 a = one ? p[0] : p[1], b = one ? p[2] : p[3];
  a = __shfl_xor_sync(~0u, a, 1); b = __shfl_xor_sync(~0u, b, 1);
  if (one) { p[0] = a; p[2] = b; } else { p[1] = a; p[3] = b; }
  a = two ? p[0] : p[2]; b = two ? p[1] : p[3];
  a = __shfl_xor_sync(~0u, a, 2); b = __shfl_xor_sync(~0u, b, 2);
  if (two) { p[0] = a; p[1] = b; } else { p[2] = a; p[3] = b; }
}
